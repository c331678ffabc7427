"""Python programs in processes forked from a server that has imported the slow packages.

`python train.py` imports torch, timm and others for seconds before its first line of work. A forked program starts
without them, and otherwise as Python would start it: with its own arguments, environment, module path and output.
"""

import contextlib
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import types
import weakref
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

# Packages of others only: each program imports the project's own modules itself. Not JAX, whose threads do not survive
# a fork.
PACKAGES = [
    "forked",
    "timm",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "tensorboard.plugins.hparams.api_pb2",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "sklearn.datasets",
    "sklearn.model_selection",
    "sklearn.metrics",
    "hydra",
    "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper",  # Hydra imports every plugin that is installed
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher",
]
ROOT = Path(__file__).resolve().parents[1]


class Server:
    """A process that has imported `modules`, as far as they are installed, and forks others. It ends with this one.

    environment: its variables, for packages that read them when they are imported; None: this process's.
    """

    def __init__(self, modules: list[str], environment: dict[str, str] | None = None):
        # Not multiprocessing's default server, which a test of data workers may have started without these imports.
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload(modules)
        self._environment = environment

    def fork(self, target, *args) -> multiprocessing.context.ForkServerProcess:
        """Start a process that runs target(*args)."""
        own = os.environ if self._environment is None else self._environment
        path = os.pathsep.join(filter(None, sys.path))  # which the server does not inherit
        with mock.patch.dict(os.environ, {**own, "PYTHONPATH": path}, clear=True):
            self._server.ensure_running()
        process = multiprocessing.get_context("forkserver").Process(target=target, args=args)
        with mock.patch.object(forkserver, "connect_to_new_process", self._server.connect_to_new_process):
            process.start()
        return process


PYTHON = Server(PACKAGES)


class Program:
    """A running `python WORDS`, with the methods and attributes of subprocess.Popen(text=True) that tests use.

    words: what follows `python`: a script, -m and a module, or -c and code, and arguments. folder: where it runs,
    environment: its variables; None: this process's. merged: stderr goes to stdout.
    """

    def __init__(self, words, folder=None, environment=None, *, merged=False, server=PYTHON):
        self.args = [str(word) for word in words]
        output = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, output, ignore_errors=True)
        self._output = [Path(output, name) for name in ("stdout", "stdout" if merged else "stderr")]
        environment = dict(os.environ if environment is None else environment)
        self._process = server.fork(_run, self.args, str(folder or Path.cwd()), environment, self._output)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout, *self._said())
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what it wrote to stdout and stderr, when it has ended."""
        self.wait(timeout)
        return self._said()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def _said(self) -> tuple[str, str]:
        stdout, stderr = (path.read_text() if path.exists() else "" for path in self._output)
        return stdout, "" if self._output[0] == self._output[1] else stderr


def run(words, folder=None, environment=None, *, merged=False, timeout=300) -> subprocess.CompletedProcess:
    """Do what subprocess.run([sys.executable, *words], capture_output=True, text=True) does; see Program."""
    program = Program(words, folder, environment, merged=merged)
    try:
        stdout, stderr = program.communicate(timeout)
    except BaseException:
        program.kill()
        raise
    return subprocess.CompletedProcess(words, program.returncode, stdout, stderr)


def _run(words: list[str], folder: str, environment: dict[str, str], output: list[Path]) -> None:
    """Run a program in this process, as Python would."""
    for path, number in zip(output, (1, 2), strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.orig_argv = [sys.executable, *words]
    kind = words[0] if words[0] in ("-m", "-c") else "script"
    sys.argv = ["-c", *words[2:]] if kind == "-c" else words[kind == "-m" :]
    first = os.path.dirname(os.path.abspath(words[0])) if kind == "script" else folder
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [first, *filter(None, given), *installed, str(ROOT)]  # the last one as an editable installation
    if threads := environment.get("OMP_NUM_THREADS"):  # torch has read it already
        import torch

        torch.set_num_threads(int(threads))
    if kind == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(words[0], run_name="__main__")
