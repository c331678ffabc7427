"""Compile a JAX function for a TPU in a process of its own, and keep what the compiler dumped.

libtpu reads its flags once, when it loads: hence the process. It is forked from one that has PyTorch and JAX imported
already, and no backend of theirs begun: the imports take longer than most compilations. Only the last stages of each
kernel's schedule are kept: the whole dump of a large kernel is some 100 MB of text.
"""

import atexit
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from vitkernels.errors import UsageError
from vitkernels.tpu_estimate import chips, compiler
from vitkernels.tpu_estimate.chips import CHIPS, Chip

_FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true "
    "--xla_jf_dump_llo_pass_label_regex=post-ra|utilization"
)
_MODULE, _MEMORY, _SAID = "compiled_module.hlo", "compiled_memory.json", "compiler_said.log"


@dataclass(frozen=True)
class Dump:
    """The files of one compilation."""

    folder: Path
    chip: Chip = CHIPS["v5e"]

    @property
    def module(self) -> str:
        """The optimised, scheduled HLO module."""
        return (self.folder / _MODULE).read_text()

    @property
    def memory(self) -> dict[str, int]:
        """HBM bytes that the compiler sets aside: argument, output, temp, generated_code, and alias, which is counted
        in both argument and output."""
        return json.loads((self.folder / _MEMORY).read_text())

    def text(self, operation: str, stage: str) -> str | None:
        """What was dumped of an HLO operation at a stage; None if nothing, or if it is not clear which file it is."""
        if (path := self._files.get((operation, stage))) is None:
            begun = [path for (name, s), path in self._shortened.items() if s == stage and operation.startswith(name)]
            path = begun[0] if len(begun) == 1 else None
        return None if path is None else path.read_text()

    @cached_property
    def _files(self) -> dict[tuple[str, str], Path]:
        """By operation and stage: files are named time-operation-NN-stage.txt."""
        found = {}
        for path in sorted(self.folder.iterdir(), reverse=True):
            if name := re.fullmatch(r"\d+-(.+?)-\d{2,3}-(.+)\.txt", path.name):
                found[name[1], name[2]] = path
        return found

    @cached_property
    def _shortened(self) -> dict[tuple[str, str], Path]:
        """By an operation's first letters: of names too long for a file, libtpu keeps as many as fit, and a hash."""
        files = {(re.fullmatch(r"(.+)-\d{15,}", name), stage): path for (name, stage), path in self._files.items()}
        return {(name[1], stage): path for (name, stage), path in files.items() if name}


def compile_in(folder: Path, build: str, *arguments, chip: str = "v5e", timeout: float = 900) -> Dump:
    """Compile what "package.module:function"(*arguments) returns: the arguments of tpu_static.compile_jax (a JAX
    function, its jax.ShapeDtypeStructs, ...), or of compile_hlo (a serialized module, its aliases,
    ...).

    Raises UsageError with the end of the compiler's message where it refuses, or takes more than `timeout` seconds.
    """
    flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {_FLAGS.format(folder=folder)}".strip()
    environment = os.environ | {"LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu"}
    job = {"folder": str(folder), "chip": chip, "build": build, "arguments": arguments, "timeout": timeout}
    if _server().poll() is not None:  # it was killed, by hand or for memory
        _server.cache_clear()
    server = _server()
    # What can be imported here can be there.
    print(json.dumps(job | {"environment": environment, "path": sys.path}), file=server.stdin, flush=True)
    status = server.stdout.readline().strip()
    if status == str(-signal.SIGALRM):
        raise UsageError(f"{build}{arguments}: not compiled within {timeout:g} s")
    if status != "0":
        said = Path(folder, _SAID)
        end = said.read_text(errors="replace")[-2000:] if said.exists() else "the compiling process did not begin"
        raise UsageError(f"{build}{arguments} does not compile for {chip} (status {status or 'unknown'}):\n{end}")
    return Dump(folder, chips.chip(chip))


@cache
def _server() -> subprocess.Popen:
    """The process that compilations are forked from; it ends with this one."""
    modules = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": modules}
    command = [sys.executable, "-W", "ignore", "-m", __name__]  # JAX warns of forks: of its threads, and has none yet
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)  # closes its input
    return server


def _serve() -> None:
    """A job is a line of JSON, and is answered with the exit status of its process: -N where signal N ended it."""
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            _compile(**json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _compile(folder, chip, build, arguments, timeout, environment, path) -> None:
    """In the forked process, which ends here."""
    said = os.open(Path(folder, _SAID), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(said, 1)
    os.dup2(said, 2)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    status = 1
    try:
        _write(Path(folder), chip, build, arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _write(folder: Path, chip: str, build: str, arguments: list) -> None:
    module, function = build.split(":")
    built = getattr(importlib.import_module(module), function)(*arguments)
    if isinstance(built[0], bytes):
        executable = compiler.compile_hlo(built[0], chip, *built[1:])
    else:
        executable = compiler.compile_jax(*built, chip=chip).runtime_executable()
    analysis = executable.get_compiled_memory_stats()
    parts = ("argument", "output", "temp", "alias", "generated_code")
    memory = {part: getattr(analysis, f"{part}_size_in_bytes") for part in parts}
    (folder / _MEMORY).write_text(json.dumps(memory))
    (folder / _MODULE).write_text(executable.hlo_modules()[0].to_string())


if __name__ == "__main__":
    _serve()
