"""Read the files that one compilation writes: the optimized module, its memory sizes, and the kernels' schedules."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vitkernels.tpu_estimate.chips import CHIPS, Chip

MODULE, MEMORY, FLOPS = "compiled_module.hlo", "compiled_memory.json", "matrix_flops.json"


@dataclass(frozen=True)
class CompilationDump:
    """The files of one compilation, written by `compile_process.compile_in`."""

    folder: Path
    chip: Chip = CHIPS["v5e"]

    @property
    def module(self) -> str:
        """Return the text of the optimized, scheduled HLO module."""
        return (self.folder / MODULE).read_text()

    @property
    def memory(self) -> dict[str, int]:
        """Return the HBM bytes that the compiler reserves: argument, output, temp, generated_code and alias.

        Aliased bytes are counted in both argument and output.
        """
        return json.loads((self.folder / MEMORY).read_text())

    @property
    def matrix_flops(self) -> int | None:
        """Return the FLOPs of the matrix products, or None for a program that was not built from JAX."""
        path = self.folder / FLOPS
        return json.loads(path.read_text()) if path.exists() else None

    def text(self, operation: str, stage: str) -> str | None:
        """Return the dump of an HLO operation at a stage, or None if there is none or the file is ambiguous."""
        if (path := self._files.get((operation, stage))) is None:
            matches = [path for (name, s), path in self._shortened.items() if s == stage and operation.startswith(name)]
            path = matches[0] if len(matches) == 1 else None
        return None if path is None else path.read_text()

    @cached_property
    def _files(self) -> dict[tuple[str, str], Path]:
        """Return the files by operation and stage; their names are TIME-OPERATION-NN-STAGE.txt."""
        found = {}
        for path in sorted(self.folder.iterdir(), reverse=True):
            if name := re.fullmatch(r"\d+-(.+?)-\d{2,3}-(.+)\.txt", path.name):
                found[name[1], name[2]] = path
        return found

    @cached_property
    def _shortened(self) -> dict[tuple[str, str], Path]:
        """Return the files whose operation names libtpu truncated and hashed, by the start of the operation's name."""
        files = {(re.fullmatch(r"(.+)-\d{15,}", name), stage): path for (name, stage), path in self._files.items()}
        return {(name[1], stage): path for (name, stage), path in files.items() if name}
