"""The split of a step's time: delays of a known length are attributed to their cause. Most tests use a model of a GPU:
a queue in which work begins once it is launched and all earlier work is done. Delays on the CPU are long compared to
the rest of a step. They are measured, because a busy machine wakes threads late.
"""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from vitkernels import parallel, runtime
from vitkernels.config import Config
from vitkernels.data.fake import PoolLoader
from vitkernels.training import health, setup
from vitkernels.training.step_timer import PARTS, StepTimer, Window

TOLERANCE = 0.1  # of the injected time
SCHEDSTAT = Path("/proc/thread-self/schedstat")


class ModelGpu:
    """A GPU with a queue. All times in ms; `host` is the host's clock."""

    per_step_clock = True

    def __init__(self):
        self.host = self.done = 0.0
        self.held = 0

    def launch(self, ms, host_ms=0.0):
        self.host += host_ms
        self.done = max(self.done, self.host) + ms

    def stamp(self):
        self.done = max(self.done, self.host)
        return self.done

    def has_reached(self, stamp):
        return stamp <= self.host

    def elapsed_ms(self, start, end):
        return end - start

    def synchronize(self):
        self.host = max(self.host, self.done)

    def hold(self, ms):
        self.held += 1
        self.launch(ms)
        return True


@pytest.fixture
def gpu(monkeypatch):
    device = ModelGpu()
    monkeypatch.setattr("time.perf_counter", lambda: device.host / 1e3)
    return device


def train(gpu, windows=2, steps=20, busy=35.0, launch=20.0, wait=0.0, late=0.0, slow_device=0.0):
    """Return the last window of steps of 100 kernels, which need `busy` ms on the GPU and `launch` on the host."""
    timer = StepTimer(gpu, warmup_steps=3)
    timer.start()
    for number in range(windows):
        for _ in range(steps):
            with timer.waiting():
                gpu.host += wait
            extra = slow_device if number == windows - 1 else 0.0
            for kernel in range(100):
                gpu.launch((busy + extra) / 100, launch / 100)
                if kernel == 30:
                    timer.forward_done()
                    gpu.host += late
            timer.step_done()
        window = timer.stop()
        timer.start()
    assert [sum(parts) for parts in zip(*(getattr(window, part) for part in PARTS), strict=True)] == pytest.approx(
        window.step_ms
    )
    return window.split()


def test_split__of_a_gpu_that_is_always_busy(gpu):
    split = train(gpu)
    assert split["device_busy_ms"] == pytest.approx(35, rel=0.01) and split["input_wait_ms"] == 0
    assert split["host_late_ms"] + split["rest_ms"] < 0.02 * 35 and gpu.held == 0


@pytest.mark.parametrize("launch", [5.0, 20.0])
def test_split__late_input_counts_only_while_the_gpu_is_idle(gpu, launch):
    split = train(gpu, wait=100, launch=launch)
    injected = 100 - (35 - launch)  # the wait begins while the GPU still works on what is queued
    assert split["input_wait_ms"] == pytest.approx(injected, rel=TOLERANCE)
    assert split["device_busy_ms"] == pytest.approx(35, rel=TOLERANCE) and split["rest_ms"] < 1
    hidden = train(gpu, wait=10, launch=launch)
    assert hidden["input_wait_ms"] < 1, "the wait is shorter than what is queued"


def test_split__slow_host_counts_as_host_late(gpu):
    split = train(gpu, late=100)
    assert split["host_late_ms"] == pytest.approx(100 - (35 - 20) * 0.7, rel=TOLERANCE) and split["input_wait_ms"] == 0
    assert split["device_busy_ms"] == pytest.approx(35, rel=TOLERANCE)


def test_split__launches_that_take_longer_than_the_kernels(gpu):
    split = train(gpu, launch=80)
    assert split["host_late_ms"] == pytest.approx(80 - 35, rel=TOLERANCE)
    assert split["device_busy_ms"] == pytest.approx(35, rel=TOLERANCE)
    assert 1 <= gpu.held <= 3, "the busy time is only known from a step that was queued while the GPU was held"


def test_split__gpu_slow_down_counts_as_rest_or_busy(gpu):
    split = train(gpu, slow_device=20)
    assert split["device_busy_ms"] + split["rest_ms"] == pytest.approx(55, rel=TOLERANCE)
    assert split["host_late_ms"] < 2


def test_hold__is_rare_and_not_part_of_a_step(gpu):
    timer = StepTimer(gpu, warmup_steps=0)
    timer.start()
    for _ in range(1600):
        gpu.launch(10, 30)
        timer.forward_done()
        timer.step_done()
    window = timer.stop()
    assert 3 <= gpu.held <= 5
    assert max(window.step_ms) < 45, "no step contains a hold"


def waited_for_core_ms():
    """Return how long this thread was ready to run while others had the core, by the kernel's account."""
    return int(SCHEDSTAT.read_text().split()[1]) / 1e6 if SCHEDSTAT.exists() else 0.0


class SlowLoader(PoolLoader):
    """Makes one batch after `seconds` per sample, and adds up how long that took."""

    seconds, slept = 0.0, 0.0

    def _batch(self, batch):
        begin = time.perf_counter()
        time.sleep(self.seconds * self.batch_size)
        self.slept += time.perf_counter() - begin
        return super()._batch(batch)


TINY = ["runtime=cpu", "attn=sdpa", "data=fake", "data.num_classes=10", "data.batch_size=2", "model=vit_digits"]
TINY += ["+model.kwargs.depth=1", "+model.kwargs.embed_dim=32", "+model.kwargs.num_heads=1", "trainer.warmup_steps=2"]
TINY += [
    "trainer.max_steps=18",
    "trainer.log_every=9",
    "trainer.eval_every=null",
    "checkpoints.every_epochs=null",
    "data.val_items=2",
]


@pytest.fixture
def trainer(settings):
    cfg = Config.from_hydra(settings(*TINY))
    with parallel.create("none", runtime.create("cpu")) as strategy:
        yield setup.trainer_from_config(cfg, strategy)[0]


def test_slow_loader__counts_as_input_wait_and_is_logged_once(trainer, caplog):
    loader = trainer.data.train
    loader.__class__, loader.seconds = SlowLoader, 0.01
    loader.advice = lambda: "raise num_workers"
    trainer.fit()
    sums = trainer.timer.total.sums
    assert sums["input_wait_ms"] == pytest.approx(loader.slept * 1e3 * 16 / 18, rel=TOLERANCE)
    assert caplog.text.count("input-bound") == 1 and "raise num_workers" in caplog.text


def test_slow_host__counts_as_host_late(trainer, monkeypatch):
    slept, starved = [], []  # per step: the injected time, and until then the time in which others had the core

    def slow_update(step):
        begin, starved_before = time.perf_counter(), waited_for_core_ms()
        time.sleep(0.15)  # long beside what other processes delay a step by
        slept.append((time.perf_counter() - begin) * 1e3)
        starved.append(starved_before - seen[0])
        seen[0] = waited_for_core_ms()

    monkeypatch.setattr(trainer.scheduler, "step_update", slow_update)
    seen = [waited_for_core_ms()]
    trainer.fit()
    sums = trainer.timer.total.sums
    expected = [own + others for own, others in zip(slept, starved, strict=True)][2:]
    assert sums["host_late_ms"] == pytest.approx(sum(expected), rel=TOLERANCE)
    assert sums["input_wait_ms"] < TOLERANCE * sum(expected)


@contextmanager
def competitors(core, count):
    """Run `count` programs that never rest on the core of this thread."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3)
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(not SCHEDSTAT.exists(), reason="the kernel keeps no account")
def test_starved_core__counts_as_host_late():
    timer = StepTimer(runtime.create("cpu"), warmup_steps=0)
    with competitors(max(os.sched_getaffinity(0)), 2):
        timer.start()
        before = waited_for_core_ms()
        for _ in range(8):
            cpu = time.thread_time()
            while time.thread_time() < cpu + 0.03:
                pass
            timer.forward_done()
            timer.step_done()
        starved = waited_for_core_ms() - before
        window = timer.stop()
    if starved < 50:
        pytest.skip("the core was not contended")
    assert sum(window.host_late_ms) == pytest.approx(starved, rel=TOLERANCE)
    assert sum(window.device_busy_ms) == pytest.approx(8 * 30, rel=TOLERANCE)


def test_input_bound_warning__silent_for_short_waits_and_short_windows(caplog):
    enough = health.MIN_STEPS
    for wait, steps in ((0.9, enough), (5.0, enough - 1)):
        window = Window([10.0] * steps, [wait] * steps, forward_done_ms=[1.0] * steps)
        assert not health.warn_if_input_bound(20, window, None)
    assert caplog.text == ""
    assert health.warn_if_input_bound(20, Window([10.0] * 9, [2.0] * 9, forward_done_ms=[1.0] * 9), None)


def busy_kernels(ms):
    """Launch work of about `ms` on the GPU, in short kernels as a training step has them."""
    for _ in range(20):
        torch.cuda._sleep(int(ms / 20 * 1.7e6))


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["input_wait_ms", "host_late_ms", "starved"])
def test_split_on_a_gpu__delays_are_attributed_to_their_cause(part):
    def timed(wait=0.0, late=0.0, competing=0):
        timer = StepTimer(runtime.create("cuda"), warmup_steps=3)
        timer.start()
        for _ in range(30):
            with timer.waiting():
                time.sleep(wait)
            busy_kernels(10)
            timer.forward_done()
            busy_kernels(10)
            time.sleep(late)
            end = time.thread_time() + (0.03 if part == "starved" else 0)
            while time.thread_time() < end:
                pass
            timer.step_done()
        return timer.stop().split()

    before = timed()
    if part == "starved":
        with competitors(max(os.sched_getaffinity(0)), 2):
            after = timed()
        assert after["host_late_ms"] > before["host_late_ms"] + 30
        # A process that waits for a core also returns late from its wait for input.
        assert after["input_wait_ms"] < after["host_late_ms"] / 5
        return
    # The GPU has up to one step queued when a delay begins, so much of it is hidden.
    after = timed(wait=0.2) if part == "input_wait_ms" else timed(late=0.2)
    hidden = before["device_busy_ms"]
    assert 200 * (1 - TOLERANCE) - hidden < after[part] - before[part] < 200 * (1 + TOLERANCE)
    total = sum(after.values()) - sum(before.values())
    assert after[part] - before[part] == pytest.approx(total, rel=TOLERANCE), "of what the step grew by"
