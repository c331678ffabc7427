"""How an adopted JAX function runs on each kind of torch tensor: CPU, torch_xla, CUDA."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.extend.core as jex_core
import torch
from torch import Tensor

from vitkernels.bridge import lazy_target
from vitkernels.bridge.jax_compat import close_tpu, hlo_module, interpreted, mosaic_gpu_kernel, start
from vitkernels.errors import UsageError

_CPU_ALIGNMENT = 64  # bytes; XLA on the CPU takes no buffer with less, and would copy it with a warning

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
    """The device of a call; raises TypeError or UsageError when its arguments cannot be taken as they are."""
    for i, t in enumerate(tensors):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: argument {i} is a {type(t).__name__}; static arguments go by keyword")
    if not tensors:
        return torch.device("cpu" if device is None else device)
    found = {t.device for t in tensors} | ({tensors[0].device} if device is None else {_indexed(device, tensors[0])})
    if len(found) > 1:
        where = ", ".join(f"argument {i} on {t.device}" for i, t in enumerate(tensors))
        asked = "" if device is None else f", device={device}"
        raise UsageError(f"{name}: all tensors must be on one device, got {where}{asked}; move them with .to(device)")
    target = tensors[0].device
    if target.type not in ("cpu", "cuda", "xla", "meta"):
        raise UsageError(f"{name}: runs on cpu, cuda and xla tensors, not on {target}; move them with .to('cpu')")
    for i, t in enumerate(tensors):
        _check_dtype(name, i, t.dtype)
        mapped = torch._C._functorch.is_functorch_wrapped_tensor(t)  # by vmap, which moves its axis and then copies
        if target.type in ("cpu", "cuda") and not t.is_contiguous() and not mapped:
            raise UsageError(
                f"{name}: argument {i}, {tuple(t.shape)}, has strides {t.stride()}; kernels take row-major memory and "
                "the bridge copies nothing: pass .contiguous()"
            )
    return target


def _indexed(device: torch.device | str, like: Tensor) -> torch.device:
    device = torch.device(device)
    return like.device if device.index is None and device.type == like.device.type else device


def _check_dtype(name: str, i: int, dtype: torch.dtype) -> None:
    if dtype in _DTYPES or (dtype in _DTYPES_64 and jax.config.jax_enable_x64):
        return
    if dtype in _DTYPES_64:
        narrow = str(dtype).replace("64", "32")
        raise UsageError(
            f"{name}: argument {i} is {dtype}, which JAX would narrow to 32 bits without a word; pass .to({narrow}), "
            "or turn 64-bit types on with jax.config.update('jax_enable_x64', True)"
        )
    raise UsageError(f"{name}: argument {i} is {dtype}; Pallas kernels take {', '.join(map(str, _DTYPES))}")


@dataclass
class Trace:
    """A JAX function traced for given input shapes, and its compiled form for each device it ran on."""

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
            raise UsageError(f"{name}: the function returned {out!r}, and no array; does it lack a `return`?")
        outputs = [(tuple(x.shape), _TORCH_DTYPES[x.dtype.name]) for x in leaves]
        return cls(name, shapes, jaxpr, jax.tree_util.treedef_is_leaf(out_tree), outputs)

    def run(self, tensors: list[Tensor], device: torch.device) -> list[Tensor]:
        """The outputs, on the tensors' device."""
        close_tpu(torch_xla_in_use=True if device.type == "xla" else None)
        start()
        if device.type == "cpu":
            return self._run_cpu(tensors)
        if device.type == "xla":
            return self._run_xla(tensors, device)
        if device.type == "cuda":
            return self._run_cuda(tensors, device)
        raise UsageError(f"{self.name}: runs on cpu, cuda and xla tensors, not on {device}")

    def hlo(self, platform: str) -> bytes:
        """The serialized HLO module for "tpu" (Mosaic kernels), "cpu" (interpreted) or "cuda"; needs no such device.

        A trace without inputs gets one scalar that it ignores, because torch_xla finds the device of a computation by
        its inputs.
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
        run = self._once("cpu", lambda: jax.jit(jex_core.jaxpr_as_fun(self._for_platform("cpu"))))
        aligned = [t if t.data_ptr() % _CPU_ALIGNMENT == 0 else t.clone() for t in tensors]
        with jax.default_device(cpu):  # for functions without inputs
            arrays = run(*map(jax.dlpack.from_dlpack, aligned))
        jax.block_until_ready(arrays)  # torch neither waits for JAX nor knows that it reads the inputs
        return self._to_torch(arrays, aligned)

    def _run_xla(self, tensors, device):
        import torch_xla.core.xla_builder as xla_builder

        target = lazy_target.platform()
        platform = {"TPU": "tpu", "CPU": "cpu", "CUDA": "cuda"}.get(target)
        if platform is None:
            raise UsageError(f"{self.name}: torch_xla runs on {target}; Pallas knows TPU, CPU and CUDA")

        def make():
            computation = xla_builder.computation_from_module_proto(self.name, self.hlo(platform))
            return xla_builder.xla_computation_as_func(computation, name=f"xla::{self.name}")

        run = self._once(f"xla-{platform}", make)
        return list(run(tensors or [torch.zeros((), device=device)]))

    def _run_cuda(self, tensors, device):
        with torch.cuda.device(device):  # Mosaic-GPU's launcher takes torch's current device and its current stream
            return self._once(f"cuda:{device.index}", lambda: self._for_cuda(tensors))(tensors)

    def _for_cuda(self, tensors) -> Callable:
        """Mosaic-GPU's direct launch where the function is one such kernel and nothing else; else DLPack and jit."""
        function = jex_core.jaxpr_as_fun(self.jaxpr)
        kernel = mosaic_gpu_kernel(lambda *arrays: tuple(function(*arrays)), self.shapes) if tensors else None
        if kernel is not None:
            return lambda tensors: self._launch(kernel, tensors)
        if jax.default_backend() != "gpu":
            raise UsageError(
                f"{self.name}: JAX has no GPU here (its platforms: {jax.config.jax_platforms}); pip install "
                "'jax[cuda13]' and leave JAX_PLATFORMS unset"
            )
        run = jax.jit(function)
        # DLPack orders both ways: JAX's stream waits for torch's current one on the way in, torch's for JAX's on the
        # way out.
        return lambda tensors: self._to_torch(run(*map(jax.dlpack.from_dlpack, tensors)), tensors)

    def _launch(self, kernel, inputs: list[Tensor]) -> list[Tensor]:
        outputs = [torch.empty(shape, dtype=dtype, device=inputs[0].device) for shape, dtype in self.outputs]
        kernel(*inputs, *outputs)
        return outputs

    def _to_torch(self, arrays, inputs: list[Tensor]) -> list[Tensor]:
        """JAX arrays as tensors that share their memory; one that JAX handed straight through is copied, because an
        op's outputs must be its own."""
        taken = {t.data_ptr() for t in inputs}
        outputs = []
        for array in arrays:
            t = torch.from_dlpack(array)
            outputs.append(t.clone() if t.numel() and t.data_ptr() in taken else t)
            taken.add(t.data_ptr())
        return outputs
