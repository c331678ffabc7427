"""One pass over the activations forward, and one backward, which recomputes the hidden features.

Each backward program sums its rows for the parameters' gradients; a second kernel adds these sums in a fixed order.

Shape suffixes: M rows (all images' tokens), F hidden features, G = 2 F, P programs, S sums over rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitkernels.bridge.operator import differentiable_once, interpretable, operator
from vitkernels.bridge.triton import cdiv, multiprocessors, next_power_of_2, triton_call, with_fitting_stages
from vitkernels.ops.linear.gradients import sums_over_rows
from vitkernels.ops.refusals import unless_dtypes, unless_triton_device

_LARGEST_F = 8192  # the row of a program must fit in its registers


def unsupported(x, weight, bias, eps, linear_bias, gate_last, out_dtype) -> str | None:
    reason = unless_triton_device("x", x) or unless_dtypes((x.dtype, out_dtype))
    if reason is None and x.shape[-1] > 2 * _LARGEST_F:
        return f"one program holds a row of at most {_LARGEST_F} hidden features, got {x.shape[-1] // 2}"
    return reason


def run(x, weight, bias, eps, linear_bias, gate_last, out_dtype) -> Tensor:
    hidden: Tensor = swiglu_norm(x, weight, bias, eps, linear_bias, gate_last, out_dtype)[0]
    return hidden


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _load(pointer, offsets, keep):
    return tl.load(pointer + offsets, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def _gate_and_value(x_MG, linear_bias_G, rows, columns, keep, F: tl.constexpr, GATE: tl.constexpr, VALUE: tl.constexpr):
    """Return the rows' gates and values in float32; GATE, VALUE: their first columns in x."""
    first = rows.to(tl.int64)[:, None] * (2 * F) + columns[None, :]
    gate, value = _load(x_MG, first + GATE, keep), _load(x_MG, first + VALUE, keep)
    if linear_bias_G is not None:
        gate += _load(linear_bias_G, columns + GATE, columns < F)[None, :]
        value += _load(linear_bias_G, columns + VALUE, columns < F)[None, :]
    return gate, value


@triton.jit
def swiglu_norm_kernel(
    x_MG, linear_bias_G, weight_F, bias_F, out_MF, mean_M, rstd_M, M, eps,
    F: tl.constexpr, GATE: tl.constexpr, VALUE: tl.constexpr, BLOCK_F: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of the output, and with a norm their mean and reciprocal standard deviation."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_F)
    keep = (rows < M)[:, None] & (columns < F)[None, :]
    gate, value = _gate_and_value(x_MG, linear_bias_G, rows, columns, keep, F, GATE, VALUE)
    hidden = tl.where(keep, gate * tl.sigmoid(gate) * value, 0.0)
    if weight_F is not None:
        mean = tl.sum(hidden, 1) / F
        centred = tl.where(keep, hidden - mean[:, None], 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / F + eps)
        weight, bias = _load(weight_F, columns, columns < F), _load(bias_F, columns, columns < F)
        hidden = centred * rstd[:, None] * weight[None, :] + bias[None, :]
        tl.store(mean_M + rows, mean, mask=rows < M)
        tl.store(rstd_M + rows, rstd, mask=rows < M)
    tl.store(out_MF + rows.to(tl.int64)[:, None] * F + columns[None, :], hidden, mask=keep)


@triton.jit
def swiglu_norm_backward_kernel(
    dout_MF, x_MG, linear_bias_G, weight_F, mean_M, rstd_M, dx_MG, sums_PSF, M,
    F: tl.constexpr, GATE: tl.constexpr, VALUE: tl.constexpr, BLOCK_F: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx of every `programs`-th block of rows, and this program's sums for the parameters' gradients."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK_F)
    in_columns = columns < F
    dweight = tl.zeros([BLOCK_F], tl.float32)
    dbias = tl.zeros([BLOCK_F], tl.float32)
    dgate_bias = tl.zeros([BLOCK_F], tl.float32)
    dvalue_bias = tl.zeros([BLOCK_F], tl.float32)
    for block in tl.range(program, tl.cdiv(M, ROWS), programs, num_stages=STAGES):
        rows = block * ROWS + tl.arange(0, ROWS)
        in_rows = rows < M
        keep = in_rows[:, None] & in_columns[None, :]
        gate, value = _gate_and_value(x_MG, linear_bias_G, rows, columns, keep, F, GATE, VALUE)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        dhidden = _load(dout_MF, rows.to(tl.int64)[:, None] * F + columns[None, :], keep)
        if weight_F is not None:
            mean, rstd = _load(mean_M, rows, in_rows), _load(rstd_M, rows, in_rows)
            normed = tl.where(keep, (silu * value - mean[:, None]) * rstd[:, None], 0.0)
            dweight += tl.sum(dhidden * normed, 0)
            dbias += tl.sum(dhidden, 0)
            dhidden *= _load(weight_F, columns, in_columns)[None, :]
            along = tl.sum(dhidden * normed, 1) / F
            level = tl.sum(dhidden, 1) / F
            dhidden = (dhidden - normed * along[:, None] - level[:, None]) * rstd[:, None]
        dgate = dhidden * value * (sigmoid + silu * (1.0 - sigmoid))
        dvalue = dhidden * silu
        first = rows.to(tl.int64)[:, None] * (2 * F) + columns[None, :]
        tl.store(dx_MG + first + GATE, dgate, mask=keep)
        tl.store(dx_MG + first + VALUE, dvalue, mask=keep)
        if linear_bias_G is not None:
            dgate_bias += tl.sum(tl.where(keep, dgate, 0.0), 0)
            dvalue_bias += tl.sum(tl.where(keep, dvalue, 0.0), 0)
    NORM: tl.constexpr = 2 if weight_F is not None else 0
    BIAS: tl.constexpr = 2 if linear_bias_G is not None else 0
    sums = sums_PSF + program.to(tl.int64) * (NORM + BIAS) * F + columns
    if weight_F is not None:
        tl.store(sums, dweight, mask=in_columns)
        tl.store(sums + F, dbias, mask=in_columns)
    if linear_bias_G is not None:
        tl.store(sums + NORM * F + GATE, dgate_bias, mask=in_columns)
        tl.store(sums + NORM * F + VALUE, dvalue_bias, mask=in_columns)


# --- launches ---------------------------------------------------------------------------------------------------------


def _forward_tile(block: int) -> tuple[int, int]:
    """Return rows and warps per program."""
    return max(1, 4096 // block), 4 if block <= 1024 else 8


def _backward_tile(block: int) -> tuple[int, int, int, int]:
    """Return rows per iteration, warps, the most pipeline stages, and programs per multiprocessor."""
    return max(1, 2048 // block), 4 if block <= 1024 else 8, 3, 4 if block <= 1024 else 2


def _columns(F: int, gate_last: bool) -> dict[str, int]:
    return {"F": F, "GATE": F if gate_last else 0, "VALUE": 0 if gate_last else F, "BLOCK_F": next_power_of_2(F)}


def _readable(x: Tensor | None) -> Tensor | None:
    """Return x contiguous, because the kernels ignore strides, and in a dtype that they can read."""
    return None if x is None else interpretable(x).contiguous()


@operator(
    "swiglu_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, Tensor? linear_bias, bool gate_last, "
    "ScalarType out_dtype) -> (Tensor, Tensor, Tensor)"
)
def swiglu_norm(x, weight, bias, eps, linear_bias, gate_last, out_dtype):
    """Return the output, and for the backward pass each row's mean and reciprocal standard deviation."""
    out, mean, rstd = _empty_outputs(interpretable(x), weight, out_dtype)
    columns = _columns(x.shape[-1] // 2, gate_last)
    rows, warps = _forward_tile(columns["BLOCK_F"])
    M = x.shape[:-1].numel()
    written = interpretable(out)
    if M:
        triton_call(
            *map(_readable, (x, linear_bias, weight, bias)), written, mean, rstd, M, eps,
            kernel=swiglu_norm_kernel, grid=(cdiv(M, rows),), **columns, ROWS=rows, num_warps=warps,
        )  # fmt: skip
    return written.to(out_dtype), mean, rstd


@operator(
    "swiglu_norm_backward(Tensor dout, Tensor x, Tensor? weight, Tensor? linear_bias, Tensor mean, Tensor rstd, "
    "bool gate_last) -> (Tensor, Tensor)"
)
def swiglu_norm_backward(dout, x, weight, linear_bias, mean, rstd, gate_last):
    """Return dx, and float32 sums over rows (S, F): dweight and dbias with a norm, then dlinear_bias's halves."""
    columns = _columns(x.shape[-1] // 2, gate_last)
    rows, warps, stages, per_multiprocessor = _backward_tile(columns["BLOCK_F"])
    M = x.shape[:-1].numel()
    programs = max(1, min(cdiv(M, rows), per_multiprocessor * multiprocessors(x.device)))
    parts = x.new_empty(programs, *_shape_of_sums(x, weight, linear_bias), dtype=torch.float32)
    dx = torch.empty_like(interpretable(x), memory_format=torch.contiguous_format)
    tensors = *map(_readable, (dout, x, linear_bias, weight)), mean, rstd, dx, parts
    options = {"kernel": swiglu_norm_backward_kernel, "grid": (programs,), "ROWS": rows, "num_warps": warps}
    with_fitting_stages(lambda stages: triton_call(*tensors, M, **options, **columns, STAGES=stages), stages)
    return dx.to(x.dtype), sums_over_rows(parts)


# --- operators --------------------------------------------------------------------------------------------------------


def _empty_outputs(x: Tensor, weight: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.new_empty(0 if weight is None else x.shape[:-1].numel(), dtype=torch.float32)
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=out_dtype), rows, torch.empty_like(rows)


@swiglu_norm.register_fake
def _(x, weight, bias, eps, linear_bias, gate_last, out_dtype):
    return _empty_outputs(x, weight, out_dtype)


@swiglu_norm_backward.register_fake
def _(dout, x, weight, linear_bias, mean, rstd, gate_last):
    return x.new_empty(x.shape), x.new_empty(_shape_of_sums(x, weight, linear_bias), dtype=torch.float32)


def _shape_of_sums(x: Tensor, weight: Tensor | None, linear_bias: Tensor | None) -> tuple[int, int]:
    return 2 * (weight is not None) + 2 * (linear_bias is not None), x.shape[-1] // 2


def _save(ctx, inputs, output):
    x, weight, bias, _, linear_bias, ctx.gate_last, _ = inputs
    ctx.save_for_backward(x, weight, linear_bias, *output[1:])
    ctx.bias_dtype = None if bias is None else bias.dtype


@differentiable_once("swiglu_norm by triton")
def _differentiate(ctx, dout, _dmean, _drstd):
    x, weight, linear_bias, mean, rstd = ctx.saved_tensors
    dx, sums = swiglu_norm_backward(dout, x, weight, linear_bias, mean, rstd, ctx.gate_last)
    dweight = dbias = dlinear_bias = None
    if linear_bias is not None:
        dlinear_bias = sums[-2:].flatten().to(linear_bias.dtype)
    if weight is not None:
        dweight, dbias = sums[0].to(weight.dtype), sums[1].to(ctx.bias_dtype)
    return dx, dweight, dbias, None, dlinear_bias, None, None


swiglu_norm.register_autograd(_differentiate, setup_context=_save)
