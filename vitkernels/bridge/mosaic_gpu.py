"""Mosaic-GPU Pallas kernels launched on torch CUDA tensors: compiled once per shape, then a few microseconds a call.

Beside `jax.experimental.pallas.mosaic_gpu.as_torch_kernel`, which this follows: it runs on torch's current stream (so
in CUDA graphs too; as_torch_kernel always takes the default stream), it writes into tensors that the caller hands it
(so two kernels can fill parts of one), and it does no work per call but the launch.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial

import jax
import torch
from jax.experimental.mosaic import gpu as mgpu
from torch import Tensor

from vitkernels.bridge.jax_compat import keeping_cuda_context, start


class Kernel:
    """`function`, one Mosaic-GPU kernel call and nothing else, compiled for arguments of these shapes.

    kernel(*inputs, *outputs): contiguous CUDA tensors of the traced shapes and dtypes, always of one device; nothing of
    it is checked. Raises ValueError where `function` is not one Mosaic-GPU kernel, and RuntimeError where Mosaic GPU
    cannot compile it.
    """

    def __init__(self, function: Callable, shapes: Sequence[jax.ShapeDtypeStruct]):
        self.module = mosaic_module(function, shapes)
        self._launch = None

    def __call__(self, *tensors: Tensor) -> None:
        device = tensors[0].get_device()
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(*tensors)
        if self._launch is None:
            self._launch = _compile(self.module)
        pointers = (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
        # torch.cuda.current_stream() makes an object: host time that adds up in short steps
        self._launch(torch._C._cuda_getCurrentRawStream(device), pointers)


def mosaic_module(function: Callable, shapes: Sequence[jax.ShapeDtypeStruct]) -> bytes:
    """The Mosaic-GPU module that `function` calls: lowered for CUDA, with or without a GPU.

    Raises ValueError where `function` does more than hand its arguments to one kernel and return that one's results.
    """
    from jax._src.lib.mlir import passmanager

    start()
    module = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).compiler_ir()
    with module.context:
        mgpu.dialect.register_inliner_extensions(module.context)
        passmanager.PassManager.parse("builtin.module(inline{default-pipeline=})").run(module.operation)
        (main,) = (op for op in module.body.operations if op.operation.name == "func.func" and op.name.value == "main")
        (block,) = main.body.blocks
        call, *rest = block.operations
        direct = (
            call.operation.name == "stablehlo.custom_call"
            and call.call_target_name.value == "mosaic_gpu_v2"
            and len(rest) == 1
            and list(call.operands) == list(block.arguments)
            and list(rest[0].operands) == list(call.results)
            and not call.output_operand_aliases
        )
        if not direct:
            raise ValueError("not one Mosaic-GPU kernel alone, on all arguments in their order, with all its results")
        return call.attributes["mhlo.backend_config"]["module"].value_bytes


def _compile(module: bytes) -> Callable:
    """Of a CUDA stream and pointers to the arguments; loaded into the current device."""
    torch.cuda.current_stream().synchronize()  # makes this thread's CUDA context, if it has none
    with keeping_cuda_context():
        compiled = _library().MosaicGpuCompile(module, len(module))
    if not compiled:
        raise RuntimeError("Mosaic GPU failed to compile the kernel; what it printed says why")
    function, address = compiled[0], compiled[1]
    launch = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(address)
    return partial(launch, function)


@cache
def _library() -> ctypes.CDLL:
    try:
        import jax_plugins.xla_cuda13 as plugin
    except ImportError:
        import jax_plugins.xla_cuda12 as plugin
    library = ctypes.CDLL(plugin._get_library_path())
    library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.MosaicGpuCompile.restype = ctypes.POINTER(ctypes.c_void_p)
    return library
