"""Compile each pallas_flash kernel for TPU with libtpu's compiler, at the shapes that vision transformers use.

No TPU is needed. One or two images suffice: the batch size changes only the grid, not the compiled code.
"""

import functools

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

from vitkernels.attention.pallas_flash.tpu import block_plans, dispatch
from vitkernels.attention.pallas_flash.tpu.tiles import TpuProblem
from vitkernels.tpu_estimate import compiler

pytestmark = pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))


def compile_both(N, H=4, D=64, *, M=None, B=2, dtype=jnp.bfloat16, packed=True, chip="v5e", is_causal=False, **extras):
    """Compile forward and backward of one problem; `extras` are the shapes of bias, mask and segment_ids."""
    shape = jax.ShapeDtypeStruct
    M = N if M is None else M
    arrays = [shape((B, N, 3 * H * D), dtype)] if packed else [shape((B, t, H * D), dtype) for t in (N, M, M)]
    dtypes = {"bias": jnp.float32, "mask": jnp.bool_, "segment_ids": jnp.int32}
    inputs = (*arrays, *[shape(size, dtypes[name]) for name, size in extras.items()])
    static = {"heads": H, "scale": D**-0.5, "is_causal": is_causal, "extras": tuple(extras)}
    static["bias_gradient"] = "bias" in extras
    forward = functools.partial(dispatch.attend, **static)
    outputs = tuple(jax.tree.leaves(jax.eval_shape(forward, *inputs)))
    n = len(inputs)

    def backward(*all_arrays):
        primals, rest = all_arrays[:n], all_arrays[n:]
        gradients = dispatch.attend_vjp(primals, rest[:-1], rest[-1:], **static)
        return [g for g in gradients if g is not None]

    compiler.compile_jax(forward, inputs, chip=chip)
    compiler.compile_jax(backward, (*inputs, *outputs, outputs[0]), chip=chip)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


LONG = [slow(N) for N in (577, 640, 729, 1025, 4096)]


@pytest.mark.parametrize("N", [1, 49, 196, 197, 256, 257, *LONG])
def test_compiles__lengths(N):
    compile_both(N)


@pytest.mark.parametrize("N", [197, slow(1025)])
def test_compiles__float32(N):
    compile_both(N, H=2, dtype=jnp.float32)


@pytest.mark.parametrize("D", [32, 40, 48, 56, 72, 80, 88, 96, 104, 112, 120, 128])
def test_compiles__head_dims(D):
    compile_both(197, H=3, D=D, packed=False)


@pytest.mark.parametrize(("D", "N"), [(72, 256), slow(80, 257), slow(72, 729), slow(88, 4096)])
def test_compiles__heads_of_larger_models(D, N):
    compile_both(N, H=16, D=D, B=1)


def test_compiles__vit_base():
    compile_both(197, H=12)


def test_compiles__heads_that_do_not_fill_lane_tiles():
    compile_both(197, H=3)


@pytest.mark.parametrize(("N", "M"), [(1, 197), (197, 1), (64, 577), slow(2000, 77)])
def test_compiles__cross_attention(N, M):
    compile_both(N, M=M, packed=False)


@pytest.mark.parametrize(("N", "form"), [(197, "single_pass"), slow(577, "single_pass"), slow(1537, "online_softmax")])
def test_compiles__extras(N, form):
    extras = {"bias": (1, 2, N, N), "mask": (2, 1, 1, N), "segments": True}
    problem = TpuProblem(2, 2, 64, N, N, 0.125, is_causal=True, dtype="bfloat16", **extras)
    assert block_plans.rule(problem).form == form
    compile_both(N, H=2, bias=(1, 2, N, N), mask=(2, 1, 1, N), segment_ids=(2, N), is_causal=True)


@pytest.mark.parametrize("shape", [(1, 1, 197, 1), (1, 4, 1, 1)])
def test_compiles__bias_of_single_columns(shape):
    compile_both(197, bias=shape)


@pytest.mark.parametrize(("chip", "N"), [("v5p", 197), ("v6e", 197), slow("v6e", 1537)])
def test_compiles__other_chips(chip, N):
    compile_both(N, H=2, chip=chip)
