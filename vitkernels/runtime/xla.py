"""TPUs through torch_xla's lazy graphs; with PJRT_DEVICE=CPU the same code runs on any machine."""

import contextlib
import functools
import importlib.util
import itertools
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitkernels.errors import UsageError
from vitkernels.runtime.base import Runtime, Tensors, unavailable_error

log = logging.getLogger(__name__)

# Cloud TPU's accelerator types -> names of the chips.
_CHIPS = {"v4": "TPU v4", "v5litepod": "TPU v5e", "v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e"}


class XlaRuntime(Runtime):
    """One lazy graph per optimizer step; MpDeviceLoader's threads copy batches to the device."""

    name = "xla"
    default_precision = "bf16"
    per_step_clock = False  # the host only queues graphs, so only windows of several steps can be timed

    def _device(self) -> torch.device:
        reason = unavailable()
        if reason is not None:
            raise unavailable_error(self.name, reason)
        import torch_xla
        import torch_xla.runtime as xr

        if xr.global_runtime_device_count() > 1:
            xr.use_spmd()  # one program over all chips (parallel/tpu_spmd.py); required before the first tensor
        self._guard = _RecompileGuard()
        return torch_xla.device()

    @property
    def device_name(self) -> str:
        import torch_xla.runtime as xr

        if xr.device_type() != "TPU":
            return f"XLA:{xr.device_type()}"
        from torch_xla._internal import tpu

        return _CHIPS.get(tpu.get_tpu_type().split("-")[0], "TPU")

    def compile(self, model: nn.Module, mode: str | None = None) -> nn.Module:
        if mode is not None:
            message = f"torch.compile's openxla backend has no modes, got {mode!r}; compile without a mode"
            raise UsageError(message, code="runtime.compile_mode", runtime="xla", mode=mode)
        compiled: Any = torch.compile(model, backend="openxla")
        return compiled

    def feed(self, batches: Iterable[Tensors], sharding=None) -> Iterator[Tensors]:
        """Yield the batches on the device.

        sharding: for SPMD, maps a tensor's number of dimensions to its ShardingSpec.
        """
        from torch_xla.distributed.parallel_loader import MpDeviceLoader

        batches = iter(batches)
        first = next(batches, None)
        if first is None:
            return
        failed = []

        def named(batch: Tensors) -> dict[str, Tensor]:
            return batch if isinstance(batch, dict) else dict(zip(("images", "targets"), batch, strict=True))

        def loaded():
            try:
                yield from itertools.chain([first], batches)
            except Exception as error:  # raised in the loader's thread, it would only end the epoch
                failed.append(error)

        # By default the loader cuts the graph after each batch. `end_step` cuts it once per step, so
        # batches_per_execution is never reached.
        loader = MpDeviceLoader(
            (named(batch) for batch in loaded()),
            self.device,
            batches_per_execution=1 << 62,
            loader_prefetch_size=4,
            device_prefetch_size=2,
            input_sharding=sharding and {name: sharding(x.dim()) for name, x in named(first).items()},
        )
        on_device = iter(loader)
        try:
            for batch in on_device:
                yield batch if isinstance(first, dict) else (batch["images"], batch["targets"])
            if failed:
                raise failed[0]
        finally:
            on_device._loader.close()  # ends its threads if the loop leaves an epoch early

    def end_step(self, images: Tensor, targets: Tensor, kind: str = "train") -> None:
        import torch_xla

        with self._guard.watch(kind, {"images": tuple(images.shape), "targets": tuple(targets.shape)}):
            torch_xla.sync()

    def synchronize(self) -> None:
        import torch_xla

        torch_xla.sync(wait=True)

    def read(self, scalars: list[Tensor]) -> list[float]:
        # Each scalar is an output of its step's graph and needs only a transfer; stacking would compile a new graph.
        return [float(s.detach().cpu()) for s in scalars]

    def peak_memory_bytes(self) -> int | None:
        return self._memory_info().get("peak_bytes_used")

    def total_memory_bytes(self) -> int | None:
        return self._memory_info().get("bytes_limit")

    def _memory_info(self) -> dict[str, Any]:
        import torch_xla.core.xla_model as xm

        try:
            return dict(xm.get_memory_info(self.device))
        except RuntimeError:
            return {}  # PJRT's CPU client has no memory statistics

    def rng_state(self) -> dict:
        import torch_xla.core.xla_model as xm

        return {"xla": xm.get_rng_state()}

    def set_rng_state(self, state: dict) -> None:
        import torch_xla.core.xla_model as xm

        if "xla" in state:
            xm.set_rng_state(state["xla"])


class _RecompileGuard:
    """Warn about recompilation after the first steps, naming the input shape that changed."""

    WARM_UP = 3  # steps of each kind that may compile: before, during and after creation of the optimizer state

    def __init__(self):
        self.seen: dict[str, int] = {}
        self.shapes: dict[str, dict[str, tuple[int, ...]]] = {}

    @contextlib.contextmanager
    def watch(self, kind: str, shapes: dict[str, tuple[int, ...]]):
        """Watch the execution of one step's graph."""
        before = _compilations()
        yield
        self.report(kind, shapes, _compilations() - before)

    def report(self, kind: str, shapes: dict[str, tuple[int, ...]], compiled: int) -> None:
        step = self.seen.get(kind, 0)
        previous = self.shapes.get(kind, shapes)
        self.seen[kind], self.shapes[kind] = step + 1, shapes
        if compiled == 0 or step < self.WARM_UP:
            return
        changed = [f"{name} {previous[name]} -> {shapes[name]}" for name in shapes if previous[name] != shapes[name]]
        why = "; ".join(changed) or (
            "no input shape changed; likely a Python number that is a constant of the graph, or a new branch"
        )
        log.warning("XLA compiled the %s step again at step %d after start: %s", kind, step, why)


def _compilations() -> int:
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("UncachedCompile") or 0


def unavailable() -> str | None:
    """Return why torch_xla is unavailable and how to fix it; None if it is available."""
    if importlib.util.find_spec("torch_xla") is None:
        return (
            "torch_xla is not installed; install the tpu extra (Linux x86-64, Python 3.11 to 3.13): "
            "pip install 'vitkernels[tpu]', or `make setup` in a checkout"
        )
    try:
        import torch_xla  # noqa: F401
    except (ImportError, OSError) as error:
        return (
            f"torch_xla does not load with torch {torch.__version__}: {error}; the tpu extra pins compatible versions"
        )
    return None


def has_tpu() -> bool:
    """Return whether a TPU is attached, from the device files: loads no library and locks no device."""
    from pathlib import Path

    return any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))


class Host(NamedTuple):
    """This host of a multi-host TPU slice: its rank, and the network addresses of all hosts by rank."""

    rank: int
    addresses: tuple[str, ...]


@functools.cache
def host() -> Host | None:
    """Return this machine's rank in its TPU slice, from the slice's metadata; None for a single host.

    Does not open the TPU, and loads torch_xla only if TPU device files exist.
    """
    on_tpu = has_tpu() and os.environ.get("PJRT_DEVICE", "TPU") == "TPU"
    if not on_tpu or unavailable() is not None:
        return None
    from torch_xla._internal import tpu

    has_cloud_tpu = tpu.num_available_chips() > 0
    if not has_cloud_tpu or tpu.process_bounds_size() == 1:  # configured as a single host
        return None
    try:
        addresses = tuple(tpu.get_worker_ips())
        return Host(tpu.worker_id(), addresses) if len(addresses) > 1 else None
    except (OSError, LookupError, TypeError, ValueError) as error:
        log.warning("TPU slice metadata cannot be read (%r); assuming a single host", error)
        return None
