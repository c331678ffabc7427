"""Ranks of `train.py` in torchrun's environment, forked from a server that has imported everything.

torchrun itself pays seconds of imports for each rank; one test uses it.
"""

import logging
import os
import runpy
import sys
import time
from pathlib import Path

import torch.distributed as dist
from forked import PACKAGES, Server

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = [*PACKAGES, "train", "vitkernels.parallel.ddp", "vitkernels.parallel.fsdp", "vitkernels.data.digits"]
PRELOADED += ["settled"]

SMALL = ["runtime=cpu", "attn=sdpa", "+model.kwargs.embed_dim=32", "+model.kwargs.num_heads=2", "+model.kwargs.depth=2"]
SMALL += ["schedule=constant", "schedule.warmup_epochs=0", "trainer.log_every=2", "trainer.warmup_steps=0"]


_SERVER = Server(PRELOADED)
fork = _SERVER.fork


class Ranks:
    """`world` processes that run train.py with these overrides. before: code to run first, by rank."""

    def __init__(self, world: int, folder: Path, *overrides: str, before: dict[int, str] | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        words = [str(ROOT / "train.py"), *SMALL, *overrides, f"hydra.run.dir={folder}"]
        codes = [(before or {}).get(rank, "") for rank in range(world)]
        self._start(folder, [(_train, words, code) for code in codes])

    @classmethod
    def of(cls, world: int, folder: Path, function, *args) -> "Ranks":
        """Start `world` processes that run function(*args), with logs next to `folder`."""
        ranks = cls.__new__(cls)
        ranks._start(folder, [(function, *args)] * world)
        return ranks

    def _start(self, folder: Path, tasks: list[tuple]) -> None:
        self.logs = [folder.with_name(f"{folder.name}.rank{rank}") for rank in range(len(tasks))]
        # As torchrun does, keep the store outside the ranks, so that it outlives any of them.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = []
        for rank, task in enumerate(tasks):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(tasks)),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            self.processes.append(fork(_run_rank, environment, str(self.logs[rank]), *task))

    def finish(self, seconds: float = 180) -> list[int]:
        """Wait for all ranks and return their exit codes."""
        deadline = time.monotonic() + seconds
        try:
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
            assert all(p.exitcode is not None for p in self.processes), self.output()
        finally:
            for process in self.processes:
                process.kill()
        return [process.exitcode for process in self.processes]

    def output(self, rank: int | None = None) -> str:
        """Return what one rank, or all, wrote to stdout and stderr."""
        logs = self.logs if rank is None else [self.logs[rank]]
        return "\n".join(path.read_text() for path in logs if path.exists())

    def wait_until(self, condition, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline and any(p.is_alive() for p in self.processes), self.output()
            time.sleep(0.01)


def _run_rank(environment: dict[str, str], log: str, function, *args) -> None:
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.setsid()
    os.chdir(ROOT)
    import torch

    torch.set_num_threads(1)
    logging.getLogger().handlers.clear()
    function(*args)


def _train(words: list[str], code: str) -> None:
    exec(code, {})
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
