"""Launch Mosaic-GPU Pallas kernels on torch CUDA tensors: compiled once per shape, a few microseconds per launch.

Follows `jax.experimental.pallas.mosaic_gpu.as_torch_kernel`, with three differences. It launches on torch's current
stream, so it works in CUDA graphs (as_torch_kernel always uses the default stream). It writes into tensors that the
caller provides, so that two kernels can fill parts of one tensor. It does nothing per call except launch. Modules that
were lowered before are read from disk (module_cache.py).
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import jax
import torch
from jax.experimental.mosaic import gpu as mgpu
from torch import Tensor

from vitkernels.bridge import module_cache, mosaic_compiler
from vitkernels.bridge.cuda_context import enter_primary_context
from vitkernels.bridge.jax_compat import initialize_backends
from vitkernels.bridge.mosaic_compiler import Launch


class Kernel:
    """A function that is exactly one Mosaic-GPU kernel call, compiled for arguments of these shapes.

    Call as kernel(*inputs, *outputs) with contiguous CUDA tensors of the traced shapes and dtypes, always on the same
    device; nothing is checked. The first call compiles the kernel, or waits for the compilation that `start` began.

    Raises ValueError if `function` is not exactly one Mosaic-GPU kernel. Calls raise RuntimeError if Mosaic GPU cannot
    compile it.
    """

    def __init__(self, function: Callable, shapes: Sequence[jax.ShapeDtypeStruct]):
        self.module = module_cache.cached(mosaic_module, function, shapes)
        self._compilation: Future[Launch] | None = None
        self._launch: Launch | None = None

    def start(self, device: torch.device) -> None:
        """Start to compile in the background, unless a compilation has been started. device: with an index."""
        if self._compilation is None:
            self._compilation = mosaic_compiler.start(self.module, device.index)

    def __call__(self, *tensors: Tensor) -> None:
        device = tensors[0].get_device()
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(*tensors)
        if self._launch is None:
            self._launch = self._compiled(device)
        pointers = (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
        # torch.cuda.current_stream() constructs an object, and its host time adds up in short steps.
        self._launch(torch._C._cuda_getCurrentRawStream(device), pointers)

    def _compiled(self, device: int) -> Launch:
        self.start(torch.device("cuda", device))
        assert self._compilation is not None
        launch = self._compilation.result()
        enter_primary_context(device)  # a thread of autograd may have no context before its first kernel
        return launch


def mosaic_module(function: Callable, shapes: Sequence[jax.ShapeDtypeStruct]) -> bytes:
    """Lower `function` for CUDA, with or without a GPU, and return the Mosaic-GPU module it calls.

    Raises ValueError if `function` does more than pass its arguments to one kernel and return that kernel's results.
    """
    from jax._src.lib.mlir import passmanager

    initialize_backends()
    module = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).compiler_ir()
    with module.context:
        mgpu.dialect.register_inliner_extensions(module.context)  # type: ignore[attr-defined]
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
            raise ValueError("not a single Mosaic-GPU kernel on all arguments in order that returns all its results")
        return call.attributes["mhlo.backend_config"]["module"].value_bytes
