"""The platform that torch_xla's lazy graphs are recorded for: its own device's, unless told otherwise.

A graph recorded on a CPU can be compiled for a TPU elsewhere; then it must hold the TPU's kernels.
"""

_told: str | None = None  # of the process, not of a thread: autograd records backward passes on threads of its own


def platform() -> str:
    """TPU, CPU or CUDA, as torch_xla spells them."""
    if _told is not None:
        return _told
    import torch_xla.runtime

    return torch_xla.runtime.device_type()


def record_for(name: str) -> None:
    """From now on graphs are for this platform, whatever device records them; they can no longer run here."""
    global _told
    _told = name
