"""Paged attention's TPU kernels: compiled by libtpu, run with simulated DMA, and compared with JAX's kernel.

No test uses a TPU.
"""

import functools

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention_kernel as jax_kernels
from test_paged_attention import exact, make, relative_error

from vitkernels.ops import paged_attention
from vitkernels.ops.paged_attention.tpu.attend import attend
from vitkernels.tpu_estimate import compiler

needs_libtpu = pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))


def compile_kernel(
    B=4, K=2, G=1, D=128, S=16, T=8, P=64, block=4, dtype=jnp.bfloat16, megacore_mode=None, soft_cap=None, chip="v5e"
):
    shape = jax.ShapeDtypeStruct
    cache = shape((K, P, S, D), dtype)
    options = {"pages_per_compute_block": block, "megacore_mode": megacore_mode, "soft_cap": soft_cap}
    tables = shape((B,), jnp.int32), shape((B, T), jnp.int32)
    compiler.compile_jax(
        functools.partial(attend, **options), (shape((B, K * G, D), dtype), cache, cache, *tables), chip=chip
    )


@needs_libtpu
@pytest.mark.parametrize("D", [*range(32, 129, 8), 256])
def test_tpu_kernels__compile_for_each_head_dim(D):
    compile_kernel(D=D)


@needs_libtpu
@pytest.mark.parametrize("S", [8, 24, 128])
@pytest.mark.parametrize(
    ("dtype", "D"), [(jnp.bfloat16, 64), (jnp.bfloat16, 72), (jnp.bfloat16, 128), (jnp.float32, 64)]
)
def test_tpu_kernels__compile_for_each_page_size(S, dtype, D):
    compile_kernel(S=S, dtype=dtype, D=D)


@needs_libtpu
@pytest.mark.parametrize(("K", "G", "D"), [(8, 4, 128), (1, 8, 128), (12, 1, 64), (2, 196, 64)])
def test_tpu_kernels__compile_for_grouped_queries(K, G, D):
    compile_kernel(K=K, G=G, D=D)


@needs_libtpu
@pytest.mark.parametrize("D", [64, 128])
def test_tpu_kernels__compile_for_long_tables_and_large_blocks(D):
    """A block of all pages, which the kernel limits to the size of its buffers."""
    compile_kernel(B=16, D=D, T=256, P=4096, block=256)


@needs_libtpu
@pytest.mark.parametrize(("chip", "megacore_mode"), [("v5e", "batch"), ("v5p", "kv_head"), ("v5p", "batch")])
@pytest.mark.parametrize("D", [64, 128])
def test_tpu_kernels__compile_for_each_megacore_mode(chip, megacore_mode, D):
    compile_kernel(chip=chip, megacore_mode=megacore_mode, D=D)


@needs_libtpu
def test_tpu_kernels__compile_with_a_soft_cap():
    compile_kernel(soft_cap=30.0)


def numpys(tensors):
    return [x.numpy() for x in tensors]


@pytest.mark.parametrize("D", [64, 128])
def test_tpu_kernels__have_no_races_and_read_no_unwritten_memory(D):
    """DMAs complete as late as allowed, VMEM starts as NaN, and the interpreter detects races."""
    tensors = make("cpu", [0, 9, 48, 16], K=2, G=1, D=D)
    watched = pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=True, uninitialized_memory="nan")
    options = {"pages_per_compute_block": 2, "megacore_mode": None, "soft_cap": None}
    with pltpu.force_tpu_interpret_mode(watched):
        out = jax.jit(functools.partial(attend, **options))(*numpys(tensors))
    assert relative_error(torch.from_numpy(np.array(out)), exact(*tensors)) < 3e-6
    assert not races_seen()


def races_seen() -> bool:
    """Return whether the last interpreted kernel had races; JAX has no public name for it."""
    try:
        from jax._src.pallas.mosaic.interpret.interpret_pallas_call import races
    except ImportError:  # jax 0.7.1
        from jax._src.pallas.mosaic.interpret import races
    return races.races_found


def jax_kernel(tensors, **options):
    """Run JAX's kernel, interpreted. It reads unused entries of a table, and multiplies by unused rows of a page."""
    query, key_cache, value_cache, lens, table = tensors
    P = key_cache.shape[1]
    arrays = numpys([query, key_cache.nan_to_num(), value_cache.nan_to_num(), lens, table.clamp(0, P - 1)])
    with pltpu.force_tpu_interpret_mode():
        return torch.from_numpy(np.array(jax_kernels.paged_attention(*arrays, **options)))


@pytest.mark.parametrize(
    ("K", "G", "options"),
    [(1, 8, {}), (2, 1, {"attn_logits_soft_cap": 0.5})],
)
def test_tpu_kernels__agree_with_jax(K, G, options):
    """JAX's kernel rounds keys and values to bfloat16 for any cache dtype; here they already are."""
    query, *caches, lens, table = make("cpu", [0, 9, 48, 16], K=K, G=G, D=128)
    tensors = [query, *(cache.bfloat16().float() for cache in caches), lens, table]
    theirs = jax_kernel(tensors, pages_per_compute_block=2, **options)
    ours = paged_attention(*tensors, 2, **options, backend="pallas_tpu")
    assert relative_error(ours, theirs.double()) < 1e-5  # JAX's own test: allclose at 1e-5
    assert relative_error(paged_attention(*tensors, 2, **options, backend="reference"), theirs.double()) < 1e-5
