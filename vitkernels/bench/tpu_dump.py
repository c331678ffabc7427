"""Compile a JAX function for a TPU in a process of its own, and keep what the compiler dumped.

libtpu reads its flags once, when it loads: hence the process. Only the last stages of each kernel's schedule are kept:
the whole dump of a large kernel is some 100 MB of text.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vitkernels.bench import tpu_chips, tpu_static
from vitkernels.bench.tpu_chips import CHIPS, Chip
from vitkernels.errors import UsageError

_FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true "
    "--xla_jf_dump_llo_pass_label_regex=post-ra|utilization"
)
_MODULE, _MEMORY = "compiled_module.hlo", "compiled_memory.json"


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
    function, its jax.ShapeDtypeStructs, ...), or of compile_hlo (a serialized module, its aliases).

    Raises UsageError with the end of the compiler's message where it refuses, or takes more than `timeout` seconds.
    """
    flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {_FLAGS.format(folder=folder)}".strip()
    modules = os.pathsep.join(path for path in sys.path if path)  # what can be imported here can be there
    environment = os.environ | {"LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": modules}
    command = [sys.executable, "-m", __name__, str(folder), chip, build, json.dumps(arguments)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{build}{arguments}: not compiled within {timeout:.0f} s") from None
    if done.returncode:
        raise UsageError(f"{build}{arguments} does not compile for {chip}:\n{done.stderr[-2000:]}")
    return Dump(folder, tpu_chips.chip(chip))


def _main(folder: str, chip: str, build: str, arguments: str) -> None:
    module, function = build.split(":")
    built = getattr(importlib.import_module(module), function)(*json.loads(arguments))
    if isinstance(built[0], bytes):
        executable = tpu_static.compile_hlo(built[0], chip, built[1])
    else:
        executable = tpu_static.compile_jax(*built, chip=chip).runtime_executable()
    analysis = executable.get_compiled_memory_stats()
    parts = ("argument", "output", "temp", "alias", "generated_code")
    memory = {part: getattr(analysis, f"{part}_size_in_bytes") for part in parts}
    Path(folder, _MEMORY).write_text(json.dumps(memory))
    Path(folder, _MODULE).write_text(executable.hlo_modules()[0].to_string())


if __name__ == "__main__":
    _main(*sys.argv[1:])
