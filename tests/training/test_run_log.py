"""A run's figures on a disk that is full for a while."""

import json
import threading

import pytest

from vitkernels.training.history import StepRecord
from vitkernels.training.run_log import RunLog


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_a_full_disk_delays_lines_and_ends_nothing(tmp_path, caplog):
    """The kernel refuses to let files grow, as on a full disk."""
    resource = pytest.importorskip("resource")
    run_log = RunLog(tmp_path, 9, 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def log_window(step):
        run_log.steps([StepRecord(step, 1.0, 2.0, 3.0)])
        run_log.scalars(step, {"train/loss": 1.0})
        run_log.sync()

    log_window(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for step in (2, 3):
            log_window(step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caplog.text.count("training goes on") == 1
    log_window(4)
    run_log.evaluation(4, {"val_top1": 50.0})
    run_log.close()
    run_log.close()
    for thread in threading.enumerate():  # TensorBoard's that failed ends late; as an error of another test, else
        if thread.daemon and type(thread).__module__.startswith("tensorboard"):
            thread.join(10)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert {1, 4} <= {point.step for point in board.Scalars("train/loss")}


def test_a_run_that_starts_again_from_nothing_leaves_no_old_points(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for last in (8, 4):
        run_log = RunLog(tmp_path, 9, 0)
        for step in range(1, last + 1):
            run_log.scalars(step, {"train/loss": float(last)})
        run_log.close()
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert [(point.step, point.value) for point in board.Scalars("train/loss")] == [(n, 4.0) for n in (1, 2, 3, 4)]


def test_lines_that_could_never_be_written_are_counted(tmp_path, caplog):
    run_log = RunLog(tmp_path, 9, 0)
    run_log._file.close()
    run_log._file = Full()
    run_log.steps([StepRecord(step, 1.0, 2.0, 3.0) for step in (1, 2)])
    run_log.close()
    assert "lacks its last 2 lines" in caplog.text


class Full:
    closed = False

    def write(self, content):
        raise OSError(28, "No space left on device")

    def close(self):
        self.closed = True
