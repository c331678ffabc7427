"""pallas_flash in Pallas's faithful TPU interpreter, compared with the flash attention of JAX and torch_xla.

Unlike the plain interpreter, the faithful one gives each kernel separate memory filled with NaN, runs copies as late as
their waits allow, and reports races: accesses that no wait or barrier orders. It is slow, so shapes are small.
"""

from functools import partial

import pytest

pytest.importorskip("jax")

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vitkernels.attention.pallas_flash.tpu import dispatch, online_softmax, single_pass
from vitkernels.attention.pallas_flash.tpu.block_plans import PassBlocks
from vitkernels.attention.pallas_flash.tpu.tiles import TpuProblem
from vitkernels.bridge.jax_compat import interpreted

pytestmark = pytest.mark.slow

# float32: a few hundred products of rounded inputs, 6e-8 each, and the softmax between two products.
TOLERANCE = 5e-6


def races_found() -> bool:
    """Return whether the last kernel had a race; the interpreter prints it and sets this flag."""
    try:
        import jax._src.pallas.mosaic.interpret.interpret_pallas_call as interpreter
    except ModuleNotFoundError:  # jax 0.7.1
        import jax._src.pallas.mosaic.interpret as interpreter
    return interpreter.races.races_found


def reference(q, k, v, do):
    """Return the output, dq, dk and dv of (B, H, N, D) in float64."""
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    s = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
    return p @ v, ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do


def inputs(B, H, N, D, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((B, H, N, D)).astype(np.float32) for _ in range(4)]


def token_major(x):
    B, H, N, D = x.shape
    return jnp.asarray(x.transpose(0, 2, 1, 3).reshape(B, N, H * D))


def head_major(x, heads):
    B, N, E = x.shape
    return np.asarray(x).reshape(B, N, heads, E // heads).transpose(0, 2, 1, 3)


def close(found, expected, tolerance=TOLERANCE):
    for ours, exact in zip(found, expected, strict=True):
        assert np.abs(ours - exact).max() <= tolerance * np.abs(exact).max()


@pytest.mark.parametrize(
    ("kernels", "shape", "blocks"),
    [
        (
            single_pass,
            (2, 2, 37, 64),
            PassBlocks(2, 256, 128),
        ),  # two images: one's copies overlap the other's computation
        (online_softmax, (1, 16, 300, 8), PassBlocks(16, 256, 256)),  # two blocks of queries by two of keys
    ],
    ids=["single_pass", "online_softmax"],
)
def test_kernels__have_no_races_or_uninitialized_reads(kernels, shape, blocks):
    B, H, N, D = shape
    problem = TpuProblem(B, H, D, N, N, D**-0.5, False, "float32", None, None, False)
    q, k, v, do = (token_major(x) for x in inputs(*shape))
    mode = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="uninitialized")
    with pltpu.force_tpu_interpret_mode(mode):
        found = kernels.forward(problem, blocks, (q, k, v), None, None, None)
        outputs = jax.block_until_ready(found if isinstance(found, (list, tuple)) else (found,))
        assert not races_found()
        residuals = outputs if kernels is online_softmax else ()
        gradients, _ = kernels.backward(problem, blocks, (q, k, v), *residuals, do, None, None, None, False)
        jax.block_until_ready(gradients)
    assert not races_found()
    close([head_major(x, H) for x in (outputs[0], *gradients)], reference(*inputs(*shape)))


def test_race__is_detected():
    """Run a kernel that reads the destination of a pending copy."""

    def kernel(x_ref, o_ref, scratch_ref, flag):
        copy = pltpu.make_async_copy(x_ref, scratch_ref, flag)
        copy.start()
        o_ref[...] = scratch_ref[...]
        copy.wait()

    run = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager"),
    )
    jax.block_until_ready(run(jnp.ones((8, 128))))
    assert races_found()


def jax_flash(sizes, q, k, v, do):
    """Return the output and gradients of JAX's flash attention, interpreted."""
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    def both(q, k, v, do):
        attend = partial(flash.flash_attention, sm_scale=q.shape[-1] ** -0.5, block_sizes=flash.BlockSizes(**sizes))
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(do)

    run = interpreted(jax.make_jaxpr(both)(q, k, v, do))
    return [np.asarray(x) for x in jax.extend.core.jaxpr_as_fun(run)(*map(jnp.asarray, (q, k, v, do)))]


def ours(q, k, v, do):
    """Return the output and gradients of pallas_flash, through its JAX functions."""
    H, D = q.shape[1], q.shape[3]
    static = {"heads": H, "scale": D**-0.5, "is_causal": False, "extras": (), "bias_gradient": False}

    def both(q, k, v, do):
        outputs = dispatch.attend(q, k, v, **static)
        outputs = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
        return outputs[0], *dispatch.attend_vjp((q, k, v), tuple(outputs), (do,), **static)

    arrays = [token_major(x) for x in (q, k, v, do)]
    run = interpreted(jax.make_jaxpr(both)(*arrays))
    return [head_major(x, H) for x in jax.extend.core.jaxpr_as_fun(run)(*arrays)]


NAMES = ("block_q", "block_k_major", "block_k", "block_q_major_dkv", "block_k_major_dkv", "block_k_dkv", "block_q_dkv")
NAMES += ("block_k_major_dq", "block_k_dq", "block_q_dq")


def test_accuracy__close_to_that_of_jax_flash():
    """Compare both with float64, allowing a factor 1.5 for sampling noise."""
    arrays = inputs(1, 2, 256, 64)
    exact = reference(*arrays)
    theirs = jax_flash({"block_b": 1, **dict.fromkeys(NAMES, 128)}, *arrays)
    for mine, other, wanted in zip(ours(*arrays), theirs, exact, strict=True):
        error = [np.linalg.norm(x - wanted) / np.linalg.norm(wanted) for x in (mine, other)]
        assert error[0] <= 1.5 * error[1] and error[1] < TOLERANCE


@pytest.mark.parametrize("N", [256, 1024])
def test_output__equals_torch_xla_flash(N):
    """torch_xla runs JAX's kernel in its own blocks, clipped to N; without a bias it is correct at these lengths."""
    pytest.importorskip("torch_xla")
    from torch_xla.experimental.custom_kernel import FlashAttention

    arrays = inputs(1, 1, N, 64)
    sizes = {name: min(size, N) for name, size in FlashAttention.DEFAULT_BLOCK_SIZES.items()}
    sizes["block_b"] = 1
    theirs = jax_flash(sizes, *arrays)
    close(ours(*arrays), theirs, 2 * TOLERANCE)  # each is off by up to TOLERANCE
