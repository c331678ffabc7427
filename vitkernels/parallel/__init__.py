"""Strategies for several devices and hosts (none, ddp, fsdp), each with the interface of Parallel.

create() picks one: Parallel itself for one device, Ddp and Fsdp for torchrun's processes, SpmdDdp and SpmdFsdp for the
TPU chips of one host, MultihostDdp and MultihostFsdp for those of several.
"""

import os

from vitkernels.errors import UsageError
from vitkernels.parallel.base import Parallel
from vitkernels.parallel.factory import create, names
from vitkernels.runtime import xla

__all__ = ["Parallel", "create", "is_main", "names", "rank_arguments"]


def _rank_and_world(runtime: str) -> tuple[int, int]:
    """Return (rank, world) of this process before a strategy exists: torchrun's, or the host's in its TPU slice."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    host = xla.host() if runtime in ("auto", "xla") else None
    return (0, 1) if host is None else (host.rank, len(host.addresses))


def is_main(runtime: str = "auto") -> bool:
    """Return whether this process, on the named runtime, is the one that writes files, before a strategy exists."""
    return _rank_and_world(runtime)[0] == 0


def rank_arguments(argv: list[str]) -> list[str]:
    """Return the command line for this process: all but the main one write no files and log only warnings."""
    chosen = [word.partition("=")[2] for word in argv if word.startswith("runtime=")]
    rank, world = _rank_and_world(*chosen[-1:] or ["auto"])
    if world > 1 and {"-m", "--multirun"} & set(argv):
        raise UsageError(
            "a sweep starts its own processes: run it without torchrun, and not on the hosts of a TPU slice",
            code="parallel.sweep",
            world=world,
        )
    if rank == 0:
        return argv
    mine = [word for word in argv if not word.startswith("hydra.run.dir=")]
    lines = f"hydra.job_logging.formatters.plain.format='[rank {rank}] %(message)s'"
    return [*mine, "hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=other_rank", lines]
