"""Run train.py in processes whose arithmetic is nearly the same on all x86-64 machines, and read their figures."""

import functools
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cases import CASES, OLD, PACKAGES, SWEEP, Case
from forked import PACKAGES as SLOW_PACKAGES
from forked import Program, Server

HERE = Path(__file__).resolve().parent
# VITKERNELS_TRAIN_PY names the train.py of another checkout that the tests run instead of this one's.
TRAIN_PY = Path(os.environ.get("VITKERNELS_TRAIN_PY") or HERE.parents[1] / "train.py").resolve()

# One thread, so that the order of sums does not depend on the number of cores, and only instructions that every x86-64
# CPU has. Each of the last six variables except OPENBLAS_CORETYPE changed the last bits of losses. The C library still
# chooses its own instructions: with FMA, on every x86-64 CPU of the last ten years. What still differs between machines
# changes the checksum of `elementwise`.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OPENBLAS_CORETYPE": "Nehalem",  # numpy's products, in interpreted Triton kernels
    "NPY_DISABLE_CPU_FEATURES": "X86_V3,X86_V4,AVX512_ICL,AVX512_SPR",
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2",  # interpreted Pallas kernels
}
# Variables that a user may have set and that train.py or its libraries read.
_UNSET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TRITON_INTERPRET", "OMP_WAIT_POLICY", "JAX_PLATFORMS", "PYTHONPATH")


class Runs:
    """Run folders of cases below `folder`, each created when first requested."""

    def __init__(self, folder: Path, train_py: Path = TRAIN_PY):
        self.below = folder
        self.train_py = train_py
        (folder / "cache").mkdir(parents=True)
        kept = {name: value for name, value in os.environ.items() if name not in _UNSET}
        # An empty cache, without tuning measurements of this machine.
        self.environment = kept | ENVIRONMENT | {"XDG_CACHE_HOME": str(folder / "cache")}
        self._server = None

    def folder(self, name: str) -> Path:
        """Return the run folder of a case, the folder of "sweep", or a copy of the committed run folder."""
        folder = self.below / name
        if folder.exists():
            return folder
        if name == OLD:
            return self.copy(HERE / OLD, name)
        try:
            if name == "sweep":
                self.own_process(*SWEEP, f"hydra.sweep.dir={folder}")
            else:
                case = CASES[name]
                if case.continues is not None:
                    self.copy(self.folder(case.continues), name)
                words = (*self.words(case), f"hydra.run.dir={folder}")
                if case.own_process:
                    self.own_process(*words)
                else:
                    self.forked(*words, world=case.world)
        except AssertionError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def copy(self, folder: Path, name: str) -> Path:
        return Path(shutil.copytree(folder, self.below / name, symlinks=True))

    def words(self, case: Case) -> list[str]:
        words = list(case.words)
        for key, source in (("resume", case.resumes), ("checkpoint", case.evaluates)):
            if source is not None:
                words.append(f"{key}={self.folder(source[0]) / source[1]}")
        return [*words, f"data.root={self.images()}"] if case.images else words

    def own_process(self, *words: str) -> str:
        """Return the output of `python train.py WORDS`; raise AssertionError with it if the exit code is not 0."""
        process = subprocess.run(
            [sys.executable, str(self.train_py), *words],
            cwd=self.train_py.parent,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert process.returncode == 0, process.stdout
        return process.stdout

    def forked(self, *words: str, world: int = 1) -> str:
        """Do the same as `own_process` without the seconds that imports take. world: ranks, as torchrun starts them."""
        if self._server is None:
            self._server = Server(SLOW_PACKAGES, self.environment)
        environments = [self.environment]
        if world > 1:
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
            environments = [self.environment | where | {"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(world)]
        command, folder = [self.train_py, *words], self.train_py.parent
        ranks = [Program(command, folder, each, merged=True, server=self._server) for each in environments]
        try:
            said = "\n".join(rank.communicate(300)[0] for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == [0] * world, said
        return said

    def images(self) -> Path:
        """Return class folders of 160 PNG images for training and 20 for evaluation, the same in each session."""
        import numpy as np
        from PIL import Image

        root = self.below / "classes"
        if root.exists():
            return root
        random = np.random.RandomState(0)
        for split, name, count in (
            ("train", "dark", 80),
            ("train", "light", 80),
            ("val", "dark", 10),
            ("val", "light", 10),
        ):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = random.randint(0, 256, (20, 24, 3)).astype(np.uint8)
                if name == "dark":
                    pixels[4:16, 6:18] //= 4
                Image.fromarray(pixels).save(folder / f"{index:03d}.png")
        return root


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def versions(case: Case) -> dict[str, str | None]:
    """Return what a case's figures depend on besides the code: package versions and the kind of machine."""
    found: dict[str, str | None] = {
        "machine": f"{platform.system()} {platform.machine()}",
        "elementwise": elementwise(),
    }
    for package in (*PACKAGES, *case.packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


@functools.cache
def elementwise() -> str:
    """Return a checksum of square roots and other elementwise functions, computed by torch as in the runs' processes.

    MKL computes them. On some CPUs it rounds a fifth of all square roots differently, whatever MKL_CBWR says.
    """
    code = (
        "import torch, zlib; x = torch.arange(1, 100_001) / 10_000\n"
        "functions = torch.sqrt, torch.rsqrt, torch.exp, torch.log, torch.tanh, torch.erf, torch.sin\n"
        "print(zlib.crc32(torch.cat([f(x) for f in functions]).numpy().tobytes()))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=True
    )
    return process.stdout.strip()


def figures(folder: Path) -> dict:
    """Return the figures of a run without times: each step and evaluation of a training, or the evaluation."""
    if (folder / "eval.json").exists():
        content = json.loads((folder / "eval.json").read_text())
        names = ("top1", "top5", "loss", "images", "bytes", "top1_before", "bytes_before")
        return {"evaluation": {name: content[name] for name in names if name in content}}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    columns = {name: [line[name] for line in steps] for name in ("step", "loss", "grad_norm", "lr")}
    return {**columns, "evaluations": [line for line in lines if "loss" not in line]}
