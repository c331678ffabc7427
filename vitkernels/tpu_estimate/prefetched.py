"""Give a kernel's simulated schedule the scalars that the kernel prefetches, so that it follows their branches.

The time of a kernel with scalar prefetch depends on these values: lengths, block tables, masks of blocks. They are
inserted into the dumped schedule as stores at its start.
"""

import re
from pathlib import Path

import numpy as np

from vitkernels.errors import UsageError


def insert(folder: Path, scalars: list[np.ndarray]) -> None:
    """Insert the scalars into every kernel of a compilation's folder that copies scalars to SMEM."""
    for path in folder.glob("*packed-bundles-post-ra.txt"):
        text = path.read_text()
        if "_to_smem" in text:
            path.write_text(with_scalars(text, scalars))


def with_scalars(text: str, scalars: list[np.ndarray]) -> str:
    """Return the kernel's schedule with stores of its prefetched scalars at the start.

    The kernel copies an array of scalars to SMEM, in the order of its operands, and gets a single scalar in a register.
    """
    for index, values in enumerate(scalars):
        found = rf"inlined_call_operand\.<no memory space> \[shape: s32\[1\], index: {index}, .*?shape index: {{}}\]"
        text = re.sub(found, f"smov {int(values[0])}", text)
    bases = dict(re.findall(r"%(\w+) = smov \[(#allocation\d+)\]", text))
    copies = re.findall(r"dma\.\w+_to_smem [^;}]*/\*smem=\*/%(\w+)", text)
    arrays = [values for values in scalars if len(values) > 1]
    if len(copies) != len(arrays):
        message = f"got {len(arrays)} arrays of scalars, but the kernel copies {len(copies)} to SMEM"
        raise UsageError(message, code="tpu_estimate.scalars", arrays=len(arrays), copies=len(copies))
    stores = [
        f"%{9_000_000 + 100_000 * n + i} = sst [smem:[{bases[copy]} + $0x{i:x}]] {int(value)}"
        for n, (copy, values) in enumerate(zip(copies, arrays, strict=True))
        for i, value in enumerate(values)
    ]
    return text.replace("{ ", "{ " + " ;; ".join(stores) + " ;; ", 1)
