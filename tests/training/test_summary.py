"""The figures a run ends with, of a device whose peak is known and of several devices."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import train
from vitkernels import models
from vitkernels.parallel.base import Parallel
from vitkernels.runtime import Runtime
from vitkernels.training.summary import mfu


def test_mfu_is_the_models_products_over_what_the_chip_could_do_in_that_time():
    chip = SimpleNamespace(peak_flops=100e12)
    assert mfu(chip, flops=2e12, ms=40.0) == 0.5  # it could do 4e12
    assert mfu(chip, flops=2e12, ms=None) is None
    assert mfu(SimpleNamespace(peak_flops=None), flops=2e12, ms=40.0) is None


def train_flops_per_image() -> int:
    create = partial(models.create_model, "vit_digits", num_classes=4)
    facts = models.inspect_model(
        create, image_size=16, in_chans=1, batch_size=1, dtype=torch.float32, device_type="cpu"
    )
    return facts.train_flops_per_image


@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_is_counted_whole_and_its_mfu_by_device(devices, settings, monkeypatch, tmp_path):
    """A step of the same images on more devices is as much work, shared."""
    monkeypatch.setattr(Parallel, "devices", devices)
    monkeypatch.setattr(Runtime, "peak_flops", 1e12)
    small = ["data=fake", "data.num_classes=4", "data.batch_size=2", "runtime=cpu", "attn=sdpa"]
    small += [
        "trainer.max_steps=3",
        "trainer.warmup_steps=1",
        "trainer.eval_every=null",
        "checkpoints.every_epochs=null",
    ]
    train.run(settings(*small), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    work = summary["train_flops_per_step"]
    assert work == 2 * train_flops_per_image() and summary["batch_size"] == 2
    seconds = summary["step_time_ms"]["mean"] / 1e3
    assert summary["mfu"] == pytest.approx(work / devices / seconds / 1e12, rel=0.01)
