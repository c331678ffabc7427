"""The arithmetic of a run's steps, by tables."""

import pytest
from expecting import error

from vitkernels.config.groups import CheckpointSettings, TrainerSettings
from vitkernels.training.plan import Due, StepPlan

LOG, EVAL, SAVE, STOP, END, NONE = Due.LOG, Due.EVAL, Due.SAVE, Due.STOP, Due.END, Due.NONE


def due_steps(plan: StepPlan) -> dict[int, Due]:
    found = {step: plan.due(step) for step in range(1, plan.total_steps + 1)}
    return {step: due for step, due in found.items() if due}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {10: END}),
        ({"log_every": 4}, {4: LOG, 8: LOG, 10: END}),
        ({"eval_every": 1}, {3: EVAL, 6: EVAL, 9: EVAL, 10: EVAL | END}),
        ({"eval_every": 2}, {6: EVAL, 10: EVAL | END}),
        ({"eval_every": 2, "save_every_steps": 4}, {4: SAVE, 6: EVAL | SAVE, 8: SAVE, 10: EVAL | SAVE | END}),
        ({"save_every_epochs": 1}, {3: SAVE, 6: SAVE, 9: SAVE, 10: SAVE | END}),
        ({"save_every_epochs": 2, "log_every": 6}, {6: SAVE | LOG, 10: SAVE | END}),
        ({"save_every_steps": 4}, {4: SAVE, 8: SAVE, 10: END}),
    ],
)
def test_due__at_each_boundary(settings, expected):
    assert due_steps(StepPlan(total_steps=10, steps_per_epoch=3, **settings)) == expected


@pytest.mark.parametrize(
    ("step", "settings", "expected"),
    [
        (4, {}, STOP | SAVE),
        (6, {"eval_every": 1}, STOP | SAVE | EVAL),  # the evaluation stays pending
        (10, {}, END),  # a stop after the last step changes nothing
    ],
)
def test_due__when_stopping(step, settings, expected):
    assert StepPlan(total_steps=10, steps_per_epoch=3, **settings).due(step, stopping=True) == expected


@pytest.mark.parametrize(
    ("max_steps", "max_epochs", "accum", "batches", "total", "per_epoch"),
    [(None, 2, 1, 11, 22, 11), (None, 1.5, 2, 11, 8, 5), (7, 40, 1, 11, 7, 11), (None, 0.01, 1, 11, 1, 11)],
)
def test_length__from_epochs_or_steps(max_steps, max_epochs, accum, batches, total, per_epoch):
    trainer = TrainerSettings(max_steps=max_steps, max_epochs=max_epochs, accum_steps=accum)
    plan = StepPlan.of(trainer, CheckpointSettings(), batches_per_epoch=batches, images_per_batch=32)
    assert (plan.total_steps, plan.steps_per_epoch, plan.images_per_step) == (total, per_epoch, 32 * accum)


def test_accumulation__longer_than_an_epoch_is_refused():
    with error("plan.accum_steps", accum_steps=12, batches_per_epoch=11):
        StepPlan.of(TrainerSettings(accum_steps=12), CheckpointSettings(), batches_per_epoch=11, images_per_batch=1)


@pytest.mark.parametrize(("cap", "steps"), [(None, 6), (0.1, 1), (0.5, 5), (0, 0)])
def test_warmup__is_capped_as_a_share_of_the_run(cap, steps):
    assert StepPlan(total_steps=10, steps_per_epoch=3).warmup_steps(2, cap) == steps


class RecordingLoader:
    def epoch(self, epoch, start=0):
        return epoch, start

    def sample_ids(self, epoch, batch, rank=None):
        return [100 * epoch + 10 * batch + rank]


def test_batches__continue_in_mid_epoch():
    plan = StepPlan(total_steps=10, steps_per_epoch=3, accum_steps=2)
    assert [plan.batches(RecordingLoader(), step) for step in (0, 2, 3, 7)] == [(0, 0), (0, 4), (1, 0), (2, 2)]
    assert [plan.steps_left_in_epoch(step) for step in (0, 2, 3, 7)] == [3, 1, 3, 2]


def test_sample_ids__of_a_step():
    plan = StepPlan(total_steps=10, steps_per_epoch=3, accum_steps=2)
    assert plan.sample_ids(RecordingLoader(), 5, [0, 1]) == [120, 130, 121, 131]  # second step of the second epoch
