"""A training step without a run: no folder, no logger, no command line."""

import time
from types import SimpleNamespace

import pytest
import torch

from vitkernels import parallel, runtime
from vitkernels.checkpoint import checkpoints
from vitkernels.config import Config
from vitkernels.training import setup
from vitkernels.training import trainer as trainer_module
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


def failing_in_step_2(trainer, monkeypatch, saves):
    """Let `fit` end with an error in its second step, after a checkpoint of the first."""
    step = trainer.train_step

    def failing(batches):
        if trainer.state.step == 1:
            raise LookupError("of step 2")
        step(batches)
        if saves:
            trainer.save()

    monkeypatch.setattr(trainer, "train_step", failing)


def test_fit__waits_for_the_checkpoint_if_a_step_fails(trainer, tmp_path, monkeypatch):
    finish = checkpoints._Writer.finish

    def finish_late(*args, **options):
        time.sleep(0.3)
        return finish(*args, **options)

    monkeypatch.setattr(checkpoints._Writer, "finish", finish_late)
    trainer.attach(checkpoints.Checkpoints(tmp_path), {}, {}, begin=0.0)
    failing_in_step_2(trainer, monkeypatch, saves=True)
    with pytest.raises(LookupError, match="of step 2"):
        trainer.fit()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_fit__reports_a_failed_step_and_what_fails_after_it(trainer, tmp_path, monkeypatch, caplog):
    def fail(of):
        raise RuntimeError(f"{of} could not be written")

    profiler = SimpleNamespace(step=lambda: None, stop=lambda: fail("trace"))
    monkeypatch.setattr(trainer_module, "start_profiler", lambda *_: profiler)
    trainer.attach(checkpoints.Checkpoints(tmp_path), {}, {}, begin=0.0)
    monkeypatch.setattr(trainer.checkpoints, "wait", lambda: fail("checkpoint"))
    failing_in_step_2(trainer, monkeypatch, saves=False)
    with pytest.raises(LookupError, match="of step 2"):
        trainer.fit(profile_into=tmp_path)
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [text.partition(",")[0] for text in errors] == [
        "trace could not be written",
        "checkpoint could not be written",
    ]


def test_evaluate__on_its_own(trainer):
    trainer.evaluate()
    assert 0 <= trainer.state.last_eval["top1"] <= 100 and trainer.state.best["step"] == 0
    assert trainer.state.last_eval["images"] == 360
