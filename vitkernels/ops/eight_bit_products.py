"""The products of 8-bit training by passes over the operands, on every device.

Each of a layer's three products has one scale per row of each operand:
    out = x Wᵀ      rows of x are tokens; rows of W
    dx  = dout W    rows of dout are tokens; columns of W
    dW  = doutᵀ x   sums over tokens, so per-token scales do not factor out of the sum. The wider operand is reused as
                    quantized for the first two products; the narrower one is multiplied by those scales and quantized
                    again, with one scale per channel.
So each wide tensor is quantized once, in the same pass as a preceding GELU or its derivative. Activations are saved for
the backward pass in 8 bits. Under torch.compile, tokens are quantized in the pass that computes them.

int8: 127 levels on each side of zero, exact sums (T. Dettmers et al. 2022, arXiv 2208.07339, applied to training by
M. Wortsman et al. 2023, arXiv 2304.13013). fp8: e4m3 for all operands (P. Micikevicius et al. 2022, arXiv 2209.05433).

Shape suffixes: M tokens, K in features, N out features, H hidden features, C channels of either.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitkernels.bridge.operator import differentiable_once
from vitkernels.ops.rowwise_quantization import quantize_columns, quantize_gelu, quantize_rows, transpose_rows
from vitkernels.ops.scaled_products import product_of_rows


def linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x weightᵀ + bias in x's dtype, with products in `dtype`, forward and backward."""
    return _LinearFunction.apply(x_MK, weight_NK, bias_N, dtype)


def mlp(
    x_MK: Tensor,
    weight1_HK: Tensor,
    bias1_H: Tensor | None,
    weight2_NH: Tensor,
    bias2_N: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return gelu(x weight1ᵀ + bias1) weight2ᵀ + bias2 in x's dtype, with products in `dtype`, forward and backward."""
    return _MlpFunction.apply(x_MK, weight1_HK, bias1_H, weight2_NH, bias2_N, dtype)


class EightBitWeight(NamedTuple):
    """A weight (N, K) in 8 bits: with scales per row for the forward product, and transposed with scales per column
    for the backward one.
    """

    rows_NK: Tensor
    row_scale_N: Tensor
    columns_KN: Tensor
    column_scale_K: Tensor

    @classmethod
    def of(cls, weight_NK: Tensor, dtype: torch.dtype) -> "EightBitWeight":
        columns, column_scale, _ = quantize_columns(weight_NK, None, None, dtype, False)
        return cls(*quantize_rows(weight_NK, dtype), columns, column_scale)


class EightBitTokens(NamedTuple):
    """Activations or their gradients (M, C) in 8 bits, with one scale per token."""

    rows_MC: Tensor
    scale_M: Tensor


def _weight_gradients(
    dout: EightBitTokens, x: EightBitTokens, bias: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return doutᵀ x (N, K), and if `bias` the sums of dout over tokens (N,).

    The wider operand is used as quantized; the other is multiplied by both scales and quantized again. The sums are
    over quantized values, whose rounding errors average out.
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


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MK, weight_NK, bias_N, dtype):
        x, w = EightBitTokens(*quantize_rows(x_MK, dtype)), EightBitWeight.of(weight_NK, dtype)
        out_MN = product_of_rows(x.rows_MC, w.rows_NK, x.scale_M, w.row_scale_N, bias_N, x_MK.dtype)
        ctx.save_for_backward(*x, w.columns_KN, w.column_scale_K)
        ctx.bias, ctx.dtypes = bias_N is not None, (dtype, x_MK.dtype, weight_NK.dtype)
        return out_MN

    @staticmethod
    @differentiable_once("8-bit training")
    def backward(ctx, dout_MN):
        x_rows, x_scale, w_columns, w_column_scale = ctx.saved_tensors
        dtype, x_dtype, weight_dtype = ctx.dtypes
        dout = EightBitTokens(*quantize_rows(dout_MN, dtype))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = product_of_rows(dout.rows_MC, w_columns, dout.scale_M, w_column_scale, None, x_dtype)
        return dx, *_weight_gradients(dout, EightBitTokens(x_rows, x_scale), ctx.bias, weight_dtype), None


class _MlpFunction(torch.autograd.Function):
    """Linear, GELU, linear: forward and backward read the hidden activations once, in the pass that quantizes them."""

    @staticmethod
    def forward(ctx, x_MK, weight1_HK, bias1_H, weight2_NH, bias2_N, dtype):
        x, w1, w2 = (
            EightBitTokens(*quantize_rows(x_MK, dtype)),
            EightBitWeight.of(weight1_HK, dtype),
            EightBitWeight.of(weight2_NH, dtype),
        )
        hidden_MH = product_of_rows(x.rows_MC, w1.rows_NK, x.scale_M, w1.row_scale_N, bias1_H, x_MK.dtype)
        active = EightBitTokens(*quantize_gelu(hidden_MH, None, dtype))
        out_MN = product_of_rows(active.rows_MC, w2.rows_NK, active.scale_M, w2.row_scale_N, bias2_N, x_MK.dtype)
        weights = w1.columns_KN, w1.column_scale_K, w2.columns_KN, w2.column_scale_K
        ctx.save_for_backward(*x, hidden_MH, *active, *weights)
        ctx.dtype, ctx.weight_dtype = dtype, weight1_HK.dtype
        ctx.bias1, ctx.bias2 = bias1_H is not None, bias2_N is not None
        return out_MN

    @staticmethod
    @differentiable_once("8-bit training")
    def backward(ctx, dout_MN):
        x_rows, x_scale, hidden_MH, active_rows, active_scale, *weights = ctx.saved_tensors
        w1_columns, w1_scale, w2_columns, w2_scale = weights
        dout = EightBitTokens(*quantize_rows(dout_MN, ctx.dtype))
        dw2, dbias2 = _weight_gradients(dout, EightBitTokens(active_rows, active_scale), ctx.bias2, ctx.weight_dtype)
        dactive_MH = product_of_rows(dout.rows_MC, w2_columns, dout.scale_M, w2_scale, None, hidden_MH.dtype)
        dhidden = EightBitTokens(*quantize_gelu(hidden_MH, dactive_MH, ctx.dtype))
        dw1, dbias1 = _weight_gradients(dhidden, EightBitTokens(x_rows, x_scale), ctx.bias1, ctx.weight_dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = product_of_rows(dhidden.rows_MC, w1_columns, dhidden.scale_M, w1_scale, None, hidden_MH.dtype)
        return dx, dw1, dbias1, dw2, dbias2, None
