"""Interface between the training loop and a kind of device; the base class runs on the CPU."""

import contextlib
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitkernels.errors import UsageError, unknown_name
from vitkernels.runtime.machine import host_memory_bytes
from vitkernels.runtime.peaks import peak_flops

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


Tensors = tuple[Tensor, ...] | dict[str, Tensor]  # a batch, as a loader makes it


def map_tensors(function: Callable[[Tensor], Any], batch: Tensors) -> Any:
    """Return a batch of the same structure with the function's results."""
    if isinstance(batch, dict):
        return {name: function(tensor) for name, tensor in batch.items()}
    return tuple(function(tensor) for tensor in batch)


def unavailable_error(runtime: str, reason: str) -> UsageError:
    """Return the error of a runtime that cannot be used on this machine."""
    message = f"runtime {runtime!r} is unavailable: {reason}"
    return UsageError(message, code="runtime.unavailable", runtime=runtime, reason=reason)


class Runtime:
    """Device, autocast, clock, data feed and memory statistics of one kind of device; this class runs on the CPU.

    precision: "fp32", "bf16", "fp16" or "auto". Matrix products run in it under autocast; weights and optimizer state
    stay float32.

    Raises UsageError: "unknown_name" or "runtime.precision" for the precision, "runtime.unavailable" for the device.
    """

    name = "cpu"
    precisions: tuple[str, ...] = ("fp32", "bf16")
    default_precision = "fp32"
    compiles_by_default = False
    has_cuda_graphs = False
    pins_memory = False  # whether the loader should put batches in page-locked memory
    per_step_clock = True  # whether `stamp` can time single steps without waiting for the device

    def __init__(self, precision: str = "auto"):
        precision = self.default_precision if precision == "auto" else precision
        if precision not in PRECISIONS:
            raise unknown_name("precision", precision, [*PRECISIONS, "auto"])
        if precision not in self.precisions:
            raise UsageError(
                f"runtime {self.name!r} does not support precision {precision!r}; it supports "
                f"{', '.join(self.precisions)} and auto",
                code="runtime.precision",
                runtime=self.name,
                precision=precision,
            )
        self.precision = precision
        self.dtype = PRECISIONS[precision]
        self.device = self._device()

    def _device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def device_name(self) -> str:
        """The device's name as its driver reports it."""
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'' if threads == 1 else 's'}"

    def describe(self) -> str:
        """Return runtime, device and precision as text for a log."""
        return f"{self.name} ({self.device_name}), {self.precision}"

    @property
    def peak_flops(self) -> float | None:
        """Peak dense FLOP/s of this device in this precision; None if unknown."""
        return peak_flops(self.device_name, self.dtype)

    # ---- the step ----

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context for forward passes in this precision."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def compile(self, model: nn.Module, mode: str | None = None) -> nn.Module:
        """Return the model compiled by torch.compile; mode: one of torch.compile's modes."""
        compiled: Any = torch.compile(model, mode=mode)
        return compiled

    def optimizer_kwargs(self, name: str) -> dict:
        """Return constructor arguments that make timm's optimizer `name` faster on this device."""
        return {}

    def grad_scaler(self) -> torch.amp.GradScaler:
        """Return the loss scaler for fp16; it is disabled in the other precisions."""
        return torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")

    def feed(self, batches: Iterable[Tensors]) -> Iterator[Tensors]:
        """Yield the batches on the device; accelerators copy them ahead of the step that uses them."""
        yield from batches

    def end_step(self, images: Tensor, targets: Tensor, kind: str = "train") -> None:
        """Mark the end of one step on this batch; kind is "train" or "eval"."""

    # ---- the clock ----

    def synchronize(self) -> None:
        """Wait until the device has completed all queued work."""

    def stamp(self):
        """Return a time stamp in the device's stream of work; see `elapsed_ms`."""
        return time.perf_counter()

    def elapsed_ms(self, start, end) -> float:
        """Return the milliseconds between two stamps; valid after `synchronize`."""
        return (end - start) * 1e3

    def has_reached(self, stamp) -> bool | None:
        """Return, without waiting, whether the device has passed a stamp; None if the host itself computes."""
        return None

    def hold(self, ms: float) -> bool:
        """Keep the device busy for at least this time, so that the host gets ahead; return whether the device can."""
        return False

    # ---- reading back ----

    def read(self, scalars: list[Tensor]) -> list[float]:
        """Return the values of scalar device tensors, in one transfer if possible. Waits for the device."""
        return torch.stack([s.detach().float() for s in scalars]).tolist() if scalars else []

    def peak_memory_bytes(self) -> int | None:
        """Return the peak memory so far: of the process on the CPU, of tensors on an accelerator; None if unknown."""
        try:
            (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
            return int(kib) * 1024
        except (OSError, ValueError):  # not Linux, or a sandbox
            # An upper bound: the value survives fork and exec, so it may be the parent's.
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def total_memory_bytes(self) -> int | None:
        """Return the memory that the device can offer: the host's with swap on the CPU; None if unknown."""
        return host_memory_bytes()

    # ---- random state ----

    def rng_state(self) -> dict:
        """Return the state of the device's own random generator, as tensors and numbers; empty on the CPU."""
        return {}

    def set_rng_state(self, state: dict) -> None:
        """Restore the state that `rng_state` returned."""
