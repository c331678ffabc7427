"""A training step without a run: no folder, no logger, no command line."""

import pytest
import torch

from vitkernels import parallel, runtime
from vitkernels.config import Config
from vitkernels.training import setup
from vitkernels.training.plan import Due

SMALL = ["runtime=cpu", "attn=sdpa", "data.batch_size=8", "+model.kwargs.depth=1", "trainer.max_steps=5"]


@pytest.fixture
def trainer(settings):
    cfg = Config.from_hydra(settings(*SMALL, "trainer.eval_every=null", "checkpoints.every_epochs=null"))
    with parallel.create("none", runtime.create("cpu")) as strategy:
        yield setup.trainer_from_config(cfg, strategy)[0]


def test_train_step__works_without_a_run(trainer):
    batches = trainer.parallel.feed(trainer.plan.batches(trainer.data.train, 0))
    before = trainer.model.head.weight.detach().clone()
    for _ in range(2):
        trainer.train_step(batches)
    records = trainer.metrics.read()
    assert [record.step for record in records] == [1, 2] and trainer.state.step == 2
    assert not torch.equal(trainer.model.head.weight, before)
    assert trainer.parameters_without_gradient == []


def test_fit__trains_to_the_end_without_a_run_folder(trainer):
    assert Due.END in trainer.fit()
    assert trainer.state.step == 5 and len(trainer.state.recent_losses) == 5


def test_fit__stops_after_the_step_in_which_stop_becomes_true(trainer, tmp_path, monkeypatch):
    from vitkernels.checkpoint.checkpoints import Checkpoints, load_state

    trainer.attach(Checkpoints(tmp_path), {}, {}, begin=0.0)
    assert Due.STOP in trainer.fit(stop=True)
    assert load_state(tmp_path / "step_00000001")["step"] == 1


def test_evaluate__on_its_own(trainer):
    trainer.evaluate()
    assert 0 <= trainer.state.last_eval["top1"] <= 100 and trainer.state.best["step"] == 0
    assert trainer.state.last_eval["images"] == 360
