"""Strategies for several devices and hosts (none, ddp, fsdp), each with the interface of Parallel.

create() picks one: Parallel itself for one device, Ddp and Fsdp for torchrun's processes, SpmdDdp and SpmdFsdp for the
TPU chips of one host, MultihostDdp and MultihostFsdp for those of several.
"""

from vitkernels import torchrun_environment
from vitkernels.parallel.base import Parallel
from vitkernels.parallel.factory import create, names
from vitkernels.runtime import xla

__all__ = ["Parallel", "create", "is_main", "names", "rank_and_world"]


def rank_and_world(runtime: str) -> tuple[int, int]:
    """Return (rank, world) of this process before a strategy exists: torchrun's, or the host's in its TPU slice."""
    rank = torchrun_environment.rank()
    if rank is not None:
        return rank, torchrun_environment.world_size()
    host = xla.host() if runtime in ("auto", "xla") else None
    return (0, 1) if host is None else (host.rank, len(host.addresses))


def is_main(runtime: str = "auto") -> bool:
    """Return whether this process, on the named runtime, will write the files; works before a strategy exists."""
    return rank_and_world(runtime)[0] == 0
