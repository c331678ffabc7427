"""The platform that torch_xla's lazy graphs are recorded for: its own device's, unless told otherwise.

A graph recorded on a CPU can be compiled for a TPU elsewhere; then it must hold the TPU's kernels.
"""

import torch

_told: tuple[str, str | None] | None = None  # of the process, not of a thread: autograd records on threads of its own


def platform() -> str:
    """TPU, CPU or CUDA, as torch_xla spells them."""
    if _told is not None:
        return _told[0]
    import torch_xla.runtime

    return torch_xla.runtime.device_type()


@torch.compiler.assume_constant_result  # Dynamo would trace what torch_xla does to find out
def chip() -> str | None:
    """The TPU that graphs are for: v5e, v5p, v6e; None where it is none."""
    if _told is not None:
        return _told[1]
    if platform() != "TPU":
        return None
    from torch_xla._internal import tpu

    return tpu.get_tpu_type().split("-")[0].replace("v5litepod", "v5e")


def record_for(name: str, chip: str | None) -> None:
    """From now on graphs are for this platform and chip, whatever records them; they can no longer run here."""
    global _told
    _told = name, chip
