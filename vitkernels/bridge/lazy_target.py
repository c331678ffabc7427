"""The platform and chip that torch_xla's lazy graphs target: its own device, unless overridden.

A graph recorded on a CPU can be compiled for a TPU elsewhere; it must then contain the TPU kernels.
"""

import torch

_override: tuple[str, str | None] | None = None  # per process, not per thread: autograd records on its own threads


def platform() -> str:
    """Return TPU, CPU or CUDA, in torch_xla's spelling."""
    if _override is not None:
        return _override[0]
    import torch_xla.runtime

    return torch_xla.runtime.device_type()  # type: ignore[return-value]  # None only without a device


@torch.compiler.assume_constant_result  # otherwise Dynamo would trace torch_xla's device query
def chip() -> str | None:
    """Return the target TPU (v5e, v5p, v6e), or None if the target is not a TPU."""
    if _override is not None:
        return _override[1]
    if platform() != "TPU":
        return None
    from torch_xla._internal import tpu

    return tpu.get_tpu_type().split("-")[0].replace("v5litepod", "v5e")


def record_for(name: str, chip: str | None) -> None:
    """Record all further graphs for this platform and chip; this machine cannot run them."""
    global _override
    _override = name, chip
