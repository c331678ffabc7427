"""The loggers of a run: resumed files, a disk that is full for a while, and the terminal."""

import json
import logging
import threading

import pytest
from rich.console import Console

from vitkernels.training.loggers import ConsoleLogger, JsonLinesLogger, console, run_loggers
from vitkernels.training.loggers.base import DiskGuard
from vitkernels.training.loggers.tensorboard import TensorBoardLogger
from vitkernels.training.metrics import StepRecord
from vitkernels.training.terminal_log import TerminalLog


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
def test_full_disk__delays_lines_without_ending_the_run(tmp_path, caplog):
    """A file size limit stands in for the full disk."""
    resource = pytest.importorskip("resource")
    logger = run_loggers(tmp_path, 9)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def log_window(step):
        logger.steps([StepRecord(step, 1.0, 2.0, 3.0)])
        logger.scalars(step, {"train/loss": 1.0})
        logger.flush()

    log_window(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for step in (2, 3):
            log_window(step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caplog.text.count("training continues") == 1  # said once
    log_window(4)
    logger.evaluation(4, {"val_top1": 50.0})
    logger.close()
    logger.close()
    for thread in threading.enumerate():  # or its late failure would count against another test
        if thread.daemon and type(thread).__module__.startswith("tensorboard"):
            thread.join(10)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert {1, 4} <= {point.step for point in board.Scalars("train/loss")}


def test_tensorboard__removes_empty_files_of_a_full_disk(tmp_path):
    logger = TensorBoardLogger(tmp_path, DiskGuard(tmp_path))
    logger._writer.close()
    logger._writer = None  # as after an error
    (tmp_path / "events.out.tfevents.1.host.2.3").touch()
    logger.scalars(1, {"train/loss": 1.0})
    logger.close()
    files = list(tmp_path.glob("events.out.tfevents.*"))
    assert files and all(path.stat().st_size for path in files)


def test_restart_from_scratch__leaves_no_old_points(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for last in (8, 4):
        logger = run_loggers(tmp_path, 9)
        for step in range(1, last + 1):
            logger.scalars(step, {"train/loss": float(last)})
        logger.close()
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert [(point.step, point.value) for point in board.Scalars("train/loss")] == [(n, 4.0) for n in (1, 2, 3, 4)]


def test_unwritten_lines__are_counted_at_the_end(tmp_path, caplog):
    logger = JsonLinesLogger(tmp_path, DiskGuard(tmp_path))
    logger._file.close()
    logger._file = Full()
    logger.steps([StepRecord(step, 1.0, 2.0, 3.0) for step in (1, 2)])
    logger.close()
    assert "lacks its last 2 lines" in caplog.text


class Full:
    closed = False

    def write(self, content):
        raise OSError(28, "No space left on device")

    def close(self):
        self.closed = True


def log_through(handler, level, text):
    record = logging.LogRecord("vitkernels", level, __file__, 1, text, None, None)
    handler.handle(record)


def test_terminal_log__errors_go_to_stderr(capsys):
    handler = TerminalLog()
    for level in (logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        log_through(handler, level, f"line {level}")
    printed = capsys.readouterr()
    assert printed.out.split("\n") == ["line 20", "line 30", ""] and printed.err.split("\n") == [
        "line 40",
        "line 50",
        "",
    ]


def test_progress_bar__log_lines_are_above_it(monkeypatch, capsys):
    monkeypatch.setattr(console, "Console", lambda: Console(force_terminal=True, color_system=None, width=120))
    handler, bar = TerminalLog(), ConsoleLogger(total_steps=3)
    log_through(handler, logging.INFO, "a line")
    bar.window(3, "", "loss 1")
    log_through(handler, logging.ERROR, "an error")
    bar.close()
    log_through(handler, logging.ERROR, "an error after it")
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert printed.err == "an error after it\n"
    assert any(line.endswith("a line") for line in lines) and any(line.endswith("an error") for line in lines)
    assert "3/3" in lines[-2] and "loss 1" in lines[-2]  # the last line shows the cursor again
