"""NVIDIA GPUs through PyTorch."""

import os
from collections.abc import Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from vitkernels.errors import UsageError
from vitkernels.runtime.base import Runtime, Tensors, map_tensors, unavailable_error

_FUSED_OPTIMIZERS = ("adam", "adamw", "sgd", "momentum")  # timm's names for classes of torch.optim
_URGENT = -1  # a stream's priority; the default is 0, and lower is sooner
_MOST_CYCLES_PER_MS = 2e6  # no GPU of this kind has a clock above 2 GHz; at a lower one a hold is longer


class CudaRuntime(Runtime):
    """One GPU per process: torch.compile by default, fused optimizers, batches copied on a side stream."""

    name = "cuda"
    precisions = ("fp32", "bf16", "fp16")
    default_precision = "bf16"
    compiles_by_default = True
    has_cuda_graphs = True
    pins_memory = True

    def _device(self) -> torch.device:
        reason = unavailable()
        if reason is not None:
            raise unavailable_error(self.name, reason)
        number = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))  # torchrun: one GPU per process
        count = torch.cuda.device_count()
        if number >= count:
            message = f"torchrun started a process for GPU {number}, and this host has {count}; lower --nproc-per-node"
            raise UsageError(message, code="runtime.devices", device=number, devices=count)
        torch.cuda.set_device(number)
        # Kernels that use JAX initialize it, and by default JAX would open every GPU of the host.
        os.environ.setdefault("JAX_CUDA_VISIBLE_DEVICES", str(number))
        return torch.device("cuda", number)

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def optimizer_kwargs(self, name: str) -> dict:
        return {"fused": True} if name in _FUSED_OPTIMIZERS else {}

    @cached_property
    def _copy_stream(self) -> torch.cuda.Stream:
        """Return the side stream that all feeds share. Memory freed on one stream is not reused on another."""
        return torch.cuda.Stream(self.device, priority=_URGENT)

    def feed(self, batches: Iterable[Tensors]) -> Iterator[Tensors]:
        """Copy one batch ahead on a side stream, from pinned memory, without blocking the host.

        What `batches` itself does on the device, such as decoding, runs on this stream, too. It takes precedence over
        the step's kernels: it is little work, and the next step waits for it.
        """
        copies = self._copy_stream
        compute = torch.cuda.current_stream(self.device)

        def start_copy(tensor: Tensor) -> Tensor:
            if tensor.is_cuda:  # another kind of loader has copied it
                return tensor
            pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
            return pinned.to(self.device, non_blocking=True)

        ahead, source = None, iter(batches)
        while True:
            with torch.cuda.stream(copies):
                batch = next(source, None)
                following = None if batch is None else map_tensors(start_copy, batch)
            if following is None:
                break
            if ahead is not None:
                yield ahead
            compute.wait_stream(copies)
            # Defer reuse of the memory until the step has read it.
            map_tensors(lambda tensor: tensor.record_stream(compute), following)
            ahead = following
        if ahead is not None:
            yield ahead

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def stamp(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start, end) -> float:
        return start.elapsed_time(end)

    def has_reached(self, stamp) -> bool:
        return stamp.query()

    def hold(self, ms: float) -> bool:
        torch.cuda._sleep(int(ms * _MOST_CYCLES_PER_MS))
        return True

    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def total_memory_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.device).total_memory

    def rng_state(self) -> dict:
        return {"cuda": torch.cuda.get_rng_state(self.device)}

    def set_rng_state(self, state: dict) -> None:
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"].cpu(), self.device)


def unavailable() -> str | None:
    """Return why CUDA is unavailable and how to fix it; None if it is available."""
    if torch.version.cuda is None:
        return (
            f"this PyTorch ({torch.__version__}) was built without CUDA: pip install --force-reinstall torch (on Linux)"
        )
    if not torch.cuda.is_available():
        return "PyTorch finds no NVIDIA GPU; check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    return None
