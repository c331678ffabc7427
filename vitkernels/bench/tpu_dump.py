"""Compile a JAX function for a TPU in a process of its own, and keep what the compiler dumped.

libtpu reads its flags once, when it loads: hence the process. The dump of a large kernel is some 100 MB of text.
"""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from vitkernels.bench import tpu_static
from vitkernels.errors import UsageError

_FLAGS = "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true"
_MODULE, _MEMORY = "compiled_module.hlo", "compiled_memory.json"


@dataclass(frozen=True)
class Dump:
    """The files of one compilation."""

    folder: Path

    @property
    def module(self) -> str:
        """The optimised, scheduled HLO module."""
        return (self.folder / _MODULE).read_text()

    @property
    def memory(self) -> dict[str, int]:
        """HBM bytes that the compiler sets aside: arguments, outputs, temporaries."""
        return json.loads((self.folder / _MEMORY).read_text())

    def text(self, operation: str, stage: str) -> str | None:
        """What was dumped of an HLO operation at a stage; None if nothing. Files are time-operation-NN-stage.txt."""
        prefix, suffix = f"-{operation}-", f"-{stage}.txt"
        for path in sorted(self.folder.iterdir()):
            _, dash, rest = path.name.partition("-")
            number = (dash + rest).removeprefix(prefix).removesuffix(suffix)
            if (dash + rest) == f"{prefix}{number}{suffix}" and number.isdigit():
                return path.read_text()
        return None


def compile_in(folder: Path, build: str, *arguments, chip: str = "v5e", timeout: float = 900) -> Dump:
    """Compile what "package.module:function"(*arguments) returns: a JAX function and its jax.ShapeDtypeStructs.

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
    return Dump(folder)


def _main(folder: str, chip: str, build: str, arguments: str) -> None:
    module, function = build.split(":")
    compiled = tpu_static.compile_jax(*getattr(importlib.import_module(module), function)(*json.loads(arguments)), chip)
    analysis = compiled.memory_analysis()
    memory = {part: getattr(analysis, f"{part}_size_in_bytes") for part in ("argument", "output", "temp", "alias")}
    Path(folder, _MEMORY).write_text(json.dumps(memory))
    Path(folder, _MODULE).write_text(compiled.as_text())


if __name__ == "__main__":
    _main(*sys.argv[1:])
