"""linear_gelu for TPU: the matrix product of Pallas' quickstart, extended by a bias, the exact GELU and odd sizes.

Each grid step multiplies a block of rows of x by a block of rows of the weight over all of K, so GELU can follow
immediately. Blocks that extend past the end compute on undefined values, and their out-of-bounds part is not written.

Shape suffixes: M rows (tokens), K input features, N output features.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

_BLOCK_BYTES = 2**21  # of one factor; two double-buffered factors and three result blocks fill most of 16 MB VMEM


def gelu_and_slope(x, tanh: bool):
    """Return gelu(x) and gelu'(x) in float32.

    Mosaic has no erf, so Φ(-|x|) is computed by Abramowitz and Stegun 7.1.26 (error 0.75e-7).
    """
    if tanh:
        scale = math.sqrt(2 / math.pi)
        cdf = 0.5 * (1.0 + jnp.tanh(scale * x * (1.0 + 0.044715 * x * x)))
        return x * cdf, cdf + x * cdf * (1.0 - cdf) * (2 * scale) * (1.0 + 3 * 0.044715 * x * x)
    bell = jnp.exp(-0.5 * x * x)
    t = 1.0 / (1.0 + 0.3275911 / math.sqrt(2) * jnp.abs(x))
    tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail = 0.5 * tail * bell
    cdf = jnp.where(x < 0, tail, 1.0 - tail)
    return x * cdf, cdf + x * bell / math.sqrt(2 * math.pi)


def _kernel(x_ref, weight_ref, bias_ref, act_ref, pre_ref, *, tanh):
    # By default the MXU rounds float32 inputs to bfloat16.
    precision = jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
    product = jax.lax.dot_general(
        x_ref[...], weight_ref[...], (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    pre = (product + bias_ref[...].astype(jnp.float32)).astype(pre_ref.dtype)
    pre_ref[...] = pre
    act_ref[...] = gelu_and_slope(pre.astype(jnp.float32), tanh)[0].astype(act_ref.dtype)


def block_rows(rows: int, K: int, dtype, multiple: int) -> int:
    """Return the rows of K numbers per block: at most 512, a multiple of `multiple` unless it is all of them."""
    fitting = _BLOCK_BYTES // (K * jnp.dtype(dtype).itemsize) // multiple * multiple
    return min(rows, max(multiple, min(512, fitting)))


def linear_gelu(x_MK, weight_NK, bias_N, *, tanh: bool):
    """Return gelu(x weightᵀ + bias) and the pre-activation, both in x's dtype."""
    (M, K), N = x_MK.shape, weight_NK.shape[0]
    m = block_rows(M, K, x_MK.dtype, 16)
    n = block_rows(N, K, weight_NK.dtype, 128)  # columns of the result fill lanes
    result = jax.ShapeDtypeStruct((M, N), x_MK.dtype)
    return pl.pallas_call(
        functools.partial(_kernel, tanh=tanh),
        out_shape=(result, result),
        grid=(pl.cdiv(M, m), pl.cdiv(N, n)),
        in_specs=[
            pl.BlockSpec((m, K), lambda i, j: (i, 0)),
            pl.BlockSpec((n, K), lambda i, j: (j, 0)),
            pl.BlockSpec((1, n), lambda i, j: (0, j)),
        ],
        out_specs=(pl.BlockSpec((m, n), lambda i, j: (i, j)),) * 2,
    )(x_MK, weight_NK, bias_N[None])


def linear_gelu_vjp(primals, outputs, cotangents, *, tanh: bool):
    """Return the gradients, from the pre-activation. XLA fuses GELU's gradient with the bias sums."""
    x_MK, weight_NK, bias_N = primals
    _, pre_MN = outputs
    slope = gelu_and_slope(pre_MN.astype(jnp.float32), tanh)[1]
    dpre_MN = cotangents[0].astype(jnp.float32) * slope
    dbias_N = dpre_MN.sum(0).astype(bias_N.dtype)
    dpre_MN = dpre_MN.astype(x_MK.dtype)
    precision = jax.lax.Precision.HIGHEST if x_MK.dtype == jnp.float32 else None
    dot = functools.partial(jnp.matmul, precision=precision, preferred_element_type=jnp.float32)
    return dot(dpre_MN, weight_NK).astype(x_MK.dtype), dot(dpre_MN.T, x_MK).astype(weight_NK.dtype), dbias_N
