"""Rows of host memory on CPU processes: what each writes all read, and what fails on one of them is told on all."""

import contextlib
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import Ranks

from vitkernels import parallel
from vitkernels.errors import UsageError
from vitkernels.parallel import host_memory, processes
from vitkernels.parallel.host_memory import HostRows
from vitkernels.runtime.base import Runtime

CPU = torch.device("cpu")


def write_and_read():
    with parallel.create("ddp", Runtime()) as engine:
        rank, world = engine.rank, engine.world
        host = HostRows(5000, 3, rank, CPU, engine.gather)
        opened = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        assert sum("vitkernels" in path for path in opened) == world  # mappings keep their own, and there are no more
        assert [row.numel() for row in host.rows] == [5000] * world
        for value in range(1, 200):
            host.rows[rank].fill_((value + rank) % 256)
            host.announce(0, value)
            for other in range(world):
                host.expect(other, 0, value)
                assert host.rows[other].eq((value + other) % 256).all()
            host.announce(2, value)
            for other in range(world):
                host.expect(other, 2, value)  # all have read it
        assert host_memory.unavailable(rank, CPU, engine.gather) is None


def have_none_on_rank_1():
    with parallel.create("ddp", Runtime()) as engine:
        for function in ("memfd_create", "open"):
            failing = mock.patch.object(os, function, side_effect=OSError(f"no {function} here"))
            with failing if engine.rank == 1 else contextlib.nullcontext():
                reason = host_memory.unavailable(engine.rank, CPU, engine.gather)
            if function == "open" and engine.rank == 0:
                assert reason is None
            else:
                assert reason.endswith(f"fails: no {function} here")
        # And with it all is well again.
        assert host_memory.unavailable(engine.rank, CPU, engine.gather) is None


def have_too_little():
    mock.patch.object(processes.copied, "unsupported", lambda *_: None).start()
    with parallel.create("ddp", Runtime(), send="copy") as engine:
        net = engine.wrap(torch.nn.Linear(4, 4))
        full = mock.patch.object(os, "posix_fallocate", side_effect=OSError(12, "Cannot allocate memory"))
        said = pytest.raises(UsageError, match=r"GiB of host memory, .*Cannot allocate memory; parallel.send=nccl")
        with said, full if engine.rank == 1 else contextlib.nullcontext():  # the other hears of it
            net(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize(
    ("world", "function"), [(1, write_and_read), (3, write_and_read), (2, have_none_on_rank_1), (2, have_too_little)]
)
def test_host_memory(tmp_path, world, function):
    ranks = Ranks.of(world, tmp_path / "log", function)
    assert ranks.finish(100) == [0] * world, ranks.said()
