"""Compile linear_gelu's Pallas kernel for TPU, at model sizes and odd sizes, by libtpu's compiler, without a TPU."""

import functools

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

from vitkernels.ops.linear_gelu import pallas_tpu_kernel as kernel
from vitkernels.tpu_estimate import compiler

pytestmark = pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))


@pytest.mark.parametrize(
    "M, K, N, dtype, tanh",
    [
        (25216, 1024, 4096, jnp.bfloat16, False),
        (33, 5120, 1280, jnp.bfloat16, True),
        (300, 4096, 4096, jnp.float32, False),
        (7, 5, 3, jnp.float32, True),
    ],
)
def test_linear_gelu_tpu__compiles(M, K, N, dtype, tanh):
    shapes = [jax.ShapeDtypeStruct(*x) for x in (((M, K), dtype), ((N, K), dtype), ((N,), jnp.float32))]
    compiler.compile_jax(functools.partial(kernel.linear_gelu, tanh=tanh), shapes)
