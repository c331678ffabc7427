"""Matrix products on TPUs for JAX programs: a linear layer with GELU in one kernel, and products in 8 bits.

Shape suffixes: M rows, K the summed dimension, N columns or output features; "..." any dimensions.
"""

import jax
import jax.numpy as jnp

from vitkernels.errors import UsageError
from vitkernels.jax.differentiable import differentiable
from vitkernels.ops.eight_bit_linear import pallas_tpu_kernel as eight_bit_kernel
from vitkernels.ops.int8_matmul import pallas_tpu_kernel as int8_kernel
from vitkernels.ops.layer_norm_residual.pallas_tpu_kernel import norm_forward
from vitkernels.ops.linear_gelu import pallas_tpu_kernel as gelu_kernel

_linear_gelu = differentiable(gelu_kernel.linear_gelu, gelu_kernel.linear_gelu_vjp)
_int8_matmul = differentiable(int8_kernel.matmul)
_DTYPES = ("bfloat16", "float32")


def linear_gelu(
    x: jax.Array, weight_NK: jax.Array, bias_N: jax.Array | None = None, *, approximate: bool = False
) -> jax.Array:
    """Return gelu(x weightᵀ + bias), (..., N), for x (..., K); the pre-activation is rounded to x's dtype.

    Args:
        weight_NK: (output features, input features); for a flax kernel (K, N), pass kernel.T.
        approximate: take the tanh approximation of GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415).

    Raises UsageError (code jax.linear_gelu) for shapes that do not chain and dtypes other than bfloat16 and float32.
    """
    K = x.shape[-1] if x.ndim else 0
    bias_N = jnp.zeros(weight_NK.shape[0], x.dtype) if bias_N is None else bias_N
    if weight_NK.ndim != 2 or weight_NK.shape[1] != K or bias_N.shape != weight_NK.shape[:1] or not x.size:
        shapes = f"x {x.shape}, weight {weight_NK.shape}, bias {bias_N.shape}"
        raise UsageError(f"expected x (..., K), weight (N, K), bias (N,); got {shapes}", code="jax.linear_gelu")
    if x.dtype.name not in _DTYPES or weight_NK.dtype != x.dtype:
        dtypes = f"x {x.dtype.name}, weight {weight_NK.dtype.name}"
        raise UsageError(f"x and weight must both be bfloat16 or float32; got {dtypes}", code="jax.linear_gelu")
    act_MN, _ = _linear_gelu(x.reshape(-1, K), weight_NK, bias_N, tanh=approximate)
    return act_MN.reshape(*x.shape[:-1], -1)


def eight_bit_linear(x: jax.Array, weight_NK: jax.Array, bias_N: jax.Array | None = None) -> jax.Array:
    """Return x weightᵀ + bias in x's dtype, (..., N), with all three products of forward and backward pass in int8.

    x, the output's gradient and the weight are rounded with a scale per row of the product, inside its kernel; for the
    weight's gradient, which sums over tokens, with a scale per column of 1024 rows.

    Args:
        x: (B, ..., K), bfloat16 or float32.
        weight_NK: (output features, input features); for a flax kernel (K, N), pass kernel.T.

    Raises UsageError (code jax.eight_bit_linear) for shapes that do not chain and for other dtypes.
    """
    if x.ndim < 2 or not x.size or weight_NK.ndim != 2 or weight_NK.shape[1] != x.shape[-1]:
        message = f"expected x (B, ..., K) and weight (N, K); got {x.shape} and {weight_NK.shape}"
        raise UsageError(message, code="jax.eight_bit_linear")
    if x.dtype.name not in _DTYPES:
        raise UsageError(f"x must be bfloat16 or float32, not {x.dtype.name}", code="jax.eight_bit_linear")
    rows = x.reshape(x.shape[0], -1, x.shape[-1])
    y = _eight_bit_linear(rows, weight_NK).reshape(*x.shape[:-1], -1)
    return y if bias_N is None else y + bias_N.astype(y.dtype)


def _eight_bit_product(x_BNK: jax.Array, weight_NK: jax.Array, transposed: bool) -> jax.Array:
    arrays = x_BNK, *eight_bit_kernel.round_weight(weight_NK, transposed=transposed)
    return norm_forward(*arrays, given=("x", "weight", "weight_scale"), eps=0.0, out=x_BNK.dtype.name)[0]


def _eight_bit_forward(x_BNK: jax.Array, weight_NK: jax.Array) -> jax.Array:
    return _eight_bit_product(x_BNK, weight_NK, True)


def _eight_bit_vjp(primals, outputs, cotangents):
    (x, weight), (dy,) = primals, cotangents
    dweight = eight_bit_kernel.weight_gradient(dy, x)[0]
    return [_eight_bit_product(dy, weight, False), dweight.astype(weight.dtype)]


_eight_bit_linear = differentiable(_eight_bit_forward, _eight_bit_vjp)


def int8_matmul(x_MK: jax.Array, w_KN: jax.Array) -> jax.Array:
    """Return x w as int32 (M, N) for int8 x and w. It has no gradient.

    Raises UsageError (code jax.int8_matmul) for other dtypes and for shapes that do not chain.
    """
    if x_MK.dtype != jnp.int8 or w_KN.dtype != jnp.int8:
        dtypes = f"x {x_MK.dtype.name}, w {w_KN.dtype.name}"
        raise UsageError(f"x and w must be int8; got {dtypes}", code="jax.int8_matmul")
    if x_MK.ndim != 2 or w_KN.ndim != 2 or x_MK.shape[1] != w_KN.shape[0] or not x_MK.size or not w_KN.size:
        message = f"expected x (M, K) and w (K, N); got {x_MK.shape} and {w_KN.shape}"
        raise UsageError(message, code="jax.int8_matmul")
    return _int8_matmul(x_MK, w_KN, transposed=False)
