"""The benchmark of training steps: the steps it times, the memory it holds, and its tables."""

import contextlib
import weakref

import numpy as np
import torch
from torch import nn

from vitkernels.benchmarks.step import (
    StepTimes,
    Variant,
    bare_loop,
    losses_table,
    run_variants,
    table,
    train_on_synthetic,
)

SIZES = {"image_size": 4, "batch_size": 2, "num_classes": 3, "in_chans": 1}


class FakeRuntime:
    """A device on which the first `slow` steps take 1000 ms and all others 10 ms; it records its calls."""

    device = torch.device("cpu")

    def __init__(self, slow=0):
        self.slow, self.now, self.calls = slow, 0.0, []

    def autocast(self):
        return contextlib.nullcontext()

    def optimizer_kwargs(self, name):
        return {}

    def end_step(self, images, targets):
        self.calls.append("step")
        self.now += 1000 if self.calls.count("step") <= self.slow else 10

    def synchronize(self):
        self.calls.append("synchronize")

    def stamp(self):
        self.calls.append("stamp")
        return self.now

    def elapsed_ms(self, start, end):
        return end - start

    def peak_memory_bytes(self):
        return None


def small_model(pixels=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 3))


def test_bare_loop__times_only_after_warm_up():
    runtime = FakeRuntime(slow=3)
    row = bare_loop("a", runtime, small_model(), **SIZES, warmup=3, steps=4)
    warm_up = ["step", "synchronize", "step", "step", "synchronize"]  # the first step is timed on its own
    assert runtime.calls == [*warm_up, "stamp", *["step", "stamp"] * 4, "synchronize"]
    assert (row.p10, row.median, row.p90, row.n) == (10.0, 10.0, 10.0, 4)


def test_run_variants__releases_earlier_variants():
    alive = []  # weak references to the owners of the weights' memory

    def make(fails=False):
        assert [name for name, memory in alive if memory() is not None] == []
        model = small_model(pixels=15 if fails else 16)
        for name, parameter in model.named_parameters():
            memory = np.array(parameter.detach().numpy())
            parameter.data = torch.from_numpy(memory)
            alive.append((f"{name} of model {len(alive) // 2}", weakref.ref(memory)))
        model.itself = [model]  # a reference cycle, as in compiled models
        return model

    variants = [Variant("a", make, compare_losses=True), Variant("b", make)]
    variants += [Variant("fails", lambda: make(fails=True)), Variant("c", make, compare_losses=True)]
    rows = list(run_variants(variants, FakeRuntime(), 2, warmup=1, steps=30, **SIZES))
    assert [row.variant for row in rows] == ["a", "b", "c"] and len(alive) == 8
    assert rows[0].losses == rows[2].losses and len(rows[0].losses) == 2 and rows[1].losses is None


def test_train_on_synthetic__starts_from_given_weights():
    start = {key: value.clone() for key, value in small_model().state_dict().items()}
    first, second = small_model(), small_model()
    for parameter in second.parameters():
        parameter.data.add_(1.0)
    losses = [train_on_synthetic(FakeRuntime(), model, start, **SIZES, steps=3) for model in (first, second)]
    assert losses[0] == losses[1] and len(set(losses[0])) == 3


def test_table__throughput_and_time_relative_to_baseline():
    rows = [StepTimes(name, ms, ms, ms, 2, 2**30, None, 1.0) for name, ms in (("timm", 50.0), ("ours", 40.0))]
    rows[1].first_step_s = 12.34
    lines = table(rows, batch_size=100, baseline="timm").splitlines()
    assert lines[2] == "| timm | 50.00 (50.00, 50.00) | 2000 | 1.0 | – | 1.000 |"
    assert lines[3] == "| ours | 40.00 (40.00, 40.00) | 2500 | 1.0 | 12.3 | 0.800 |"


def test_losses_table__baseline_at_any_position():
    rows = [
        StepTimes(name, 1.0, 1.0, 1.0, 2, None, 0.0, losses[-1], losses)
        for name, losses in (("ours", [2.2, 1.1]), ("timm", [2.0, 1.0]))
    ]
    for order in (rows, rows[::-1]):
        lines = losses_table(order, "timm", window=1)
        assert "| timm | 2.0000 | 1.0000 | 1.5000 |" in lines
        assert "| ours | +10.00 % | +10.00 % | +10.00 % |" in lines
