"""Compile quantized_matmul's Pallas kernel for TPU v5e by libtpu's compiler, without a TPU."""

import functools

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

from vitkernels.ops.quantized_matmul.pallas_tpu_kernel import quantized_matmul
from vitkernels.tpu_estimate import compiler

pytestmark = pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))


@pytest.mark.parametrize("activation_bits", [16, 8])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("M", "K", "N", "block_size", "asymmetric"),
    [(197, 768, 1000, -1, True), (50, 97, 10, -1, False), (197, 256, 384, 64, True)],
)
def test_quantized_matmul_tpu__compiles_each_scheme(M, K, N, block_size, asymmetric, bits, activation_bits):
    shape = jax.ShapeDtypeStruct
    S = 1 if block_size == -1 else K // block_size
    unit = -(-(K // S) // (2 if bits == 4 else 1))
    w = shape((N, unit) if block_size == -1 else (S, unit, N), jnp.uint8 if bits == 4 else jnp.int8)
    scale = shape((N,) if block_size == -1 else (S, N), jnp.float32)
    arrays = [shape((M, K), jnp.bfloat16), w, scale, *[scale] * asymmetric, shape((N,), jnp.float32)]
    static = {"block_size": block_size, "weight_bits": bits, "activation_bits": activation_bits}
    function = functools.partial(quantized_matmul, has_zero=asymmetric, has_bias=True, **static)
    compiler.compile_jax(function, arrays)
