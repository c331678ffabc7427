"""NVIDIA GPUs through PyTorch itself."""

import os
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from vitkernels.errors import UsageError
from vitkernels.runtime.base import Runtime


class CudaRuntime(Runtime):
    """Autocast on tensor cores, torch.compile, fused optimizers, copies on a stream of their own."""

    name = "cuda"
    precisions = ("fp32", "bf16", "fp16")
    default_precision = "bf16"
    compiles_by_default = True
    pins_memory = True

    def _device(self) -> torch.device:
        reason = unavailable()
        if reason is not None:
            raise UsageError(f"runtime=cuda cannot run here: {reason}")
        number = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))  # torchrun's processes: one GPU each
        count = torch.cuda.device_count()
        if number >= count:
            raise UsageError(f"torchrun --nproc-per-node asks for more than this host's GPUs, {count}")
        torch.cuda.set_device(number)
        # A kernel that needs JAX starts it, and JAX would open every GPU of the host.
        os.environ.setdefault("JAX_CUDA_VISIBLE_DEVICES", str(number))
        return torch.device("cuda", number)

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def optimizer_kwargs(self, name: str) -> dict:
        return {"fused": True} if name in ("adam", "adamw", "sgd", "momentum") else {}  # torch's own have fused kernels

    def feed(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Copy one batch ahead on a side stream, from pinned memory and without blocking the host."""
        copies = torch.cuda.Stream(self.device)
        compute = torch.cuda.current_stream(self.device)

        def start_copy(batch):
            with torch.cuda.stream(copies):
                return [(t if t.is_pinned() else t.pin_memory()).to(self.device, non_blocking=True) for t in batch]

        ahead = None
        for batch in batches:
            coming = start_copy(batch)
            if ahead is not None:
                yield ahead
            compute.wait_stream(copies)
            for tensor in coming:
                tensor.record_stream(compute)  # its memory may be reused only after the step that reads it
            ahead = tuple(coming)
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

    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def rng_state(self) -> dict:
        return {"cuda": torch.cuda.get_rng_state(self.device)}

    def set_rng_state(self, state: dict) -> None:
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"].cpu(), self.device)


def unavailable() -> str | None:
    """Why CUDA cannot be used here and what would mend it; None when it can."""
    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) has no CUDA: pip install --force-reinstall torch (on Linux)."
    if not torch.cuda.is_available():
        return "PyTorch sees no NVIDIA GPU. Check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use runtime=cpu."
    return None
