"""The step timer: what counts as a step, and what is excluded."""

import tracemalloc

from vitkernels.training.step_timer import StepTimer


class FakeRuntime:
    """A device whose work takes as long as the test says, and whose stamps can be read immediately."""

    def __init__(self, per_step_clock=True):
        self.per_step_clock = per_step_clock
        self.now = 0.0
        self.synchronized = 0
        self.done_up_to = None

    def has_reached(self, stamp):
        return None if self.done_up_to is None else stamp <= self.done_up_to

    def hold(self, ms):
        return False

    def stamp(self):
        return self.now

    def elapsed_ms(self, start, end):
        return end - start

    def synchronize(self):
        self.synchronized += 1


def steps(timer, device, durations):
    for duration in durations:
        device.now += duration
        timer.step_done()


def test_step_times__exclude_warmup_and_pauses():
    device = FakeRuntime()
    timer = StepTimer(device, warmup_steps=2)
    timer.start()
    steps(timer, device, [1000, 500, 10, 20])
    assert timer.stop().step_ms == [10, 20]
    device.now += 9999  # evaluation
    timer.start()
    steps(timer, device, [30])
    assert timer.stop().step_ms == [30]
    assert timer.summary()["step_time_ms"] == {"median": 20.0, "p10": 12.0, "p90": 28.0, "mean": 20.0, "n": 3}


def test_memory__grows_by_one_number_per_step():
    device, count = FakeRuntime(), 20_000
    timer = StepTimer(device, warmup_steps=0)
    tracemalloc.start()
    for begin in range(0, count, 100):
        timer.start()
        for step in range(begin, begin + 100):
            device.now += step / 7
            timer.forward_done()
            timer.step_done()
        timer.stop()
    assert timer.summary()["step_time_ms"]["n"] == count
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 12 * count  # 8 bytes each, and the array's reserve


def test_synchronize__only_at_window_edges():
    device = FakeRuntime()
    timer = StepTimer(device, warmup_steps=1)
    timer.start()
    steps(timer, device, [1] * 50)
    assert device.synchronized == 0
    timer.stop()
    assert device.synchronized == 1


def test_window_mean__stands_for_each_step_without_per_step_clock():
    device = FakeRuntime(per_step_clock=False)
    timer = StepTimer(device, warmup_steps=1)
    timer.start()
    steps(timer, device, [100])
    assert device.synchronized == 1  # no warm-up work is left in the first window
    steps(timer, device, [1, 1, 1])
    device.now += 27  # the device finishes what the host queued
    assert timer.stop().step_ms == [10, 10, 10]


def test_summary__is_null_if_nothing_was_timed():
    timer = StepTimer(FakeRuntime(), warmup_steps=5)
    timer.start()
    steps(timer, timer.runtime, [1, 2])
    timer.stop()
    summary = timer.summary()
    assert summary["step_time_ms"] == {"median": None, "p10": None, "p90": None, "mean": None, "n": 0}
    assert summary["input_wait_ms"] is None and summary["host_bound"] is None


def test_host_was_late__if_the_device_ran_out_of_work_before_the_launch():
    device = FakeRuntime()
    timer = StepTimer(device, warmup_steps=1)
    timer.start()
    steps(timer, device, [10])
    for late in (False, True, True, False):  # the first step of a window cannot tell
        device.done_up_to = device.now - (not late)
        timer.forward_done()
        device.now += 10
        device.done_up_to = device.now
        timer.forward_done()  # of a second batch of the same step
        steps(timer, device, [10])
    assert timer.stop().host_was_late == [True, True, False]
    assert timer.summary()["host_bound"] == 0.6667


def test_host_was_late__unknown_if_input_bound_or_synchronized_or_not_queryable(monkeypatch):
    for done_up_to, wait_ms, steps_wait in ((1e9, 2.0, False), (None, 0.0, False), (1e9, 0.0, True)):
        device = FakeRuntime()
        device.done_up_to = done_up_to
        timer = StepTimer(device, 0, steps_wait)
        timer.start()
        for _ in range(3):
            clock = iter([0.0, wait_ms / 1e3])
            with monkeypatch.context() as patch:
                patch.setattr("time.perf_counter", lambda clock=clock: next(clock))
                with timer.waiting():
                    pass
            timer.forward_done()
            steps(timer, device, [10])
        assert timer.stop().host_was_late == [] and timer.summary()["host_bound"] is None
