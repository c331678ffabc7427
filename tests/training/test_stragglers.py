"""A host that launches kernels too slowly is named. (Slow processes: tests/parallel/test_processes.py.)"""

from vitkernels.training.step_timer import Window
from vitkernels.training.stragglers import LEAST_STEPS, name_late_host


def test_a_host_that_is_mostly_late_is_named(caplog):
    assert not name_late_host(10, Window())
    assert not name_late_host(10, Window(host_was_late=[True] * (LEAST_STEPS - 1)))
    assert not name_late_host(20, Window(host_was_late=[True, False] * LEAST_STEPS))
    assert caplog.text == ""
    assert name_late_host(40, Window(host_was_late=[True] * 15 + [False] * 4))
    assert "15 of 19 steps up to step 40 the GPU waited for the host" in caplog.text
    assert "compile=reduce-overhead" in caplog.text
