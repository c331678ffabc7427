"""How several devices and hosts train one model: none, ddp, fsdp, each behind the same small set of methods."""

import os

from vitkernels.errors import UsageError, unknown_name
from vitkernels.parallel.base import Parallel
from vitkernels.runtime import Runtime, xla

__all__ = ["Parallel", "create", "is_main", "names", "rank_arguments"]


def names() -> tuple[str, ...]:
    return ("auto", "none", "ddp", "fsdp")


WAYS_TO_SEND = ("auto", "nccl", "copy")
REDUCE_PRECISIONS = ("fp32", "bf16")  # that gradients can be averaged in
GATHER_PRECISIONS = ("auto", "fp32", "bf16")  # that parameters can be gathered in
LEAST_LOST_AFTER = 3.0  # seconds: three signs of life


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
    """The engine of that name, joined to the other processes; a context manager that leaves them.

    auto: ddp where there are several devices (torchrun's processes, or the chips of a TPU slice), none otherwise.
    lost_after: seconds without a sign of life after which a process counts as lost. overlap (true, false or auto),
    reduce, gather, reshard and send: see processes.Processes, processes.Fsdp and processes.Ddp. accum_steps: batches to
    an optimizer's step, which ddp sends alone if it is one.
    Raises UsageError when the name or a setting is unknown, or does not fit how this process was started.
    """
    if name not in names():
        raise unknown_name("parallel", name, names())
    if lost_after < LEAST_LOST_AFTER:
        raise UsageError(f"parallel.lost_after must be {LEAST_LOST_AFTER:g} seconds or more; got {lost_after}")
    if reduce not in REDUCE_PRECISIONS:
        raise unknown_name("parallel.reduce", reduce, REDUCE_PRECISIONS)
    if gather not in GATHER_PRECISIONS:
        raise unknown_name("parallel.gather", gather, GATHER_PRECISIONS)
    if send not in WAYS_TO_SEND:
        raise unknown_name("parallel.send", send, WAYS_TO_SEND)
    if gather == "bf16" and (runtime.precision != "bf16" or runtime.name == "xla" or name != "fsdp"):
        raise UsageError(
            "parallel.gather=bf16 is for parallel=fsdp under torchrun with runtime.precision=bf16; this is "
            f"parallel={name} with runtime={runtime.name} and {runtime.precision}: parallel.gather=auto"
        )
    if overlap not in (True, False, "auto"):
        raise UsageError(f"parallel.overlap must be true, false or auto; got {overlap!r}")
    if reshard and overlap is False:
        raise UsageError("parallel.reshard=true gathers block by block, which parallel.overlap=false does not")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if runtime.name == "xla":
        if overlap != "auto" or reduce != "fp32" or reshard or send != "auto":
            raise UsageError(
                "on a TPU XLA decides when and how gradients and parameters are sent: leave parallel.overlap=auto, "
                "parallel.reduce=fp32, parallel.reshard=false and parallel.send=auto"
            )
        return _spmd(name, runtime, world, lost_after)
    if name == "auto":
        name = "ddp" if world > 1 else "none"
    if send != "auto" and name != "ddp":
        raise UsageError(f"parallel.send={send} is for parallel=ddp under torchrun; for parallel={name}: send=auto")
    if reshard and name != "fsdp":
        raise UsageError(f"parallel.reshard=true is for parallel=fsdp; for parallel={name}: reshard=false")
    if name == "none":
        if world > 1:
            raise UsageError(f"parallel=none is for one process, and torchrun started {world}: parallel=ddp or fsdp")
        if overlap != "auto" or reduce != "fp32":
            raise UsageError(
                "parallel=none averages no gradients: leave parallel.overlap=auto and parallel.reduce=fp32; got "
                f"overlap={overlap} and reduce={reduce}"
            )
        return Parallel(runtime)
    from vitkernels.parallel import processes

    beside = None if overlap == "auto" else overlap
    if name == "ddp":
        return processes.Ddp(runtime, lost_after, beside, reduce, send, accum_steps)
    return processes.Fsdp(runtime, lost_after, beside, reduce, gather, reshard)


def _spmd(name: str, runtime: Runtime, world: int, lost_after: float) -> Parallel:
    if world > 1:
        raise UsageError(
            "on a TPU one process drives all chips of its host: start train.py without torchrun, once on each host"
        )
    import torch_xla.runtime as xr

    devices, processes, host = xr.global_runtime_device_count(), xr.process_count(), xla.host()
    hosts = 1 if host is None else len(host.addresses)
    if processes != hosts:
        raise UsageError(
            f"this TPU slice has {hosts} hosts by its metadata, and torch_xla finds {processes} processes in it: start "
            "train.py once on each host, without TPU_PROCESS_BOUNDS and TPU_VISIBLE_CHIPS in the environment"
        )
    if name == "auto":
        name = "ddp" if devices > 1 else "none"
    if name == "none":
        if devices > 1:
            raise UsageError(f"parallel=none is for one device, and here are {devices}: parallel=ddp or fsdp")
        return Parallel(runtime)
    from vitkernels.parallel import tpu_multihost, tpu_spmd

    if host is not None:
        return {"ddp": tpu_multihost.PodData, "fsdp": tpu_multihost.PodFsdp}[name](runtime, host, lost_after)
    return {"ddp": tpu_spmd.SpmdData, "fsdp": tpu_spmd.SpmdFsdp}[name](runtime)


def _place(runtime: str) -> tuple[int, int]:
    """(rank, world) of this process, before any engine exists: torchrun's, or a host's in its TPU slice."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    host = xla.host() if runtime in ("auto", "xla") else None
    return (0, 1) if host is None else (host.rank, len(host.addresses))


def is_main(runtime: str = "auto") -> bool:
    """Whether this process, on the runtime of that name, is the one that writes files, before any engine exists."""
    return _place(runtime)[0] == 0


def rank_arguments(argv: list[str]) -> list[str]:
    """The command line for this process: all but the main one neither write nor log more than warnings."""
    chosen = [word.partition("=")[2] for word in argv if word.startswith("runtime=")]
    rank, world = _place(*chosen[-1:] or ["auto"])
    if world > 1 and {"-m", "--multirun"} & set(argv):
        raise UsageError("a sweep starts its own processes: run it without torchrun, and not on a TPU slice's hosts")
    if rank == 0:
        return argv
    mine = [word for word in argv if not word.startswith("hydra.run.dir=")]
    lines = f"hydra.job_logging.formatters.plain.format='[rank {rank}] %(message)s'"
    return [*mine, "hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=other_rank", lines]
