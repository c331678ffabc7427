"""Runs that fail in training: non-finite losses and gradients, and a lack of memory."""

import json

import forked
import pytest
import torch
from expecting import error
from PIL import Image
from small_runs import ROOT, SMALL

import train
from vitkernels.training import trainer
from vitkernels.training.health import NonFiniteLossError
from vitkernels.training.out_of_memory import OutOfMemoryError


def test_nonfinite_loss__stops_the_run_before_a_checkpoint(settings, tmp_path):
    cfg = settings(*SMALL, "optim=sgd", "optim.lr=1e30", "schedule=constant", "trainer.clip_grad=null")
    with pytest.raises(NonFiniteLossError) as error_:
        train.run(cfg, tmp_path)
    assert error_.value.step >= 1 and "samples digits[" in str(error_.value)
    assert not list((tmp_path / "checkpoints").glob("step_*"))


def test_nonfinite_gradient__is_not_saved(settings, monkeypatch, tmp_path):
    """With a broken backward kernel, the loss stays finite for a step after the weights are not."""
    norm = torch.nn.utils.get_total_norm
    calls = []

    def broken(gradients):
        calls.append(1)
        if len(calls) == 4:
            gradients[0].fill_(float("nan"))
        return norm(gradients)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", broken)
    cfg = settings(*SMALL, "checkpoints.every_steps=1", "checkpoints.keep=9")
    with pytest.raises(NonFiniteLossError) as error_:
        train.run(cfg, tmp_path)
    assert error_.value.step == 4 and "step_00000003." in str(error_.value)
    assert max(p.name for p in (tmp_path / "checkpoints").glob("step_*")) == "step_00000003"


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 2147483648 bytes. Error code 12 (Cannot allocate memory)"
        ),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "python"],
)
def test_out_of_memory__is_explained_and_resumes_with_a_smaller_batch(failure, settings, losses, monkeypatch, tmp_path):
    words = [word for word in SMALL if "batch_size" not in word] + ["trainer.eval_every=null", "trainer.max_steps=6"]
    train.run(settings(*words, "data.batch_size=16"), tmp_path / "undisturbed")
    take_step = trainer.Trainer.train_step

    def out_of_memory(self, batches):
        if self.state.step == 4:
            raise failure
        take_step(self, batches)

    save = ["checkpoints.every_steps=2", "resume=auto"]
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "train_step", out_of_memory)
        with pytest.raises(OutOfMemoryError) as caught:
            train.run(settings(*words, *save, "data.batch_size=16"), tmp_path / "run")
    message = str(caught.value)
    assert caught.value.fields["batch_size"] == 16 and caught.value.fields["peak_bytes"] > 2**20
    assert "\n" not in message and "data.batch_size=8 trainer.accum_steps=2" in message
    assert ("2.00 GiB more" in message) == (not isinstance(failure, MemoryError))
    # As the message says. The sums of two halves round differently: 1e-7 a step, which AdamW amplifies.
    train.run(settings(*words, *save, "data.batch_size=8", "trainer.accum_steps=2"), tmp_path / "run")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "undisturbed"), rel=1e-4)


@pytest.mark.parametrize("further", [[], ["ema.decay=0.9"]])
def test_evaluation_without_a_readable_image__loses_no_training(further, settings, caplog, tmp_path):
    images = tmp_path / "images"
    for name in ("train/a/0.png", "train/b/0.png", "val/a/0.png", "val/b/0.png"):
        (images / name).parent.mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(images / name)
    words = ["runtime=cpu", "attn=sdpa", "model=vit_digits", "model.in_chans=3", "+model.kwargs.depth=1"]
    words += ["data=imagefolder", f"data.root={images}", "data.batch_size=2", "data.num_workers=0"]
    words += ["data.max_bad_share=1", "trainer.max_steps=3", *further]
    for path in (images / "val").rglob("*.png"):
        path.write_text("no image")
    train.run(settings(*words, "checkpoints.every_epochs=null"), tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("done", 3)
    assert summary["val_top1"] is None and summary["best"] is None
    assert (tmp_path / "run/model.safetensors").exists() and (tmp_path / "run/export").is_dir()
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 3 and str(images / "val") in errors[0]

    with error("evaluation.no_images", split="evaluation", unreadable=2, num_samples=2):
        train.run(settings("mode=eval", f"checkpoint={tmp_path / 'run/model.safetensors'}", *words), tmp_path / "eval")


def test_out_of_memory__of_an_absurdly_large_model(settings, tmp_path):
    words = [word for word in SMALL if "embed_dim" not in word]
    with pytest.raises(OutOfMemoryError):
        train.run(settings(*words, "+model.kwargs.embed_dim=300000"), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["reason"].startswith("out of memory on CPU")


def test_other_runtime_errors__are_not_reported_as_out_of_memory(settings, monkeypatch, tmp_path):
    def broken(*_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(trainer.Trainer, "train_step", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        train.run(settings(*SMALL), tmp_path)


def test_error_of_a_run__is_on_stderr_and_in_the_log_file(tmp_path):
    words = [*SMALL, "optim=sgd", "optim.lr=1e30", "schedule=constant", "trainer.clip_grad=null"]
    ended = forked.run([ROOT / "train.py", *words, f"hydra.run.dir={tmp_path}"], ROOT)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 1 and line.startswith("error: loss is "), ended
    assert "error: " not in ended.stdout and line in (tmp_path / "train.log").read_text()
