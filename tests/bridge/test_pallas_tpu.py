"""Compile every example kernel for TPU v5e with libtpu's compiler; no TPU is needed."""

import functools

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import torch
from expecting import error

from vitkernels.bridge.examples import quickstart
from vitkernels.bridge.pallas_devices import Trace
from vitkernels.tpu_estimate import compiler

pytestmark = pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))


def shapes(*sizes, dtype=jnp.bfloat16):
    return tuple(jax.ShapeDtypeStruct(size, dtype) for size in sizes)


# Mosaic has no one-dimensional vector of fewer than 128 16-bit elements; the quickstart's 8 are float32 here.
@pytest.mark.parametrize(
    ("size", "dtype"),
    [((8,), jnp.float32), ((1024,), jnp.bfloat16), ((8, 128), jnp.int32), ((197, 768), jnp.bfloat16)],
)
def test_add_vectors__compiles(size, dtype):
    compiler.compile_jax(quickstart.add_vectors_jax, shapes(size, size, dtype=dtype))


@pytest.mark.parametrize("length", [1, 8, 300])
def test_iota__compiles(length):
    trace = Trace.of("iota", functools.partial(quickstart.iota_jax, length=length), ())
    compiler.compile_hlo(trace.hlo("tpu"))


@pytest.mark.parametrize("activation", quickstart.ACTIVATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_matmul__compiles(activation, dtype):
    product = functools.partial(quickstart.matmul_jax, activation=activation)
    compiler.compile_jax(product, shapes((512, 768), (768, 256), dtype=dtype))


def test_vmap__compiles():
    compiler.compile_jax(jax.vmap(quickstart.matmul_jax), shapes((4, 256, 256), (4, 256, 256)))


@pytest.mark.parametrize("chip", ["v5p", "v6e"])
def test_matmul__compiles_for_other_chips(chip):
    compiler.compile_jax(quickstart.matmul_jax, shapes((512, 512), (512, 512)), chip=chip)


def test_lowered_op__compiles():
    trace = Trace.of("add", quickstart.add_vectors_jax, (((8, 128), torch.float32),) * 2)
    compiler.compile_hlo(trace.hlo("tpu"))


def test_unknown_chip__raises():
    with error("unknown_name", name="v9"):
        compiler.device("v9")
