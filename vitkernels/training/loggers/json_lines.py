"""metrics.jsonl: one line per step and per evaluation, in full precision."""

import json
import logging
import os
from pathlib import Path

from vitkernels.files import write_atomically
from vitkernels.training.loggers.base import DiskGuard, NullLogger
from vitkernels.training.metrics import StepRecord

log = logging.getLogger(__name__)


class JsonLinesLogger(NullLogger):
    """Append to `folder`/metrics.jsonl; while the disk is full, lines wait in memory.

    Args:
        first_step: steps taken before; lines past it, from a run that was killed later, are dropped.
        drop_evaluation: also drop the evaluation of `first_step`, because it will run again.
    """

    def __init__(self, folder: Path, guard: DiskGuard, first_step: int = 0, drop_evaluation: bool = False):
        self.path = folder / "metrics.jsonl"
        self._guard = guard
        _drop_lines_after(self.path, first_step, drop_evaluation)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._unwritten = b""

    def steps(self, records: list[StepRecord]) -> None:
        self._write([record.as_dict() for record in records])

    def evaluation(self, step: int, figures: dict[str, float]) -> None:
        self._write([{"step": step, **figures}])

    def _write(self, lines: list[dict]) -> None:
        self._unwritten += "".join(json.dumps(line) + "\n" for line in lines).encode()
        with self._guard.tolerate():
            while self._unwritten:
                written = self._file.write(self._unwritten)
                self._unwritten = self._unwritten[written:]
            self._guard.failing = False

    def flush(self) -> None:
        self._write([])
        with self._guard.tolerate():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file.closed:
            return
        self._write([])
        if self._unwritten:
            log.error("%s lacks its last %d lines", self.path, self._unwritten.count(b"\n"))
        self._file.close()


def _drop_lines_after(path: Path, step: int, drop_evaluation: bool) -> None:
    """Keep the complete lines up to `step`; a torn last line is dropped too."""
    if not path.exists():
        return
    kept, damaged = [], 0
    for line in path.read_bytes().splitlines():
        try:
            content = json.loads(line)
            evaluated_here = drop_evaluation and content["step"] == step and "loss" not in content
            if content["step"] <= step and not evaluated_here:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError):  # ValueError: no JSON, or no UTF-8
            damaged += 1
    if damaged > 1:  # a kill leaves one at most
        log.warning("%s: dropped %d damaged lines", path, damaged)
    write_atomically(path, lambda file: file.write(b"".join(kept)))
