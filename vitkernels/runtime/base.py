"""What the training loop asks of a device. One subclass per kind of device."""

import contextlib
import re
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from vitkernels.errors import UsageError, unknown_name
from vitkernels.runtime.peaks import peak_flops

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Runtime:
    """Device, autocast, clock, data feed and memory of one kind of device. This base runs on the CPU.

    precision: fp32, bf16 or fp16. Products run in it under autocast; weights and optimizer state stay float32.
    """

    name = "cpu"
    precisions = ("fp32", "bf16")
    default_precision = "fp32"
    compiles_by_default = False
    pins_memory = False  # whether batches should come in page-locked memory
    per_step_clock = True  # whether `stamp` marks the end of a step without waiting for the device

    def __init__(self, precision: str = "auto"):
        precision = self.default_precision if precision == "auto" else precision
        if precision not in PRECISIONS:
            raise unknown_name("precision", precision, [*PRECISIONS, "auto"])
        if precision not in self.precisions:
            raise UsageError(
                f"runtime {self.name!r} does not train in {precision}; runtime.precision can be "
                f"{', '.join(self.precisions)} or auto"
            )
        self.precision = precision
        self.dtype = PRECISIONS[precision]
        self.device = self._device()

    def _device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def device_name(self) -> str:
        return f"CPU, {torch.get_num_threads()} threads"

    def describe(self) -> str:
        return f"{self.name} ({self.device_name}), {self.precision}"

    @property
    def peak_flops(self) -> float | None:
        """Peak FLOP/s of this device in this precision, None where unknown."""
        return peak_flops(self.device_name, self.dtype)

    # ---- the step ----

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def compile(self, model: nn.Module, mode: str | None = None) -> nn.Module:
        """torch.compile's view of the model, in one of torch.compile's modes."""
        return torch.compile(model, mode=mode)

    def optimizer_kwargs(self, name: str) -> dict:
        """Arguments for the constructor of timm's optimizer `name` that pay on this device."""
        return {}

    def grad_scaler(self) -> torch.amp.GradScaler:
        """Loss scaling for fp16; does nothing in the other precisions."""
        return torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")

    def feed(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches on the device, copied ahead of the step that uses them where the device can."""
        yield from batches

    def end_step(self, images: Tensor, targets: Tensor, kind: str = "train") -> None:
        """The boundary of one step on this batch; kind is "train" or "eval"."""

    # ---- the clock ----

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""

    def stamp(self):
        """A mark in the device's stream of work; see `elapsed_ms`."""
        return time.perf_counter()

    def elapsed_ms(self, start, end) -> float:
        """Milliseconds between two stamps; valid once the device is synchronized."""
        return (end - start) * 1e3

    def has_reached(self, stamp) -> bool | None:
        """Whether the device has done all up to a stamp, without waiting; None where the host does the work itself."""
        return None

    # ---- reading back ----

    def read(self, scalars: list[Tensor]) -> list[float]:
        """Values of scalar tensors on the device, in one transfer where possible. Waits for the device."""
        return torch.stack([s.detach().float() for s in scalars]).tolist() if scalars else []

    def peak_memory_bytes(self) -> int | None:
        """Most memory held so far: of the process on the CPU, of tensors on an accelerator. None where unknown."""
        try:
            (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
            return int(kib) * 1024
        except (OSError, ValueError):  # no Linux, or a sandbox's
            # May be the parent's: it outlives fork and exec.
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    # ---- random state ----

    def rng_state(self) -> dict:
        """State of the device's own random generator, beside the CPU's; tensors and numbers."""
        return {}

    def set_rng_state(self, state: dict) -> None:
        """Restore what `rng_state` returned."""
