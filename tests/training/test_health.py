"""Non-finite losses stop a run with a message that helps to find the cause; a host-bound GPU is logged.

Slow ranks: tests/parallel/test_torchrun.py.
"""

import math
import pickle

import pytest
import torch

from vitkernels import runtime
from vitkernels.parallel import Parallel
from vitkernels.training.health import MIN_STEPS, NonFiniteLossError, check_finite, warn_if_host_bound
from vitkernels.training.metrics import StepMetrics, StepRecord
from vitkernels.training.step_timer import Window


def no_samples(step, rank):
    return "-"


class FourRanks(Parallel):
    """Four processes with this one's losses times 1, 2 and 3; the losses of the last are NaN from step 2 on."""

    def gather(self, losses):
        return [[loss * rank for loss in losses] for rank in (1, 2, 3)] + [[losses[0], *[math.nan] * (len(losses) - 1)]]


def test_loss__mean_over_ranks_and_nonfinite_rank_is_named():
    metrics = StepMetrics(FourRanks(runtime.create("cpu")))
    for step in (1, 2):
        metrics.add(step, torch.tensor(1.0), torch.tensor(1.0), lr=1e-3)
    records = metrics.read()
    assert records[0].loss == (1 + 2 + 3 + 1) / 4 and records[0].nonfinite_ranks == ()
    asked = []
    samples = lambda step, rank: asked.append((step, rank)) or f"of step {step}, rank {rank}"  # noqa: E731
    first_step = StepRecord(1, math.nan, 1.0, 1e-3, nonfinite_ranks=(0,))
    for broken, step, rank in ((records, 2, 3), ([first_step], 1, 0)):
        with pytest.raises(NonFiniteLossError) as error:
            check_finite(broken, samples, str)
        assert (error.value.step, error.value.ranks) == (step, (rank,))
        assert asked.pop() == (step, rank) and f"of step {step}, rank {rank}" in str(error.value)


def test_nonfinite_loss__message_describes_the_first_bad_step():
    metrics = StepMetrics(Parallel(runtime.create("cpu")))
    for step, loss in enumerate([1.0, 2.0, math.nan, math.inf], start=1):
        metrics.add(step, torch.tensor(loss), torch.tensor(step * 10.0), lr=step * 1e-3)
    records = metrics.read()
    assert [r.step for r in records] == [1, 2, 3, 4] and metrics.read() == []
    assert {r.nonfinite_ranks for r in records} == {()}  # a single process names no rank
    with pytest.raises(NonFiniteLossError) as error:
        check_finite(records, lambda step, rank: f"samples of {step}", lambda: "The last good checkpoint is X.")
    for part in ("loss is nan, gradient norm 30 at step 3", "lr 3.000e-03", "samples of 3", "checkpoint is X"):
        assert part in str(error.value)
    check_finite(records[:2], no_samples, str)


def test_nonfinite_gradient__raises_unless_losses_are_scaled():
    metrics = StepMetrics(Parallel(runtime.create("cpu")))
    metrics.add(1, torch.tensor(1.0), torch.tensor(math.inf), lr=1e-3)
    records = metrics.read()
    with pytest.raises(NonFiniteLossError) as error:
        check_finite(records, no_samples, str)
    assert error.value.step == 1
    check_finite(records, no_samples, str, check_gradients=False)


def test_nonfinite_loss_error__survives_pickling():
    error = pickle.loads(pickle.dumps(NonFiniteLossError("loss is nan", 7, (1,))))
    assert (str(error), error.step, error.ranks) == ("loss is nan", 7, (1,))


def test_host_bound_warning__given_for_a_window_with_mostly_late_launches(caplog):
    assert not warn_if_host_bound(10, Window())
    assert not warn_if_host_bound(10, Window(host_was_late=[True] * (MIN_STEPS - 1)))
    assert not warn_if_host_bound(20, Window(host_was_late=[True, False] * MIN_STEPS))
    assert caplog.text == ""
    assert warn_if_host_bound(40, Window(host_was_late=[True] * 15 + [False] * 4))
    assert "15 of 19 steps up to step 40" in caplog.text and "compile=auto" in caplog.text
    caplog.clear()
    assert warn_if_host_bound(40, Window(host_was_late=[True] * 19), advise_graphs=False)
    assert "data.batch_size" in caplog.text and "compile=auto" not in caplog.text
