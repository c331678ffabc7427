"""Kill training runs in many ways, resume them, and compare losses and weights bit for bit with an undisturbed run.

    python scripts/fault_loop.py --kills 40 --seed 1
    python scripts/fault_loop.py --kills 40 --seed 1 --ranks 2 --parallel fsdp
    python scripts/fault_loop.py --kills 40 --seed 1 --data shards

Kinds of faults: main (SIGKILL of a process at a random moment), rank (the same with several), worker (SIGKILL of a data
worker), file (SIGKILL before a random operation on a file in the run's folder), disk (no file may grow from a random
step on, then SIGKILL). Each run is disturbed and resumed until it completes. Arguments after -- go to train.py. Exit
status 1 if a run differs.
"""

import argparse
import io
import json
import multiprocessing
import os
import random
import resource
import runpy
import signal
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS = 40
WORDS = (
    "runtime=cpu attn=sdpa +model.kwargs.embed_dim=32 +model.kwargs.num_heads=2 +model.kwargs.depth=2 "
    "model.drop_path_rate=0.1 ema.decay=0.9 trainer.log_every=2 trainer.warmup_steps=0 checkpoints.every_steps=4 "
    f"trainer.eval_every=1 data.batch_size=32 trainer.accum_steps=2 trainer.max_steps={STEPS} resume=auto"
).split()
PRELOADED = [
    "train",
    "vitkernels.data.digits",
    "vitkernels.parallel.ddp",
    "vitkernels.parallel.fsdp",
    "sklearn.datasets",
    "sklearn.metrics",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "tensorboard.plugins.hparams.api_pb2",
    "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper",  # Hydra imports every plugin that is installed
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher",
    "fault_loop",
]
CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.truncate")  # audit events


@dataclass(frozen=True)
class Fault:
    """One fault.

    kind: main, worker, file or disk. at: seconds after the start, or the number of the file operation. step: the logged
    step to wait for instead of `at`. rank: the process that it hits.
    """

    kind: str
    at: float
    step: int | None = None
    rank: int = 0

    def __str__(self) -> str:
        if self.kind == "file":
            return f"before file operation {self.at:.0f}"
        return f"after {self.at:.2f} s" if self.step is None else f"after step {self.step}"


def draw(chance: random.Random, ranks: int) -> Fault:
    """Return a random fault; data workers take seconds to start, so they are hit less often."""
    (kind,) = chance.choices(["main", "file", "disk", "worker"], weights=[6, 6, 2, 1 if ranks == 1 else 0])
    if kind == "file":
        return Fault(kind, chance.randrange(120))
    step = chance.randrange(STEPS) if kind != "main" or chance.random() < 0.7 else None
    return Fault(kind, chance.uniform(0, 3), step, chance.randrange(ranks))


# ---- in the process that trains ----


def train(words: list[str], environment: dict[str, str], log: str, folder: str, fault: Fault | None) -> None:
    """Run train.py with these arguments, and inject the faults that occur inside the process."""
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    import torch

    torch.set_num_threads(1)
    if fault is not None and fault.kind == "file":
        kill_before_operation(int(fault.at), folder)
    elif fault is not None and fault.kind in ("disk", "worker"):
        inject = fill_disk if fault.kind == "disk" else kill_worker
        # A daemon: the moment of the fault may never come, as a complete run starts no data worker.
        threading.Thread(target=inject, args=(folder, fault.step), daemon=True).start()
    sys.argv = [str(ROOT / "train.py"), *words]
    runpy.run_path(sys.argv[0], run_name="__main__")


def kill_before_operation(number: int, folder: str) -> None:
    """Send SIGKILL to this process before the file operation of this number that changes something in the folder."""
    left = [number]

    def count(event: str, arguments: tuple) -> None:
        if event not in CHANGES or not str(arguments[0]).startswith(folder):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def fill_disk(folder: str, step: int) -> None:
    """From a step on, let no file of this process grow."""
    while logged_steps(Path(folder)) <= step:
        time.sleep(0.002)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


def kill_worker(folder: str, step: int) -> None:
    """Send SIGKILL to a data worker after a step."""
    while not (logged_steps(Path(folder)) > step and multiprocessing.active_children()):
        time.sleep(0.002)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)


# ---- in the process that kills ----


class Run:
    """One attempt of a run: its processes, forked from a server that has imported everything."""

    def __init__(self, folder: Path, ranks: int, words: list[str], fault: Fault | None):
        self.folder, self.fault, self.begin = folder, fault, time.monotonic()
        workers = ["data.num_workers=1"] if fault is not None and fault.kind == "worker" else []
        words = [word for word in words if not (workers and word.startswith("data.num_workers="))]
        words = [*WORDS, *words, *workers, f"hydra.run.dir={folder}"]
        self.logs = [folder.with_name(f"{folder.name}.rank{rank}.log") for rank in range(ranks)]
        self._logged = self.logs[0].stat().st_size if self.logs[0].exists() else 0  # by earlier attempts
        environments: list[dict[str, str]] = [{}]
        if ranks > 1:
            import torch.distributed as dist

            # As torchrun does, keep the store outside the ranks, so that it outlives any of them.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
            common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        self.processes = []
        for rank, environment in enumerate(environments):
            hit = fault if fault is not None and fault.rank == rank else None
            arguments = (words, environment, str(self.logs[rank]), str(folder), hit)
            self.processes.append(multiprocessing.get_context("forkserver").Process(target=train, args=arguments))
            self.processes[-1].start()

    def inflict(self) -> bool:
        """Wait for the fault's moment and inject it; return False if the run ended first."""
        fault = self.fault
        victim = self.processes[0 if fault is None else fault.rank]
        if fault is not None and fault.kind in ("main", "disk"):
            moment = self.begin + fault.at
            while victim.is_alive() and self._is_early(moment):
                time.sleep(0.002)
            if fault.kind == "disk":
                victim.join(1.0)  # meanwhile writing fails
            os.kill(victim.pid, signal.SIGKILL) if victim.is_alive() else None
        self.finish()
        return any(process.exitcode != 0 for process in self.processes)

    def _is_early(self, moment: float) -> bool:
        assert self.fault is not None
        if self.fault.step is None:
            return time.monotonic() < moment
        return logged_steps(self.folder) <= self.fault.step

    def finish(self, seconds: float = 180) -> None:
        """Wait for the end of all processes; fail if none of them logs a line for `seconds`."""
        logged, deadline = 0, time.monotonic() + seconds
        while any(process.is_alive() for process in self.processes) and time.monotonic() < deadline:
            self.processes[-1].join(0.2)
            if any(process.exitcode for process in self.processes) and not self._joined():
                self._terminate()
            size = sum(log.stat().st_size for log in self.logs if log.exists())
            if size != logged:  # a busy machine is slow, but it makes progress
                logged, deadline = size, time.monotonic() + seconds
        hung = [process for process in self.processes if process.exitcode is None]
        for process in hung:
            process.kill()
        assert not hung, f"{len(hung)} processes did not end: {self.output()[-3000:]}"

    def _joined(self) -> bool:
        """Return whether the ranks of this attempt have found each other: the log of rank 0 then names the runtime."""
        with open(self.logs[0], "rb") if self.logs[0].exists() else io.BytesIO() as log:
            log.seek(self._logged)
            return b"runtime: " in log.read()

    def _terminate(self) -> None:
        """Terminate ranks whose peer died before the rendezvous, as torchrun does; later, they detect it themselves."""
        for process in self.processes:
            process.kill() if process.is_alive() else None

    def output(self) -> str:
        return "\n".join(log.read_text() for log in self.logs if log.exists())

    def named(self) -> str:
        """Return whether the survivors name the rank that was killed."""
        victim = self.processes[self.fault.rank] if self.fault else None
        if victim is None or len(self.processes) == 1 or victim.exitcode != -signal.SIGKILL:
            return ""
        return "named" if f"rank {self.fault.rank} (process {victim.pid} " in self.output() else "not named"


def write_shards(folder: Path) -> list[str]:
    """Write tar files of small noisy images in WebDataset's layout; return the settings that train on them."""
    import numpy as np
    from PIL import Image

    folder.mkdir()
    draw, number = np.random.default_rng(0), 0
    for name, images in (("train-0", 96), ("train-1", 96), ("val-0", 32)):
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for _ in range(images):
                picture, number = io.BytesIO(), number + 1
                Image.fromarray(draw.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(picture, "png")
                for ending, content in (("png", picture.getvalue()), ("cls", str(number % 2).encode())):
                    member = tarfile.TarInfo(f"{number:06d}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return [
        "data=shards",
        f"data.root={folder}",
        f"data.cache={folder / 'index'}",
        "model.in_chans=3",
        "data.num_workers=0",
    ]


def logged_steps(folder: Path) -> int:
    """Return the last step in metrics.jsonl."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b'"loss"') if path.exists() else 0


def results(folder: Path) -> dict[str, Any]:
    """Return what faults must not change: losses and evaluations by step, weights, and the leftover files."""
    from safetensors.torch import load_file

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {"losses": lines}
    for path in sorted(folder.glob("*.safetensors")):
        found[path.name] = {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}
    found["checkpoints"] = sorted(path.name for path in (folder / "checkpoints").iterdir())
    return found


def made_room(found: list[str], expected: list[str]) -> bool:
    """Return whether only checkpoints other than the newest and the best are missing: a full disk removes those."""
    return set(found) < set(expected) and {"best", max(expected)} <= set(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40, help="number of faults (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default 0)")
    parser.add_argument("--ranks", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp", help="how several processes train")
    parser.add_argument("--data", choices=("digits", "shards"), default="digits", help="shards: tar files of noise")
    parser.add_argument("words", nargs="*", help="further settings of train.py, after --")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    forkserver.set_forkserver_preload(PRELOADED)
    words = [*options.words, *([f"parallel={options.parallel}"] if options.ranks > 1 else [])]
    with tempfile.TemporaryDirectory(prefix="fault_loop_") as scratch:
        if options.data == "shards":
            words += write_shards(Path(scratch) / "shards")
        return loop(Path(scratch), options.kills, options.ranks, words, random.Random(options.seed))


def loop(scratch: Path, kills: int, ranks: int, words: list[str], chance: random.Random) -> int:
    """Disturb runs, one after another, until `kills` faults have hit; return the exit status."""
    undisturbed = Run(scratch / "undisturbed", ranks, words, None)
    undisturbed.finish()
    assert all(process.exitcode == 0 for process in undisturbed.processes), undisturbed.output()
    expected = results(scratch / "undisturbed")
    counts: Counter[str] = Counter()
    number, different, hits = 0, 0, 0
    print(f"{'fault':>5}  {'run':>3}  {'kind':6}  {'where':26}  {'rank':>4}  {'exit':9}  at step")
    while hits < kills:
        number += 1
        folder = scratch / f"run{number}"
        complete = disk_full = False
        while not complete:
            run = Run(folder, ranks, words, draw(chance, ranks) if hits < kills else None)
            if run.inflict():
                hits += 1
                codes = ",".join(str(process.exitcode) for process in run.processes)
                kind, rank = run.fault.kind if run.fault else "none", run.fault.rank if run.fault else 0
                counts[kind] += 1
                disk_full |= kind == "disk"
                counts[f"ranks {run.named()}"] += bool(run.named())
                where = f"{hits:5}  {number:3}  {kind:6}  {run.fault!s:26}  {rank:4}  {codes:9}"
                print(f"{where}  {logged_steps(folder)}  {run.named()}", flush=True)
                assert hits < 2 * kills + 10, f"the run does not complete: {run.output()[-3000:]}"
            complete = (folder / "summary.json").exists() and all(p.exitcode == 0 for p in run.processes)
        found = results(folder)
        wrong = [name for name in expected if found.get(name) != expected[name]]
        if "checkpoints" in wrong and disk_full and made_room(found["checkpoints"], expected["checkpoints"]):
            wrong.remove("checkpoints")
        different += bool(wrong)
        what = f"{', '.join(wrong)} differ" if wrong else f"{len(expected)} results equal: {', '.join(expected)}"
        print(f"run {number} complete: {what}", flush=True)
        if "checkpoints" in wrong:
            print(f"  checkpoints {found['checkpoints']}, expected {expected['checkpoints']}", flush=True)
    print(
        f"{hits} faults in {number} runs ({', '.join(f'{k} {n}' for k, n in counts.items() if n)}); {different} differ"
    )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
