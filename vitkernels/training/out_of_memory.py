"""Explain a lack of memory, on any device, with the figures and settings that decide how much a run needs."""

import contextlib
import re
from collections.abc import Iterator

import torch

from vitkernels.runtime import Runtime

# Messages of CUDA, of PyTorch's CPU allocator and of XLA.
_SIGNS = re.compile(
    r"out of memory|DefaultCPUAllocator: (can't|not enough)|not enough memory: you tried|RESOURCE_EXHAUSTED", re.I
)
_REQUESTED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB)")


class OutOfMemoryError(RuntimeError):
    """A device or the host had too little memory for the run; `fields` has the figures."""

    code = "run.out_of_memory"

    def __init__(self, message: str, **fields: object):
        super().__init__(message)
        self.fields = fields


@contextlib.contextmanager
def explained(runtime: Runtime, batch_size: int, accum_steps: int, training: bool = True) -> Iterator[None]:
    """Raise OutOfMemoryError for a lack of memory within the context.

    Args:
        runtime: the runtime of the device that ran out.
        batch_size: images per device and batch.
        accum_steps: batches per optimizer step.
        training: whether the run can be resumed.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        peak = runtime.peak_memory_bytes()
        raise OutOfMemoryError(
            _sentence(error, runtime, peak, batch_size, accum_steps, training),
            batch_size=batch_size,
            accum_steps=accum_steps,
            peak_bytes=peak,
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(_SIGNS.search(str(error)))


def _sentence(
    error: BaseException, runtime: Runtime, peak: int | None, batch_size: int, accum_steps: int, training: bool
) -> str:
    asked = _REQUESTED.search(str(error))
    request = f", {_gib(asked)} more were requested" if asked else ""
    used = "peak unknown" if peak is None else f"peak so far {peak / 2**30:.2f} GiB"
    device = runtime.device_name.partition(",")[0]  # without the CPU's number of threads
    sentence = f"out of memory on {device} with a batch of {batch_size}: {used}{request}."
    if not training:
        return f"{sentence} Lower data.batch_size"
    if batch_size % 2 == 0:
        same = f"data.batch_size={batch_size // 2} trainer.accum_steps={2 * accum_steps}"
        sentence += f" {same} computes the same steps in less memory, with resume=auto from the newest checkpoint."
    return (
        f"{sentence} A smaller model or model.img_size, 16 bits (runtime.precision=bf16), and parallel=fsdp on several "
        "devices need less too"
    )


def _gib(asked: re.Match) -> str:
    unit = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[asked[2]]
    return f"{float(asked[1]) * unit / 2**30:.2f} GiB"
