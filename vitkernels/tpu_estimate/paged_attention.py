"""Paged attention on a TPU v5e, estimated: pallas_tpu beside JAX's own kernel, on given lengths.

How long such a kernel runs depends on the scalars it prefetches: lengths and tables. They are written into the dumped
schedule as stores at its start, and the estimate (tpu_schedule) then follows the very branches and copies of that call.
"""

import re
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from vitkernels.benchmarks.paged_attention import Case
from vitkernels.bridge.jax_compat import jax
from vitkernels.errors import UsageError
from vitkernels.tpu_estimate import dump as tpu_dump
from vitkernels.tpu_estimate import program

CONTENDERS = ("pallas_tpu", "jax")


def build(contender: str, sizes: dict, pages_per_compute_block: int):
    """A contender as a JAX function, and the shapes of its arrays: bfloat16, as many pages as the table has places."""
    shape, case = jax.ShapeDtypeStruct, Case(**sizes)
    B, K, S, D = case.sequences, case.key_heads, case.page_size, case.head_dim
    T = -(-case.tokens // S)
    cache = shape((K, B * T, S, D), "bfloat16")
    tables = shape((B,), "int32"), shape((B, T), "int32")
    arrays = (shape((B, case.query_heads, D), "bfloat16"), cache, cache, *tables)
    if contender == "pallas_tpu":
        from vitkernels.ops.paged_attention.tpu.attend import attend as ours

        attend = partial(ours, megacore_mode=None, soft_cap=None)
    else:
        from jax.experimental.pallas.ops.tpu.paged_attention.paged_attention_kernel import paged_attention as attend
    return partial(attend, pages_per_compute_block=pages_per_compute_block), arrays


def prefetched(contender: str, case: Case, pages_per_compute_block: int, lens: np.ndarray) -> list[np.ndarray]:
    """The scalars that the kernel reads, in its order."""
    T = -(-case.tokens // case.page_size)
    tables = np.random.default_rng(0).permutation(len(lens) * T).reshape(len(lens), T)
    if contender == "jax":  # which half of its buffer, and whether nothing has been loaded yet
        return [lens, tables.reshape(-1), np.array([0]), np.array([1])]
    from vitkernels.ops.paged_attention.tpu.page_grid import PageGrid

    _, (query, cache, _, _, table) = build(contender, vars(case), pages_per_compute_block)
    grid = PageGrid.of(query, cache, table, pages_per_compute_block, None, None)
    return [np.asarray(x) for x in grid.schedule(lens, tables)]


def estimate(contender: str, case: Case, pages_per_compute_block: int, lens: np.ndarray) -> program.Program:
    """Compile and estimate; raises UsageError where the contender does not compile for the case."""
    scalars = prefetched(contender, case, pages_per_compute_block, lens)
    with tempfile.TemporaryDirectory(prefix="vitkernels_tpu_") as folder:
        arguments = (contender, vars(case), pages_per_compute_block)
        dump = tpu_dump.compile_in(Path(folder), f"{__name__}:build", *arguments)
        for path in Path(folder).glob("*packed-bundles-post-ra.txt"):
            text = path.read_text()
            if "_to_smem" in text:
                path.write_text(with_scalars(text, scalars))
        return program.estimate(dump)


def with_scalars(text: str, scalars: list[np.ndarray]) -> str:
    """The kernel's schedule with its prefetched scalars stored where it will look for them.

    An array of them goes to SMEM by a copy, in the order of the operands; a single one arrives in a register.
    """
    for index, values in enumerate(scalars):
        found = rf"inlined_call_operand\.<no memory space> \[shape: s32\[1\], index: {index}, .*?shape index: {{}}\]"
        text = re.sub(found, f"smov {int(values[0])}", text)
    bases = dict(re.findall(r"%(\w+) = smov \[(#allocation\d+)\]", text))
    copies = re.findall(r"dma\.\w+_to_smem [^;}]*/\*smem=\*/%(\w+)", text)
    arrays = [values for values in scalars if len(values) > 1]
    if len(copies) != len(arrays):
        raise UsageError(f"{len(arrays)} arrays of scalars were given, and the kernel copies {len(copies)} to SMEM")
    stores = [
        f"%{9_000_000 + 100_000 * n + i} = sst [smem:[{bases[copy]} + $0x{i:x}]] {int(value)}"
        for n, (copy, values) in enumerate(zip(copies, arrays, strict=True))
        for i, value in enumerate(values)
    ]
    return text.replace("{ ", "{ " + " ;; ".join(stores) + " ;; ", 1)
