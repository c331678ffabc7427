"""Training whose linear layers multiply in 8 bits, forward and backward; the weights themselves stay float32.

Each of the three products has one scale per row of each operand:
    out = x Wᵀ      tokens of x, rows of W
    dx  = dout W    tokens of dout, columns of W
    dW  = doutᵀ x   sums run over tokens, so scales of tokens cannot be taken out of them. One operand (the wider) goes
                    in as it was rounded for the first two products; the other is multiplied with those scales before
                    it is rounded with scales of its own, one per channel.
So what is wide is rounded once, with a GELU before it (or its derivative) in that same pass. Activations are kept for
the backward pass in 8 bits. In a graph of torch.compile tokens are rounded in the pass that makes them.

int8: 127 levels up and down, exact sums (as in A. Dettmers et al. 2022, arXiv 2208.07339, applied to training by
M. Wortsman et al. 2023, arXiv 2304.13013). fp8: e4m3 for all operands (P. Micikevicius et al. 2022, arXiv 2209.05433).

Shape suffixes: M tokens, K in features, N out features, H hidden features.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitkernels.autocast import dtype_of
from vitkernels.bridge.operator import differentiable_once
from vitkernels.errors import UsageError, unknown_name
from vitkernels.module_swap import SwappedModule, original_class
from vitkernels.ops.rowwise_quantization import quantize_columns, quantize_gelu, quantize_rows, transpose_rows
from vitkernels.ops.scaled_products import product_of_rows

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_MULTIPLE = 16  # of features: what 8-bit matrix units want of rows


class Weight(NamedTuple):
    """A weight (N, K) in 8 bits: by rows for the forward product, transposed and by columns for the backward one."""

    rows_NK: Tensor
    row_scale_N: Tensor
    columns_KN: Tensor
    column_scale_K: Tensor

    @classmethod
    def of(cls, weight_NK: Tensor, dtype: torch.dtype) -> "Weight":
        columns, column_scale, _ = quantize_columns(weight_NK, None, None, dtype, False)
        return cls(*quantize_rows(weight_NK, dtype), columns, column_scale)


class Tokens(NamedTuple):
    """Activations or their gradients (M, C) in 8 bits, with a scale for each token."""

    rows_MC: Tensor
    scale_M: Tensor


def _weight_gradients(dout: Tokens, x: Tokens, bias: bool, out_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """doutᵀ x (N, K), and the sums of dout over tokens (N,): of what was rounded, whose errors even out.

    Of the two the wider one goes in as it is, the other is rounded anew, with the scales of both.
    """
    if x.rows_MC.shape[1] > dout.rows_MC.shape[1]:
        x_KM, _ = transpose_rows(*x, False)
        dout_NM, scale_N, dbias = quantize_columns(*dout, x.scale_M, dout.rows_MC.dtype, bias)
        dw = product_of_rows(dout_NM, x_KM, scale_N, None, None, out_dtype)
    else:
        dout_NM, dbias = transpose_rows(*dout, bias)
        x_KM, scale_K, _ = quantize_columns(*x, dout.scale_M, x.rows_MC.dtype, False)
        dw = product_of_rows(dout_NM, x_KM, None, scale_K, None, out_dtype)
    return dw, dbias.to(out_dtype) if bias else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MK, weight_NK, bias_N, dtype):
        x, w = Tokens(*quantize_rows(x_MK, dtype)), Weight.of(weight_NK, dtype)
        out_MN = product_of_rows(x.rows_MC, w.rows_NK, x.scale_M, w.row_scale_N, bias_N, x_MK.dtype)
        ctx.save_for_backward(*x, w.columns_KN, w.column_scale_K)
        ctx.bias, ctx.dtypes = bias_N is not None, (dtype, x_MK.dtype, weight_NK.dtype)
        return out_MN

    @staticmethod
    @differentiable_once("a layer that multiplies in 8 bits")
    def backward(ctx, dout_MN):
        x_rows, x_scale, w_columns, w_column_scale = ctx.saved_tensors
        dtype, x_dtype, weight_dtype = ctx.dtypes
        dout = Tokens(*quantize_rows(dout_MN, dtype))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = product_of_rows(dout.rows_MC, w_columns, dout.scale_M, w_column_scale, None, x_dtype)
        return dx, *_weight_gradients(dout, Tokens(x_rows, x_scale), ctx.bias, weight_dtype), None


class _Mlp(torch.autograd.Function):
    """Linear, GELU, linear: the hidden activations are read once each way, by the pass that rounds them."""

    @staticmethod
    def forward(ctx, x_MK, weight1_HK, bias1_H, weight2_NH, bias2_N, dtype):
        x, w1, w2 = Tokens(*quantize_rows(x_MK, dtype)), Weight.of(weight1_HK, dtype), Weight.of(weight2_NH, dtype)
        hidden_MH = product_of_rows(x.rows_MC, w1.rows_NK, x.scale_M, w1.row_scale_N, bias1_H, x_MK.dtype)
        active = Tokens(*quantize_gelu(hidden_MH, None, dtype))
        out_MN = product_of_rows(active.rows_MC, w2.rows_NK, active.scale_M, w2.row_scale_N, bias2_N, x_MK.dtype)
        weights = w1.columns_KN, w1.column_scale_K, w2.columns_KN, w2.column_scale_K
        ctx.save_for_backward(*x, hidden_MH, *active, *weights)
        ctx.dtype, ctx.weight_dtype = dtype, weight1_HK.dtype
        ctx.bias1, ctx.bias2 = bias1_H is not None, bias2_N is not None
        return out_MN

    @staticmethod
    @differentiable_once("a layer that multiplies in 8 bits")
    def backward(ctx, dout_MN):
        x_rows, x_scale, hidden_MH, active_rows, active_scale, *weights = ctx.saved_tensors
        w1_columns, w1_scale, w2_columns, w2_scale = weights
        dout = Tokens(*quantize_rows(dout_MN, ctx.dtype))
        dw2, dbias2 = _weight_gradients(dout, Tokens(active_rows, active_scale), ctx.bias2, ctx.weight_dtype)
        dactive_MH = product_of_rows(dout.rows_MC, w2_columns, dout.scale_M, w2_scale, None, hidden_MH.dtype)
        dhidden = Tokens(*quantize_gelu(hidden_MH, dactive_MH, ctx.dtype))
        dw1, dbias1 = _weight_gradients(dhidden, Tokens(x_rows, x_scale), ctx.bias1, ctx.weight_dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = product_of_rows(dhidden.rows_MC, w1_columns, dhidden.scale_M, w1_scale, None, hidden_MH.dtype)
        return dx, dw1, dbias1, dw2, dbias2, None


class EightBitLinear(SwappedModule, nn.Linear):
    """nn.Linear whose three products run in 8 bits; the same parameters under the same names."""

    dtype: torch.dtype
    weights_in_float32 = True  # until they are in 8 bits

    def forward(self, x: Tensor) -> Tensor:
        x_MK = _rounded(x).reshape(-1, self.in_features)
        return _Linear.apply(x_MK, self.weight, self.bias, self.dtype).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.dtype}"


class EightBitMlp(nn.Module):
    """Linear, GELU, linear (as timm's Mlp, without dropout), products in 8 bits; parameters keep their names."""

    weights_in_float32 = True  # until they are in 8 bits

    def __init__(self, mlp: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.__dict__.update(mlp.__dict__)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        x_MK = _rounded(x).reshape(-1, self.fc1.in_features)
        weights = self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias
        return _Mlp.apply(x_MK, *weights, self.dtype).reshape(*x.shape[:-1], self.fc2.out_features)


def train_in_8_bits(model: nn.Module, dtype: str, filter: Callable[[str, nn.Module], bool] | None = None) -> nn.Module:
    """Let every nn.Linear multiply in 8 bits, in place; returns the model.

    dtype: "int8" or "fp8". fp8 on a GPU needs compute capability 8.9; on the CPU either is emulated, slowly.
    filter: called with a layer's name and itself; where it says no, the layer stays.

    Parameters and their names stay as they are, so an optimizer made before goes on working and checkpoints are plain.
    Modules of two linear layers with nothing but a GELU between them (fc1, act, fc2, as timm's Mlp) are run as one.

    Raises UsageError before anything is swapped: for another dtype, when no layer is left, when a layer's features are
    no multiples of 16, or for a model that multiplies in 8 bits already.
    """
    if dtype not in DTYPES:
        raise unknown_name("8-bit dtype", dtype, DTYPES)
    check_is_float(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen = {n: m for n, m in modules.items() if original_class(m) is nn.Linear and (filter is None or filter(n, m))}
    if not chosen:
        raise UsageError(f"{type(model).__name__} has no nn.Linear that the filter lets through")
    if "" in chosen:
        raise UsageError("a bare layer cannot be swapped in place: put it into a module, such as nn.Sequential")
    odd = [n for n, m in chosen.items() if m.in_features % _MULTIPLE or m.out_features % _MULTIPLE]
    if odd:
        raise UsageError(
            f"8-bit products need features in multiples of {_MULTIPLE}; these layers have others: {', '.join(odd)}. "
            "Leave them out with the filter (quant.skip)"
        )
    mlps = {n: m for n, m in modules.items() if _is_mlp(m) and {f"{n}.fc1", f"{n}.fc2"} <= chosen.keys()}
    for name, mlp in mlps.items():
        model.set_submodule(name, EightBitMlp(mlp, DTYPES[dtype]))
    inside = {f"{name}.{child}" for name in mlps for child in ("fc1", "fc2")}
    for name, linear in chosen.items():
        if name not in inside:
            model.set_submodule(name, EightBitLinear.from_module(linear, dtype=DTYPES[dtype]))
    return model


def check_is_float(model: nn.Module) -> None:
    """Raise UsageError where layers multiply in 8 bits already: what they are made of must not be swapped once more."""
    found = next((n for n, m in model.named_modules() if isinstance(m, EightBitLinear | EightBitMlp)), None)
    if found is not None:
        raise UsageError(
            f"{found or type(model).__name__} trains in 8 bits already; make the model anew and load this one's "
            "state_dict, whose names are the plain model's"
        )


def _is_mlp(module: nn.Module) -> bool:
    """Whether it is two linear layers with an exact GELU, and else only what does nothing, between and behind them."""
    children = dict(module.named_children())
    if list(children) not in (["fc1", "act", "fc2"], ["fc1", "act", "drop1", "norm", "fc2", "drop2"]):
        return False
    if not isinstance(children.get("norm", nn.Identity()), nn.Identity):
        return False
    if any(drop in children and children[drop].p > 0 for drop in ("drop1", "drop2")):
        return False
    return type(children["act"]) is nn.GELU and children["act"].approximate == "none"


def _rounded(x: Tensor) -> Tensor:
    """x in autocast's dtype where autocast is on, as any linear layer takes it."""
    return x.to(dtype_of(x))
