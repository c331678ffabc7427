"""linear_gelu for TPU: GELU and its gradient in the epilogue of a matrix product, hidden behind the MXU.

The forward product is that of LayerNorm's kernels, without the norm (ops/layer_norm_residual/pallas_tpu_kernel.py).

Shape suffixes: B images, N tokens, K input features, F hidden features, O output features.
"""

from functools import partial
from itertools import chain

import jax.numpy as jnp

from vitkernels.bridge.pallas_schedule import pipelined
from vitkernels.ops.layer_norm_residual.pallas_tpu_kernel import norm_forward
from vitkernels.ops.tpu_rows import (
    Matrix,
    RowBlocks,
    call,
    column_cuts,
    eight_bit_scratch,
    f32,
    gelu_and_slope,
    product,
    quantize,
    row_bytes,
    row_chunks,
    shared,
    size_to_round,
)

_LARGEST_WEIGHT = 16 * 2**20  # bytes, of which VMEM holds two


def linear_gelu_of_images(*arrays, given: tuple[str, ...], tanh: bool, keep: bool):
    """Return gelu(x weightᵀ + bias), and y = x weightᵀ + bias itself or, with keep, gelu'(y); all in x's dtype.

    arrays, given: arrays and their names: x (B, N, K), weight (1, F, K), and bias (1, 1, F) if there is one.
    """
    out = arrays[0].dtype.name
    return norm_forward(*arrays, given=given, eps=0.0, out=out, gelu="tanh" if tanh else "none", keep=keep)


def gelu_backward(dy, weight, saved, *scale, tanh: bool, kept: bool):
    """Differentiate y = gelu(pre) weightᵀ: return dpre and, unless kept, gelu(pre).

    Args:
        dy: (B, N, O). weight: (1, O, F), rounded to dy's dtype in VMEM. saved: (B, N, F), gelu'(pre) if kept, else pre.
        scale: (1, 1, F) if the weight is int8; dy is then rounded to int8 with a scale per row.
    """
    B, N, O = dy.shape
    F, dtype = weight.shape[2], dy.dtype
    width = row_bytes((dy.shape[2], dtype), *[(F, dtype)] * (2 if kept else 3))
    blocks = RowBlocks.of(B, N, width, weight.shape[1] * row_bytes((F, weight.dtype)))
    outputs = [(blocks.spec(F), (B, N, F), dtype)] * (1 if kept else 2)
    in_specs = [blocks.spec(O), shared(weight), blocks.spec(F), *map(shared, scale)]
    names = ["dy", "weight", "saved", *["scale"] * len(scale), "dpre", *["act"] * (not kept)]
    scratch = eight_bit_scratch(blocks, O) if scale else []
    names += ["factor", "row_scale"][: len(scratch)]
    kernel = partial(_gelu_backward_kernel, names=names, blocks=blocks, tanh=tanh)
    inputs, name = (dy, weight, saved, *scale), "linear_into_gelu_backward"
    return call(kernel, blocks, inputs, in_specs, outputs, name, scratch, rounds=size_to_round(weight, dtype))


def _gelu_backward_kernel(*refs, names, blocks: RowBlocks, tanh: bool):
    r = dict(zip(names, refs, strict=True))
    r |= {name: Matrix(r[name], blocks) for name in ("dy", "saved", "dpre", "act") if name in r}
    weight_ref, exact = r["weight"], r["dpre"].dtype == f32
    if "scale" in r:
        for chunk in chain.from_iterable(map(row_chunks, blocks.pieces())):
            r["factor"][chunk], r["row_scale"][chunk] = quantize(r["dy"][chunk].astype(f32), axis=1)
    factor = r.get("factor", r["dy"])

    def multiply(item):
        rows, cut = item
        return product(factor[rows], weight_ref[0, :, cut], 0)

    def store(item, dact):
        rows, cut = item
        if "scale" in r:
            dact = dact * r["row_scale"][rows] * r["scale"][0, :, cut]
        slope = r["saved"][item].astype(f32)
        if "act" in r:
            act, slope = gelu_and_slope(slope, tanh, exact)
            r["act"][item] = act
        r["dpre"][item] = dact * slope

    pipelined([(piece, cut) for cut in column_cuts(weight_ref.shape[2]) for piece in blocks.pieces()], multiply, store)


def times_slope(dact, pre, *, tanh: bool):
    """Return dact gelu'(pre) in pre's dtype, and its float32 sums over all tokens; XLA makes one pass of it."""
    slope = gelu_and_slope(pre.astype(f32), tanh, exact=pre.dtype == f32)[1]
    dpre = dact.astype(f32) * slope
    return dpre.astype(pre.dtype), dpre.sum((0, 1))


def linear_gelu(x_MK, weight_FK, bias_F, *, tanh: bool):
    """Return gelu(x weightᵀ + bias) and the pre-activation, both in x's dtype: the kernel for JAX programs.

    A weight that exceeds VMEM is split by rows.
    """
    rows = max(128, _LARGEST_WEIGHT // (weight_FK.shape[1] * weight_FK.dtype.itemsize) // 128 * 128)
    parts = []
    for cut in column_cuts(weight_FK.shape[0], rows):
        arrays = x_MK[None], weight_FK[None, cut], bias_F[None, None, cut]
        parts.append(linear_gelu_of_images(*arrays, given=("x", "weight", "bias"), tanh=tanh, keep=False))
    acts, pres = zip(*parts, strict=True)
    return tuple(x[0][0] if len(x) == 1 else jnp.concatenate(x, 2)[0] for x in (acts, pres))


def linear_gelu_vjp(primals, outputs, cotangents, *, tanh: bool):
    """Return the gradients, from the pre-activation. XLA fuses GELU's gradient with the bias sums."""
    x_MK, weight_FK, bias_F = primals
    dpre, dbias = times_slope(cotangents[0][None], outputs[1][None], tanh=tanh)
    dx, dweight = product(dpre[0], weight_FK, 0), product(dpre[0].T, x_MK, 0)
    return dx.astype(x_MK.dtype), dweight.astype(weight_FK.dtype), dbias.astype(bias_F.dtype)
