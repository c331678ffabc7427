"""TensorBoard: a point per step, log window and evaluation, the settings as text, and the HPARAMS tab.

TensorBoard sorts groups and tags by name. `curves/` comes first, with the most important curves: 1_loss, 2_top1,
3_lr and 4_step_ms. Memory and results come last, as z_memory/ and z_result/.
"""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from vitkernels.training.loggers.base import DiskGuard, NullLogger
from vitkernels.training.metrics import StepRecord


def _tag(name: str) -> str:
    return f"z_{name}" if name.startswith(("memory/", "result/")) else name


class TensorBoardLogger(NullLogger):
    """Write event files into the run's folder; points are lost while the disk is full."""

    def __init__(self, folder: Path, guard: DiskGuard, first_step: int = 0):
        self._folder, self._guard = folder, guard
        self._closed = False
        self._unhooked = threading.excepthook
        threading.excepthook = self._ignore_full_disk
        self._writer: SummaryWriter | None = None
        with guard.tolerate():
            self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def _ignore_full_disk(self, failure: threading.ExceptHookArgs) -> None:
        """Print no traceback of TensorBoard's own thread: its next call raises the error, and the guard logs it."""
        of_tensorboard = type(failure.thread).__module__.startswith("tensorboard.")
        if not (of_tensorboard and isinstance(failure.exc_value, OSError)):
            self._unhooked(failure)

    def _write(self, put: Callable[[SummaryWriter], None]) -> None:
        """Call put(writer), on a new file if the last one could not be written."""
        if self._writer is None and self._guard.failing:
            return
        with self._guard.tolerate():
            writer, self._writer = self._writer or self._reopened(), None
            put(writer)
            self._writer = writer

    def _reopened(self) -> SummaryWriter:
        """Return a writer of a new file; remove the empty files of attempts on a full disk."""
        for path in self._folder.glob("events.out.tfevents.*"):
            if path.stat().st_size == 0:
                path.unlink()
        return SummaryWriter(str(self._folder))

    def steps(self, records: list[StepRecord]) -> None:
        def put(writer: SummaryWriter) -> None:
            for record in records:
                for name, value in record.curves().items():
                    writer.add_scalar(f"curves/{name}", value, record.step)

        self._write(put)

    def evaluation(self, step: int, figures: dict[str, float]) -> None:
        if "val_top1" in figures:
            self._write(lambda writer: writer.add_scalar("curves/2_top1", figures["val_top1"], step))

    def scalars(self, step: int, values: dict[str, float | None]) -> None:
        def put(writer: SummaryWriter) -> None:
            for name, value in values.items():
                if value is not None:
                    writer.add_scalar(_tag(name), value, step)

        self._write(put)

    def text(self, title: str, markdown: str) -> None:
        self._write(lambda writer: writer.add_text(title, markdown))

    def hparams(self, parameters: dict, results: dict) -> None:
        results = {_tag(f"result/{name}"): value for name, value in results.items() if value is not None}

        def put(writer: SummaryWriter) -> None:
            for summary in hparams(parameters, results):
                writer.file_writer.add_summary(summary)
            for name, value in results.items():
                writer.add_scalar(name, value)

        self._write(put)

    def picture(self, step: int, title: str, path: Path) -> None:
        pixels = np.asarray(Image.open(path).convert("RGB"))
        self._write(lambda writer: writer.add_image(title, pixels, step, dataformats="HWC"))

    def flush(self) -> None:
        self._write(SummaryWriter.flush)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._write(SummaryWriter.close)
            threading.excepthook = self._unhooked
