"""Check whether Mosaic-GPU Pallas kernels can run on this machine; importable without jax."""

import torch
from torch import Tensor


def unavailable() -> str | None:
    """Return why Mosaic-GPU kernels for NVIDIA Hopper cannot run on this machine, with the fix; None if they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        from vitkernels.bridge import jax_compat
    except ImportError as error:
        return str(error)
    import jax

    if jax.__version_info__ < (0, 11, 2):
        return f"its kernels for NVIDIA need jax 0.11.2 or newer, found {jax.__version__}: pip install 'jax[cuda13]'"
    if not jax_compat.has_cuda_plugin():
        return "its kernels for NVIDIA are compiled by JAX's CUDA plugin: pip install 'jax[cuda13]'"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return (
            "its kernels for NVIDIA use wgmma, which only Hopper has (compute capability 9.0); "
            f"{torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}"
        )
    return None


def can_compile_for(*tensors: Tensor | None) -> bool:
    """Return whether the kernels of a traced call on these fake tensors can be compiled during the trace.

    They can if the tensors stand for some on a GPU of this machine, and none of their sizes is a symbol.
    """
    given = [x for x in tensors if x is not None]
    on_gpu = torch.cuda.is_available() and all(x.device.type == "cuda" for x in given)
    return on_gpu and all(isinstance(size, int) for x in given for size in x.shape)
