"""Run a traced JAX function on each kind of torch tensor: CPU, torch_xla, CUDA."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.extend.core as jex_core
import torch
from torch import Tensor

from vitkernels.bridge import lazy_target
from vitkernels.bridge.jax_compat import hlo_module, initialize_backends, interpreted, jit_on_cpu, keep_jax_off_tpu
from vitkernels.errors import UsageError

# XLA maps a compiled CPU program into memory some 40 times, and Linux allows a process 65530 maps. Programs that ran
# least recently are dropped, and compiled again if needed again.
_CPU_PROGRAMS = 256
_cpu_programs: "OrderedDict[int, Trace]" = OrderedDict()

_CPU_ALIGNMENT = 64  # bytes; XLA on the CPU copies buffers with a smaller alignment and warns

_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.uint32: "uint32",
    torch.bool: "bool",
}
# Without jax_enable_x64 JAX would silently narrow these to 32 bits.
_DTYPES_64 = {torch.float64: "float64", torch.int64: "int64", torch.uint64: "uint64"}
_TORCH_DTYPES = {name: dtype for dtype, name in (_DTYPES | _DTYPES_64).items()}


def check_tensors(name: str, tensors: tuple, device: torch.device | str | None) -> torch.device:
    """Return the device of a call.

    Raises TypeError for a positional argument that is not a tensor, and UsageError for an unsupported device, dtype or
    memory layout.
    """
    for i, t in enumerate(tensors):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: argument {i} is a {type(t).__name__}; pass static arguments by keyword")
    if not tensors:
        return torch.device("cpu" if device is None else device)
    found = {t.device for t in tensors} | ({tensors[0].device} if device is None else {_indexed(device, tensors[0])})
    if len(found) > 1:
        where = ", ".join(f"argument {i} on {t.device}" for i, t in enumerate(tensors))
        requested = "" if device is None else f", device={device}"
        raise UsageError(
            f"{name}: all tensors must be on one device, got {where}{requested}; move them with .to(device)",
            code="bridge.mixed_devices",
            devices=sorted(map(str, found)),
        )
    target = tensors[0].device
    if target.type not in ("cpu", "cuda", "xla", "meta"):
        raise _unsupported_device(name, target)
    for i, t in enumerate(tensors):
        _check_dtype(name, i, t.dtype)
        # vmap moves the mapped axis to the front and then copies
        mapped = torch._C._functorch.is_functorch_wrapped_tensor(t)
        if target.type in ("cpu", "cuda") and not t.is_contiguous() and not mapped:
            raise UsageError(
                f"{name}: argument {i}, {tuple(t.shape)}, has strides {t.stride()}; kernels need contiguous tensors "
                "and the bridge makes no copies: pass .contiguous()",
                code="bridge.not_contiguous",
                argument=i,
            )
    return target


def _unsupported_device(name: str, device: torch.device) -> UsageError:
    message = f"{name}: runs on cpu, cuda and xla tensors, not on {device}; move them with .to('cpu')"
    return UsageError(message, code="bridge.device", device=str(device))


def _indexed(device: torch.device | str, like: Tensor) -> torch.device:
    device = torch.device(device)
    return like.device if device.index is None and device.type == like.device.type else device


def _check_dtype(name: str, i: int, dtype: torch.dtype) -> None:
    if dtype in _DTYPES or (dtype in _DTYPES_64 and jax.config.jax_enable_x64):  # type: ignore[attr-defined]
        return
    if dtype in _DTYPES_64:
        narrow = str(dtype).replace("64", "32")
        raise UsageError(
            f"{name}: argument {i} is {dtype}, which JAX would silently narrow to 32 bits; pass .to({narrow}), or "
            "enable 64-bit types with jax.config.update('jax_enable_x64', True)",
            code="bridge.dtype_64",
            argument=i,
            dtype=dtype,
        )
    message = f"{name}: argument {i} is {dtype}; Pallas kernels support {', '.join(map(str, _DTYPES))}"
    raise UsageError(message, code="bridge.dtype", argument=i, dtype=dtype)


@dataclass
class Trace:
    """A JAX function traced for given input shapes, with its compiled form for each device it has run on."""

    name: str
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    jaxpr: jex_core.ClosedJaxpr
    single: bool  # the function returns one bare array
    outputs: list[tuple[tuple[int, ...], torch.dtype]]
    _compiled: dict[str, Callable] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, function: Callable, tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> "Trace":
        """Trace `function` for tensors of these (shape, dtype)s."""
        shapes = tuple(jax.ShapeDtypeStruct(shape, (_DTYPES | _DTYPES_64)[dtype]) for shape, dtype in tensors)
        jaxpr, out = jax.make_jaxpr(function, return_shape=True)(*shapes)
        leaves, out_tree = jax.tree.flatten(out)
        if not leaves:
            message = f"{name}: the function returned {out!r}, not an array; is a `return` missing?"
            raise UsageError(message, code="bridge.no_output")
        outputs = [(tuple(x.shape), _TORCH_DTYPES[x.dtype.name]) for x in leaves]
        return cls(name, shapes, jaxpr, jax.tree_util.treedef_is_leaf(out_tree), outputs)

    def run(self, tensors: list[Tensor], device: torch.device) -> list[Tensor]:
        """Run on these tensors; return the outputs on their device."""
        keep_jax_off_tpu(torch_xla_in_use=True if device.type == "xla" else None)
        initialize_backends()
        if device.type == "cpu":
            return self._run_cpu(tensors)
        if device.type == "xla":
            return self._run_xla(tensors, device)
        if device.type == "cuda":
            return self._run_cuda(tensors, device)
        raise _unsupported_device(self.name, device)

    def hlo(self, platform: str) -> bytes:
        """Return the serialized HLO module for "tpu" (Mosaic kernels), "cpu" (interpreted) or "cuda".

        The target device need not be present. A trace without inputs gets one scalar, which it ignores: torch_xla
        infers the device of a computation from its inputs.
        """
        shapes = self.shapes or (jax.ShapeDtypeStruct((), "float32"),)
        run = jex_core.jaxpr_as_fun(self._for_platform(platform))
        return hlo_module(lambda *arrays: run(*arrays[: len(self.shapes)]), shapes, platform)

    def _for_platform(self, platform: str):
        return interpreted(self.jaxpr) if platform == "cpu" else self.jaxpr

    def _once(self, key: str, make: Callable[[], Callable]) -> Callable:
        if key not in self._compiled:
            self._compiled[key] = make()
        return self._compiled[key]

    def _run_cpu(self, tensors):
        cpu = jax.local_devices(backend="cpu")[0]
        run = self._once("cpu", lambda: jit_on_cpu(jex_core.jaxpr_as_fun(self._for_platform("cpu"))))
        _keep_recent(self)
        aligned = [t if t.data_ptr() % _CPU_ALIGNMENT == 0 else t.clone() for t in tensors]
        with jax.default_device(cpu):  # for functions without inputs
            arrays = run(*map(jax.dlpack.from_dlpack, aligned))
        jax.block_until_ready(arrays)  # torch does not synchronize with JAX's reads of the inputs
        return self._to_torch(arrays, aligned)

    def _run_xla(self, tensors, device):
        import torch_xla.core.xla_builder as xla_builder

        target = lazy_target.platform()
        platform = {"TPU": "tpu", "CPU": "cpu", "CUDA": "cuda"}.get(target)
        if platform is None:
            message = f"{self.name}: torch_xla runs on {target}; Pallas supports TPU, CPU and CUDA"
            raise UsageError(message, code="bridge.xla_platform", platform=target)

        def make():
            computation = xla_builder.computation_from_module_proto(self.name, self.hlo(platform))
            return xla_builder.xla_computation_as_func(computation, name=f"xla::{self.name}")

        run = self._once(f"xla-{platform}", make)
        return list(run(tensors or [torch.zeros((), device=device)]))

    def _run_cuda(self, tensors, device):
        with torch.cuda.device(device):  # Mosaic-GPU kernels launch on torch's current device and stream
            return self._once(f"cuda:{device.index}", lambda: self._for_cuda(tensors))(tensors)

    def _for_cuda(self, tensors) -> Callable:
        """Return a direct launch if the function is exactly one Mosaic-GPU kernel; else jit through DLPack."""
        function = jex_core.jaxpr_as_fun(self.jaxpr)
        kernel = _mosaic_gpu_kernel(lambda *arrays: tuple(function(*arrays)), self.shapes) if tensors else None
        if kernel is not None:
            return lambda tensors: self._launch(kernel, tensors)
        if jax.default_backend() != "gpu":
            platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
            raise UsageError(
                f"{self.name}: JAX has no GPU here (platforms: {platforms}); pip install 'jax[cuda13]' "
                "and leave JAX_PLATFORMS unset",
                code="bridge.jax_without_gpu",
                platforms=platforms,
            )
        run = jax.jit(function)
        # DLPack synchronizes both ways: JAX's stream waits for torch's current stream on input, torch's for JAX's on
        # output.
        return lambda tensors: self._to_torch(run(*map(jax.dlpack.from_dlpack, tensors)), tensors)

    def _launch(self, kernel, inputs: list[Tensor]) -> list[Tensor]:
        outputs = [torch.empty(shape, dtype=dtype, device=inputs[0].device) for shape, dtype in self.outputs]
        kernel(*inputs, *outputs)
        return outputs

    def _to_torch(self, arrays, inputs: list[Tensor]) -> list[Tensor]:
        """Return JAX arrays as tensors that share their memory.

        An array that aliases an input or another output is copied: a torch op's outputs must not alias.
        """
        taken = {t.data_ptr() for t in inputs}
        outputs = []
        for array in arrays:
            t = torch.from_dlpack(array)
            outputs.append(t.clone() if t.numel() and t.data_ptr() in taken else t)
            taken.add(t.data_ptr())
        return outputs


def _keep_recent(trace: Trace) -> None:
    """Count a trace's CPU program as just used, and drop the least recently used ones beyond the limit."""
    _cpu_programs[id(trace)] = trace
    _cpu_programs.move_to_end(id(trace))
    while len(_cpu_programs) > _CPU_PROGRAMS:
        _, dropped = _cpu_programs.popitem(last=False)
        dropped._compiled.pop("cpu", None)


def _mosaic_gpu_kernel(function: Callable, shapes: tuple):
    """Return `function` as a Mosaic-GPU kernel to launch on torch tensors.

    None if it is not exactly one such kernel, or if the installed jax is older than 0.11.
    """
    if jax.__version_info__ < (0, 11):
        return None
    from vitkernels.bridge.mosaic_gpu import Kernel

    try:
        return Kernel(function, shapes)
    except (ValueError, NotImplementedError):
        return None
