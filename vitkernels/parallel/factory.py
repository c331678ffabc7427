"""Construction of the strategy that a name, its settings, the runtime and the launcher determine."""

from typing import NamedTuple

from vitkernels import torchrun_environment
from vitkernels.errors import UsageError, unknown_name
from vitkernels.parallel.base import Parallel
from vitkernels.runtime import Runtime, xla

NAMES = ("auto", "none", "ddp", "fsdp")
SENDS = ("auto", "nccl", "copy")
REDUCE_PRECISIONS = ("fp32", "bf16")
GATHER_PRECISIONS = ("auto", "fp32", "bf16")
MIN_LOST_AFTER = 3.0  # seconds: three heartbeats


def names() -> tuple[str, ...]:
    """Return the names that create() accepts."""
    return NAMES


class _Settings(NamedTuple):
    overlap: bool | str
    reduce: str
    gather: str
    reshard: bool
    send: str


def create(
    name: str,
    runtime: Runtime,
    lost_after: float = 30.0,
    overlap: bool | str = "auto",
    reduce: str = "fp32",
    gather: str = "auto",
    reshard: bool = False,
    send: str = "auto",
    accum_steps: int = 1,
) -> Parallel:
    """Return the named strategy, joined to the other processes; a context manager that leaves them.

    name: "none", "ddp", "fsdp" or "auto", which is ddp with several devices (torchrun's processes or the chips of a TPU
        slice) and none with one.
    lost_after: seconds without a heartbeat after which a process counts as lost.
    overlap: True, False or "auto"; with reduce as TorchrunProcesses explains it.
    gather, reshard: as Fsdp explains them. send: as Ddp does.
    accum_steps: micro-batches per optimizer step, which ddp takes into account with send="auto".
    Raises UsageError if the name or a setting is unknown, or does not fit the runtime or the launcher.
    """
    settings = _Settings(overlap, reduce, gather, reshard, send)
    _check_values(name, lost_after, settings)
    _check_gather(name, runtime, settings)
    world = torchrun_environment.world_size()
    if runtime.name == "xla":
        _check_xla(settings)
        return _create_spmd(name, runtime, world, lost_after)
    if name == "auto":
        name = "ddp" if world > 1 else "none"
    _check_strategy(name, world, settings)
    if name == "none":
        return Parallel(runtime)
    during_backward = None if isinstance(overlap, str) else overlap
    if name == "ddp":
        from vitkernels.parallel.ddp import Ddp

        return Ddp(runtime, lost_after, during_backward, reduce, send, accum_steps)
    from vitkernels.parallel.fsdp import Fsdp

    return Fsdp(runtime, lost_after, during_backward, reduce, gather, reshard)


def _check_values(name: str, lost_after: float, settings: _Settings) -> None:
    """Raise UsageError for a value that no strategy accepts."""
    choices = {
        "strategy": (name, NAMES),
        "reduce": (settings.reduce, REDUCE_PRECISIONS),
        "gather": (settings.gather, GATHER_PRECISIONS),
        "send": (settings.send, SENDS),
    }
    for setting, (value, known) in choices.items():
        if value not in known:
            raise unknown_name(f"parallel {setting}", value, known)
    if lost_after < MIN_LOST_AFTER:
        message = f"lost_after must be at least {MIN_LOST_AFTER:g} seconds; got {lost_after}"
        raise UsageError(message, code="parallel.value", setting="lost_after", value=lost_after)
    if settings.overlap not in (True, False, "auto"):
        message = f"overlap must be True, False or 'auto'; got {settings.overlap!r}"
        raise UsageError(message, code="parallel.value", setting="overlap", value=settings.overlap)


def _check_gather(name: str, runtime: Runtime, settings: _Settings) -> None:
    if settings.gather == "bf16" and (runtime.precision != "bf16" or runtime.name == "xla" or name != "fsdp"):
        raise _setting_error(
            name,
            "gather",
            settings,
            f"gather='bf16' needs fsdp under torchrun with precision bf16; got {name} on {runtime.name} with precision "
            f"{runtime.precision}. Use gather='auto'",
        )
    if settings.reshard and settings.overlap is False:
        message = "reshard=True gathers block by block, which overlap=False excludes"
        raise _setting_error(name, "reshard", settings, message)


def _check_xla(settings: _Settings) -> None:
    defaults = _Settings(overlap="auto", reduce="fp32", gather=settings.gather, reshard=False, send="auto")
    for setting, value, default in zip(_Settings._fields, settings, defaults, strict=True):
        if value != default:
            message = f"on a TPU XLA schedules communication: {setting} must be {default!r}; got {value!r}"
            raise _setting_error("xla", setting, settings, message)


def _check_strategy(name: str, world: int, settings: _Settings) -> None:
    """Raise UsageError for a setting that the strategy would ignore, and for none on several processes."""
    if settings.send != "auto" and name != "ddp":
        message = f"send={settings.send!r} is for ddp under torchrun; with {name} use send='auto'"
        raise _setting_error(name, "send", settings, message)
    if settings.reshard and name != "fsdp":
        raise _setting_error(name, "reshard", settings, f"reshard=True is for fsdp; with {name} use reshard=False")
    if name != "none":
        return
    if world > 1:
        raise UsageError(
            f"strategy none runs one process, but torchrun started {world}: use ddp or fsdp",
            code="parallel.world",
            world=world,
        )
    for setting, default in (("overlap", "auto"), ("reduce", "fp32")):
        if (value := getattr(settings, setting)) != default:
            message = f"strategy none averages no gradients: {setting} must be {default!r}; got {value!r}"
            raise _setting_error(name, setting, settings, message)


def _setting_error(strategy: str, setting: str, settings: _Settings, message: str) -> UsageError:
    value = getattr(settings, setting)
    return UsageError(message, code="parallel.setting", strategy=strategy, setting=setting, value=value)


def _create_spmd(name: str, runtime: Runtime, world: int, lost_after: float) -> Parallel:
    if world > 1:
        raise UsageError(
            "on a TPU one process drives all chips of its host: start one process on each host, without torchrun",
            code="parallel.launch",
            world=world,
        )
    import torch_xla.runtime as xr

    devices, processes, host = xr.global_runtime_device_count(), xr.process_count(), xla.host()
    hosts = 1 if host is None else len(host.addresses)
    if processes != hosts:
        raise UsageError(
            f"this TPU slice's metadata lists {hosts} hosts, but torch_xla finds {processes} processes: start one "
            "process on each host, with TPU_PROCESS_BOUNDS and TPU_VISIBLE_CHIPS unset",
            code="parallel.launch",
            hosts=hosts,
            processes=processes,
        )
    if name == "auto":
        name = "ddp" if devices > 1 else "none"
    if name == "none":
        if devices > 1:
            raise UsageError(
                f"strategy none runs on one device, but this TPU slice has {devices}: use ddp or fsdp",
                code="parallel.world",
                devices=devices,
            )
        return Parallel(runtime)
    from vitkernels.parallel import tpu_multihost, tpu_spmd

    if host is not None:
        strategies = {"ddp": tpu_multihost.MultihostDdp, "fsdp": tpu_multihost.MultihostFsdp}
        return strategies[name](runtime, host, lost_after)
    return {"ddp": tpu_spmd.SpmdDdp, "fsdp": tpu_spmd.SpmdFsdp}[name](runtime)
