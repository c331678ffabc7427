"""quantized_matmul in Pallas for TPU: weights are unpacked in VMEM.

The grid covers rows and columns of the result, with K innermost; sums stay in VMEM. int8 activations are multiplied as
int8 (twice the rate of bfloat16 on v5e), others in their own dtype, which represents 8-bit weights exactly.

Shape suffixes: M tokens, K in features, N out features, S blocks of K, U stored rows of a block.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vitkernels.ops.eight_bit_format import MIN_MAGNITUDE

VMEM_LIMIT = 100 * 2**20  # of 128 MiB on v5e and v6e; the compiler's own default is 16 MiB


def quantized_matmul(
    x_MK, w, scale, *optional, has_zero: bool, has_bias: bool, block_size: int, weight_bits: int, activation_bits: int
):
    """Return what the op does.

    w: int8 (N, K) or (S, B, N), or with weight_bits=4 uint8 from pack_int4. optional: zero_point and bias, as has_zero
    and has_bias say.
    """
    optional = list(optional)
    zero_point = optional.pop(0) if has_zero else None
    bias = optional.pop(0) if has_bias else None
    M, K = x_MK.shape
    out_dtype, N = x_MK.dtype, scale.shape[-1]
    block = K if block_size == -1 else block_size
    S = K // block
    x, x_scale = x_MK, jnp.ones((M, 1), jnp.float32)
    if activation_bits == 8:
        x, x_scale = _quantize_tokens(x_MK)
    elif x.dtype == jnp.float16:  # Mosaic has no float16
        x = x.astype(jnp.float32)
    x_MSB = x.reshape(M, S, block)
    offset = jnp.zeros((1, N), jnp.float32)
    if zero_point is not None:
        x_MS = x_MSB.astype(jnp.float32).sum(2) * x_scale
        zero_SN = zero_point.astype(jnp.float32).reshape(S, N)
        offset = -lax.dot(x_MS, zero_SN, precision=lax.Precision.HIGHEST)
    if bias is not None:
        offset = offset + bias.astype(jnp.float32)
    w_SUN = w if block_size != -1 else w[None]
    per_channel = block_size == -1
    unit = w_SUN.shape[2 if per_channel else 1]
    halves = [x_MSB]
    if weight_bits == 4:  # a byte's low nibble is row j of its block, the high one row unit + j
        high = jnp.pad(x_MSB[:, :, unit:], ((0, 0), (0, 0), (0, 2 * unit - block)))
        halves = [x_MSB[:, :, :unit], high]
    scaled = scale.astype(jnp.float32).reshape(S, 1, N)
    sums = partial(_product, halves, w_SUN, scaled, x_scale, offset, per_channel=per_channel, out_dtype=out_dtype)
    return sums(packed=weight_bits == 4)


def _quantize_tokens(x_MK):
    x = x_MK.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(x).max(1, keepdims=True), MIN_MAGNITUDE) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale


def _product(halves, w_SUN, scale_S1N, x_scale_M1, offset, *, per_channel: bool, packed: bool, out_dtype):
    M, S, unit = halves[0].shape
    N = scale_S1N.shape[2]
    m, n = min(256, M), min(512, N)
    # A step along K covers a part of the only block, or several complete blocks.
    depth = min(1024, unit) if per_channel else unit
    blocks = 1 if per_channel else _blocks_at_once(S, unit)
    steps = pl.cdiv(unit, depth) if per_channel else S // blocks
    x_spec = pl.BlockSpec(
        (blocks, m, depth), (lambda i, j, k: (0, i, k)) if per_channel else (lambda i, j, k: (k, i, 0))
    )
    w_spec = (
        pl.BlockSpec((1, n, depth), lambda i, j, k: (0, j, k))
        if per_channel
        else pl.BlockSpec((blocks, depth, n), lambda i, j, k: (k, 0, j))
    )
    offset_rows = m if offset.shape[0] != 1 else 1
    return pl.pallas_call(
        partial(_kernel, count=len(halves), blocks=blocks, unit=unit, per_channel=per_channel, packed=packed),
        grid=(pl.cdiv(M, m), pl.cdiv(N, n), steps),
        in_specs=[
            *[x_spec] * len(halves),
            w_spec,
            pl.BlockSpec((blocks, 1, n), lambda i, j, k: (0 if per_channel else k, 0, j)),
            pl.BlockSpec((m, 1), lambda i, j, k: (i, 0)),
            pl.BlockSpec((offset_rows, n), lambda i, j, k: (i if offset_rows > 1 else 0, j)),
        ],
        out_specs=pl.BlockSpec((m, n), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), out_dtype if out_dtype != jnp.float16 else jnp.float32),
        scratch_shapes=[pltpu.VMEM((m, n), _sums_dtype(halves[0].dtype) if per_channel else jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
    )(*[x.swapaxes(0, 1) for x in halves], w_SUN, scale_S1N, x_scale_M1, offset).astype(out_dtype)


def _blocks_at_once(S: int, unit: int) -> int:
    """Return the blocks per step, about 1024 in features, to amortize the fixed cost of a step."""
    return next(count for count in range(min(S, max(1, 1024 // unit)), 0, -1) if S % count == 0)


def _sums_dtype(dtype):
    return jnp.int32 if dtype == jnp.int8 else jnp.float32


def _kernel(*refs, count: int, blocks: int, unit: int, per_channel: bool, packed: bool):
    x_refs, (w_ref, scale_ref, x_scale_ref, offset_ref, out_ref, sums_ref) = refs[:count], refs[count:]
    step, last = pl.program_id(2), pl.num_programs(2) - 1

    @pl.when(step == 0)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)

    for block in range(blocks):
        parts = _nibbles(w_ref[block]) if packed else [w_ref[block]]
        total = 0
        for x_ref, w in zip(x_refs, parts, strict=True):
            x = x_ref[block]
            w = w.astype(x.dtype)
            if per_channel and unit % x.shape[1]:  # memory past the edge is undefined
                rest = unit - step * x.shape[1]
                x, w = _zero_from(x, rest), _zero_from(w, rest)
            total += lax.dot_general(
                x,
                w,
                (((1,), (1 if per_channel else 0,)), ((), ())),
                precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
                preferred_element_type=_sums_dtype(x.dtype),
            )
        sums_ref[...] += total if per_channel else total.astype(jnp.float32) * scale_ref[block]

    @pl.when(step == last)
    def _():
        sums = sums_ref[...].astype(jnp.float32)
        if per_channel:
            sums = sums * scale_ref[0]
        out_ref[...] = (sums * x_scale_ref[...] + offset_ref[...]).astype(out_ref.dtype)


def _nibbles(packed):
    """Return the low and high nibbles of bytes as int32, because TPUs up to v5e cannot shift bytes."""
    wide = packed.astype(jnp.int32)
    return [(wide << 28) >> 28, (wide << 24) >> 28]


def _zero_from(x, valid):
    """Return x with zeros from lane `valid` on, selected in 32 bits, which every TPU supports."""
    wide = x.astype(jnp.int32 if x.dtype == jnp.int8 else jnp.float32)
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 1) < valid, wide, jnp.zeros_like(wide)).astype(x.dtype)
