"""Matrix products on TPUs for JAX programs: a linear layer with GELU in one kernel, and products of int8.

Shape suffixes: M rows, K the summed dimension, N columns or output features; "..." any dimensions.
"""

import jax
import jax.numpy as jnp

from vitkernels.errors import UsageError
from vitkernels.jax.differentiable import differentiable
from vitkernels.ops.int8_matmul import pallas_tpu_kernel as int8_kernel
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
