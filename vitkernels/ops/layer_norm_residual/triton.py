"""One pass over the activations forward, one backward. Each program sums its tokens; a second kernel adds the sums.

Shape suffixes: M rows (all images' tokens), C channels, B images, P programs, S sums over rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitkernels.bridge.operator import differentiable_once, interpretable, operator
from vitkernels.bridge.triton import cdiv, multiprocessors, next_power_of_2, triton_call, with_fitting_stages
from vitkernels.ops.refusals import unless_dtypes, unless_triton_device

_LARGEST_C = 8192  # a row must fit in the registers of one program


def unsupported(x, branch, weight, bias, eps, branch_bias, layer_scale, sample_scale, out_dtype) -> str | None:
    dtypes = (x.dtype, out_dtype) if branch is None else (x.dtype, branch.dtype, out_dtype)
    reason = unless_triton_device("x", x) or unless_dtypes(dtypes)
    if reason is None and x.shape[-1] > _LARGEST_C:
        return f"one program holds a row of at most {_LARGEST_C} channels, got {x.shape[-1]}"
    return reason


def run(x, branch, weight, bias, eps, branch_bias, layer_scale, sample_scale, out_dtype) -> tuple[Tensor, Tensor]:
    if branch is None:
        normed, _, _ = layer_norm(x, weight, bias, eps, out_dtype)
        return x, normed
    total, normed, _, _ = add_layer_norm(
        x, branch, weight, bias, eps, branch_bias, layer_scale, sample_scale, out_dtype
    )
    return total, normed


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _load(pointer, offsets, keep):
    return tl.load(pointer + offsets, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def _forward_kernel(
    x_MC, branch_MC, weight_C, bias_C, branch_bias_C, layer_scale_C, sample_scale_B,
    total_MC, normed_MC, mean_M, rstd_M,
    M, rows_per_image, eps,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the branch to ROWS rows of x, and normalize the sum as it was rounded to the stream's dtype."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_C)
    in_rows, in_columns = rows < M, columns < C
    keep = in_rows[:, None] & in_columns[None, :]
    offsets = rows.to(tl.int64)[:, None] * C + columns[None, :]
    total = _load(x_MC, offsets, keep)
    if branch_MC is not None:
        branch = _load(branch_MC, offsets, keep)
        if branch_bias_C is not None:
            branch += _load(branch_bias_C, columns, in_columns)[None, :]
        if layer_scale_C is not None:
            branch *= _load(layer_scale_C, columns, in_columns)[None, :]
        if sample_scale_B is not None:
            branch *= _load(sample_scale_B, rows // rows_per_image, in_rows)[:, None]
        total = (total + branch).to(total_MC.dtype.element_ty).to(tl.float32)
        tl.store(total_MC + offsets, total, mask=keep)
    mean = tl.sum(total, 1) / C
    centred = tl.where(keep, total - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)
    weight, bias = _load(weight_C, columns, in_columns), _load(bias_C, columns, in_columns)
    normed = centred * rstd[:, None] * weight[None, :] + bias[None, :]
    tl.store(normed_MC + offsets, normed, mask=keep)
    tl.store(mean_M + rows, mean, mask=in_rows)
    tl.store(rstd_M + rows, rstd, mask=in_rows)


@triton.jit
def _backward_kernel(
    dtotal_MC, dnormed_MC, total_MC, mean_M, rstd_M, weight_C,
    branch_MC, branch_bias_C, layer_scale_C, sample_scale_B,
    dx_MC, dbranch_MC, sums_PSC,
    M, rows_per_image,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    SUM_BRANCH: tl.constexpr, SUM_SCALE: tl.constexpr,
):  # fmt: skip
    """Compute dx and dbranch for every `programs`-th block of rows, and this program's partial sums over rows."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK_C)
    in_columns = columns < C
    weight = _load(weight_C, columns, in_columns)
    dweight = tl.zeros([BLOCK_C], tl.float32)
    dbias = tl.zeros([BLOCK_C], tl.float32)
    dbranch_bias = tl.zeros([BLOCK_C], tl.float32)
    dlayer_scale = tl.zeros([BLOCK_C], tl.float32)
    for block in tl.range(program, tl.cdiv(M, ROWS), programs, num_stages=STAGES):
        rows = block * ROWS + tl.arange(0, ROWS)
        in_rows = rows < M
        keep = in_rows[:, None] & in_columns[None, :]
        offsets = rows.to(tl.int64)[:, None] * C + columns[None, :]
        dnormed = _load(dnormed_MC, offsets, keep)
        mean, rstd = _load(mean_M, rows, in_rows), _load(rstd_M, rows, in_rows)
        normed = tl.where(keep, (_load(total_MC, offsets, keep) - mean[:, None]) * rstd[:, None], 0.0)
        dweight += tl.sum(dnormed * normed, 0)
        dbias += tl.sum(dnormed, 0)
        dnormed *= weight[None, :]
        along = tl.sum(dnormed * normed, 1) / C
        level = tl.sum(dnormed, 1) / C
        dx = (dnormed - normed * along[:, None] - level[:, None]) * rstd[:, None]
        if dtotal_MC is not None:
            dx += _load(dtotal_MC, offsets, keep)
        tl.store(dx_MC + offsets, dx, mask=keep)
        if dbranch_MC is not None or SUM_BRANCH:
            dbranch = tl.where(keep, dx, 0.0)
            if sample_scale_B is not None:
                dbranch *= _load(sample_scale_B, rows // rows_per_image, in_rows)[:, None]
            if SUM_SCALE:
                branch = _load(branch_MC, offsets, keep)
                if branch_bias_C is not None:
                    branch += _load(branch_bias_C, columns, in_columns)[None, :]
                dlayer_scale += tl.sum(dbranch * branch, 0)
            if layer_scale_C is not None:
                dbranch *= _load(layer_scale_C, columns, in_columns)[None, :]
            if dbranch_MC is not None:
                tl.store(dbranch_MC + offsets, dbranch, mask=keep)
            if SUM_BRANCH:
                dbranch_bias += tl.sum(dbranch, 0)
    sums = sums_PSC + program.to(tl.int64) * (2 + SUM_BRANCH + SUM_SCALE) * C + columns
    tl.store(sums, dweight, mask=in_columns)
    tl.store(sums + C, dbias, mask=in_columns)
    if SUM_BRANCH:
        tl.store(sums + 2 * C, dbranch_bias, mask=in_columns)
    if SUM_SCALE:
        tl.store(sums + (2 + SUM_BRANCH) * C, dlayer_scale, mask=in_columns)


@triton.jit
def _sum_kernel(parts_PK, out_K, P, K, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr):
    """Add the programs' partial sums in a fixed order."""
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_P, BLOCK_K], tl.float32)
    for start in range(0, P, BLOCK_P):
        programs = start + tl.arange(0, BLOCK_P)
        keep = (programs < P)[:, None] & (columns < K)[None, :]
        total += tl.load(parts_PK + programs[:, None] * K + columns[None, :], mask=keep, other=0.0)
    tl.store(out_K + columns, tl.sum(total, 0), mask=columns < K)


# --- launches ---------------------------------------------------------------------------------------------------------


def _forward(x, branch, weight, bias, eps, branch_bias, layer_scale, sample_scale, out_dtype):
    C, dtype = x.shape[-1], x.dtype
    M = x.numel() // C
    x, branch = _readable(x), _readable(branch)
    total = None if branch is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    normed = interpretable(torch.empty_like(x, dtype=out_dtype, memory_format=torch.contiguous_format))
    mean, rstd = (torch.empty(M, dtype=torch.float32, device=x.device) for _ in range(2))
    block = next_power_of_2(C)
    rows, warps = _forward_tile(block)
    if M:
        triton_call(
            x, branch, *map(_readable, (weight, bias, branch_bias, layer_scale, sample_scale)),
            total, normed, mean, rstd, M, M // max(x.shape[0], 1), eps,
            kernel=_forward_kernel, grid=(cdiv(M, rows),),
            C=C, BLOCK_C=block, ROWS=rows, num_warps=warps,
        )  # fmt: skip
    return None if total is None else total.to(dtype), normed.to(out_dtype), mean, rstd


def _forward_tile(block: int) -> tuple[int, int]:
    """Return rows and warps per program."""
    return max(1, 2048 // block), 4 if block <= 2048 else 8


def _backward_tile(block: int, bytes_per_number: int) -> tuple[int, int, int, int]:
    """Return rows per iteration, warps, the most pipeline stages, and programs per multiprocessor."""
    stages = 2 if bytes_per_number == 4 else 3  # four programs of up to 1024 columns fit in shared memory
    return max(1, 2048 // block), 4 if block <= 1024 else 8, stages, 4 if block <= 1024 else 2


def _backward(
    dtotal, dnormed, total, mean, rstd, weight, branch, branch_bias, layer_scale, sample_scale,
    branch_dtype, needs_dbranch, needs_dlayer_scale,
):  # fmt: skip
    """Return dx, dbranch (None if not needed) and the sums over rows (S, C).

    The sums are dweight, dbias, then dbranch_bias and dlayer_scale if the forward pass had them.
    """
    C = total.shape[-1]
    M = total.numel() // C
    dx = torch.empty_like(interpretable(total))
    dbranch = None
    if needs_dbranch:
        dbranch = torch.empty_like(total, dtype=torch.float32 if total.device.type == "cpu" else branch_dtype)
    block = next_power_of_2(C)
    rows, warps, stages, programs_per_sm = _backward_tile(block, total.element_size())
    programs = max(1, min(cdiv(M, rows), programs_per_sm * multiprocessors(total.device)))
    has_bias = branch_bias is not None
    parts = torch.empty(programs, 2 + has_bias + needs_dlayer_scale, C, dtype=torch.float32, device=total.device)
    tensors = (
        *map(_readable, (dtotal, dnormed, total)), mean, rstd, _readable(weight),
        *map(_readable, (branch if needs_dlayer_scale else None, branch_bias, layer_scale, sample_scale)),
        dx, dbranch, parts,
    )  # fmt: skip
    options = {"C": C, "BLOCK_C": block, "ROWS": rows, "SUM_BRANCH": has_bias, "SUM_SCALE": needs_dlayer_scale}
    options |= {"kernel": _backward_kernel, "grid": (programs,), "num_warps": warps}
    with_fitting_stages(
        lambda stages: triton_call(*tensors, M, M // max(total.shape[0], 1), **options, STAGES=stages), stages
    )
    sums = parts.new_empty(parts.shape[1:])
    triton_call(
        parts, sums, programs, sums.numel(),
        kernel=_sum_kernel, grid=(cdiv(sums.numel(), 16),), BLOCK_P=256, BLOCK_K=16, num_warps=8,
    )  # fmt: skip
    return dx.to(total.dtype), None if dbranch is None else dbranch.to(branch_dtype), sums


def _readable(x: Tensor | None) -> Tensor | None:
    """Return x contiguous, in a dtype the kernels can read: they ignore strides."""
    return None if x is None else interpretable(x).contiguous()


# --- operators --------------------------------------------------------------------------------------------------------


@operator(
    "add_layer_norm(Tensor x, Tensor branch, Tensor weight, Tensor bias, float eps, "
    "Tensor? branch_bias, Tensor? layer_scale, Tensor? sample_scale, ScalarType out_dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
def add_layer_norm(x, branch, weight, bias, eps, branch_bias, layer_scale, sample_scale, out_dtype):
    """Return the sum, its norm, and for the backward pass each row's mean and reciprocal standard deviation."""
    return _forward(x, branch, weight, bias, eps, branch_bias, layer_scale, sample_scale, out_dtype)


@operator(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps, ScalarType out_dtype) -> (Tensor, Tensor, Tensor)"
)
def layer_norm(x, weight, bias, eps, out_dtype):
    """Return the norm of x, and for the backward pass each row's mean and reciprocal standard deviation."""
    return _forward(x, None, weight, bias, eps, None, None, None, out_dtype)[1:]


@operator(
    "add_layer_norm_backward(Tensor? dtotal, Tensor dnormed, Tensor total, Tensor mean, Tensor rstd, Tensor weight, "
    "Tensor? branch, Tensor? branch_bias, Tensor? layer_scale, Tensor? sample_scale, ScalarType branch_dtype, "
    "bool needs_dbranch, bool needs_dlayer_scale) -> (Tensor, Tensor, Tensor)"
)
def add_layer_norm_backward(dtotal, dnormed, total, *rest):
    """Return dx, dbranch (empty if not needed), and the sums over rows."""
    dx, dbranch, sums = _backward(dtotal, dnormed, total, *rest)
    return dx, total.new_empty(0) if dbranch is None else dbranch, sums


@add_layer_norm.register_fake
def _(x, branch, weight, bias, eps, branch_bias, layer_scale, sample_scale, out_dtype):
    return x.new_empty(x.shape), *_fake_norm(x, out_dtype)


@layer_norm.register_fake
def _(x, weight, bias, eps, out_dtype):
    return _fake_norm(x, out_dtype)


@add_layer_norm_backward.register_fake
def _(dtotal, dnormed, total, mean, rstd, weight, branch, branch_bias, layer_scale, sample_scale, *rest):
    branch_dtype, needs_dbranch, needs_dlayer_scale = rest
    sums = 2 + (branch_bias is not None) + needs_dlayer_scale
    dbranch = total.new_empty(total.shape if needs_dbranch else 0, dtype=branch_dtype)
    return total.new_empty(total.shape), dbranch, mean.new_empty(sums, total.shape[-1])


def _fake_norm(x: Tensor, out_dtype) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=out_dtype), rows, torch.empty_like(rows)


def _save_add(ctx, inputs, output):
    _, branch, weight, bias, _, branch_bias, layer_scale, sample_scale, _ = inputs
    total, _, mean, rstd = output
    kept = branch if layer_scale is not None else None
    ctx.save_for_backward(total, mean, rstd, weight, kept, branch_bias, layer_scale, sample_scale)
    ctx.branch_dtype, ctx.bias_dtype = branch.dtype, bias.dtype
    ctx.set_materialize_grads(False)


@differentiable_once("layer_norm_residual by triton")
def _differentiate_add(ctx, dtotal, dnormed, _dmean, _drstd):
    total, mean, rstd, weight, branch, branch_bias, layer_scale, sample_scale = ctx.saved_tensors
    if dnormed is None:
        dnormed = torch.zeros_like(total)
    scaled = layer_scale is not None or sample_scale is not None
    needs_dbranch = scaled or ctx.branch_dtype != total.dtype  # otherwise dbranch equals dx
    dx, dbranch, sums = add_layer_norm_backward(
        dtotal, dnormed, total, mean, rstd, weight, branch, branch_bias, layer_scale, sample_scale,
        ctx.branch_dtype, needs_dbranch, layer_scale is not None,
    )  # fmt: skip
    dweight, dbias, *others = sums.unbind(0)
    dbranch_bias = None if branch_bias is None else others.pop(0).to(branch_bias.dtype)
    dlayer_scale = None if layer_scale is None else others.pop(0).to(layer_scale.dtype)
    return (
        dx, dbranch if needs_dbranch else dx, dweight.to(weight.dtype), dbias.to(ctx.bias_dtype), None,
        dbranch_bias, dlayer_scale, None, None,
    )  # fmt: skip


def _save(ctx, inputs, output):
    x, weight, bias, _, _ = inputs
    ctx.save_for_backward(x, *output[1:], weight)
    ctx.bias_dtype = bias.dtype


@differentiable_once("layer_norm_residual by triton")
def _differentiate(ctx, dnormed, _dmean, _drstd):
    x, mean, rstd, weight = ctx.saved_tensors
    dx, _, sums = add_layer_norm_backward(
        None, dnormed, x.contiguous(), mean, rstd, weight, None, None, None, None, x.dtype, False, False
    )
    return dx, sums[0].to(weight.dtype), sums[1].to(ctx.bias_dtype), None, None


add_layer_norm.register_autograd(_differentiate_add, setup_context=_save_add)
layer_norm.register_autograd(_differentiate, setup_context=_save)
