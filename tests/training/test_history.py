"""Losses that are not finite stop the run with what is needed to find the cause."""

import math

import pytest
import torch

from vitkernels import runtime
from vitkernels.parallel import Parallel
from vitkernels.training.history import History, NonFiniteLossError, StepRecord, check_finite


def no_samples(step, rank):
    return "-"


class Four(Parallel):
    """Four processes, whose figures are this one's times 1, 2, 3, and on the last of them broken from step 2 on."""

    def gather(self, losses):
        return [[loss * rank for loss in losses] for rank in (1, 2, 3)] + [[losses[0], *[math.nan] * (len(losses) - 1)]]


def test_losses_are_the_mean_of_all_ranks_and_the_broken_one_is_named():
    history = History(Four(runtime.create("cpu")))
    for step in (1, 2):
        history.add(step, torch.tensor(1.0), torch.tensor(1.0), lr=1e-3)
    records = history.read()
    assert records[0].loss == (1 + 2 + 3 + 1) / 4 and records[0].broken_ranks == ()
    samples = lambda step, rank: f"of step {step}, rank {rank}"  # noqa: E731
    with pytest.raises(NonFiniteLossError, match=r"loss is nan on rank 3, .* samples of step 2, rank 3"):
        check_finite(records, samples, str)
    first_alone = StepRecord(1, math.nan, 1.0, 1e-3, broken_ranks=(0,))
    with pytest.raises(NonFiniteLossError, match=r"loss is nan on rank 0, .* samples of step 1, rank 0"):
        check_finite([first_alone], samples, str)


def test_the_first_bad_step_is_named_with_its_circumstances():
    history = History(Parallel(runtime.create("cpu")))
    for step, loss in enumerate([1.0, 2.0, math.nan, math.inf], start=1):
        history.add(step, torch.tensor(loss), torch.tensor(step * 10.0), lr=step * 1e-3)
    records = history.read()
    assert [r.step for r in records] == [1, 2, 3, 4] and history.read() == []
    assert {r.broken_ranks for r in records} == {()}  # there is but one
    with pytest.raises(NonFiniteLossError) as error:
        check_finite(records, lambda step, rank: f"samples of {step}", lambda: "The last good checkpoint is X.")
    for part in ("loss is nan, gradient norm 30 at step 3", "lr 3.000e-03", "samples of 3", "checkpoint is X"):
        assert part in str(error.value)
    check_finite(records[:2], no_samples, str)


def test_a_gradient_that_is_not_finite_counts_unless_losses_are_scaled():
    history = History(Parallel(runtime.create("cpu")))
    history.add(1, torch.tensor(1.0), torch.tensor(math.inf), lr=1e-3)
    records = history.read()
    with pytest.raises(NonFiniteLossError, match="loss is 1, gradient norm inf at step 1"):
        check_finite(records, no_samples, str)
    check_finite(records, no_samples, str, gradients=False)
