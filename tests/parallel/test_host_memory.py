"""Shared host memory between CPU processes: all ranks read every row, and a failure on one is reported on all."""

import contextlib
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from expecting import error
from ranks import Ranks

from vitkernels import parallel
from vitkernels.parallel import copy_engine, host_memory
from vitkernels.parallel.host_memory import SharedHostRows
from vitkernels.runtime.base import Runtime

CPU = torch.device("cpu")


def write_and_read():
    with parallel.create("ddp", Runtime()) as engine:
        rank, world = engine.rank, engine.world
        host = SharedHostRows(5000, 3, rank, CPU, engine.gather)
        opened = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        assert sum("vitkernels" in path for path in opened) == world  # the mappings' own descriptors only
        assert [row.numel() for row in host.rows] == [5000] * world
        for value in range(1, 200):
            host.rows[rank].fill_((value + rank) % 256)
            host.signal(0, value)
            for other in range(world):
                host.wait(other, 0, value)
                assert host.rows[other].eq((value + other) % 256).all()
            host.signal(2, value)
            for other in range(world):
                host.wait(other, 2, value)  # all ranks have read the rows
        assert host_memory.unavailable(rank, CPU, engine.gather) is None


def fail_on_rank_1():
    with parallel.create("ddp", Runtime()) as engine:
        for function in ("memfd_create", "open"):
            failing = mock.patch.object(os, function, side_effect=OSError(f"no {function} here"))
            with failing if engine.rank == 1 else contextlib.nullcontext():
                reason = host_memory.unavailable(engine.rank, CPU, engine.gather)
            if function == "open" and engine.rank == 0:
                assert reason is None
            else:
                assert reason.endswith(f"no {function} here")
        assert host_memory.unavailable(engine.rank, CPU, engine.gather) is None


def run_out_of_memory():
    mock.patch.object(copy_engine, "unsupported", lambda *_: None).start()
    with parallel.create("ddp", Runtime(), send="copy") as engine:
        net = engine.wrap(torch.nn.Linear(4, 4))
        full = mock.patch.object(os, "posix_fallocate", side_effect=OSError(12, "Cannot allocate memory"))
        reason = "[Errno 12] Cannot allocate memory"
        refused = error("parallel.host_memory", reason=reason)  # on both ranks
        with refused, full if engine.rank == 1 else contextlib.nullcontext():
            net(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize(
    ("world", "function"), [(1, write_and_read), (3, write_and_read), (2, fail_on_rank_1), (2, run_out_of_memory)]
)
def test_shared_host_rows__are_read_by_all_ranks_or_unavailable_on_all(tmp_path, world, function):
    ranks = Ranks.of(world, tmp_path / "log", function)
    assert ranks.finish(100) == [0] * world, ranks.output()
