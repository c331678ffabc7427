"""Estimate paged attention on a TPU v5e for given context lengths: pallas_tpu and JAX's own kernel.

The time of these kernels depends on the scalars that they prefetch: lengths and block tables. The scalars are inserted
at the start of the dumped schedule as stores, so the simulation follows the branches and copies of exactly this call.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitkernels.bridge.jax_compat import jax
from vitkernels.tpu_estimate import prefetched
from vitkernels.tpu_estimate.compile_process import compile_in
from vitkernels.tpu_estimate.estimate import ProgramEstimate, estimate_program
from vitkernels.tpu_estimate.paged_attention_case import PagedAttentionCase

CONTENDERS = ("pallas_tpu", "jax")


def build(contender: str, sizes: dict, pages_per_compute_block: int):
    """Return a contender as a JAX function, and the shapes of its bfloat16 arrays.

    The cache has as many pages as the block table has entries.
    """
    shape, case = jax.ShapeDtypeStruct, PagedAttentionCase(**sizes)
    B, K, S, D = case.sequences, case.key_heads, case.page_size, case.head_dim
    T = -(-case.tokens // S)
    cache = shape((K, B * T, S, D), "bfloat16")
    tables = shape((B,), "int32"), shape((B, T), "int32")
    arrays = (shape((B, case.query_heads, D), "bfloat16"), cache, cache, *tables)
    if contender == "pallas_tpu":
        from vitkernels.ops.paged_attention.tpu.attend import attend as ours

        attend: Any = partial(ours, megacore_mode=None, soft_cap=None)
    else:
        from jax.experimental.pallas.ops.tpu.paged_attention.paged_attention_kernel import paged_attention as theirs

        attend = theirs
    return partial(attend, pages_per_compute_block=pages_per_compute_block), arrays


def prefetched_scalars(
    contender: str, case: PagedAttentionCase, pages_per_compute_block: int, lens: np.ndarray
) -> list[np.ndarray]:
    """Return the scalars that the kernel prefetches, in the order of its operands."""
    T = -(-case.tokens // case.page_size)
    tables = np.random.default_rng(0).permutation(len(lens) * T).reshape(len(lens), T)
    if contender == "jax":  # the half of the buffer to use first, and a flag: nothing is loaded yet
        return [lens, tables.reshape(-1), np.array([0]), np.array([1])]
    from vitkernels.ops.paged_attention.tpu.page_grid import PageGrid

    _, (query, cache, _, _, table) = build(contender, vars(case), pages_per_compute_block)
    grid = PageGrid.of(query, cache, table, pages_per_compute_block, None, None)
    return [np.asarray(x) for x in grid.schedule(lens, tables)]


def estimate(
    contender: str, case: PagedAttentionCase, pages_per_compute_block: int, lens: np.ndarray
) -> ProgramEstimate:
    """Compile and estimate a contender; raise UsageError if it does not compile for the case."""
    scalars = prefetched_scalars(contender, case, pages_per_compute_block, lens)
    with tempfile.TemporaryDirectory(prefix="vitkernels_tpu_") as folder:
        arguments = (contender, vars(case), pages_per_compute_block)
        dump = compile_in(Path(folder), f"{__name__}:build", *arguments)
        prefetched.insert(Path(folder), scalars)
        return estimate_program(dump)
