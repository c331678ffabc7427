"""A run whose attention cannot fit into memory ends before its model is built."""

import pytest
import torch
from expecting import error
from small_runs import SMALL

import train
from vitkernels.attention import Problem
from vitkernels.models import ModelFacts
from vitkernels.runtime import Runtime, machine
from vitkernels.training import setup
from vitkernels.training.memory_check import check_memory


def test_train__refuses_images_of_too_many_tokens_before_it_builds_the_model(settings, tmp_path, monkeypatch):
    """At 16384 px and patches of 4 px, an image is 16.8 M tokens, and its position embedding alone takes 4 GiB."""
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: 2**40)
    monkeypatch.setattr(Runtime, "total_memory_bytes", lambda self: 2**38)
    build, devices = setup.models.create_model, set()

    def watched(*args, **kwargs):
        model = build(*args, **kwargs)
        devices.update(parameter.device.type for parameter in model.parameters())
        return model

    monkeypatch.setattr(setup.models, "create_model", watched)
    tokens = 4096**2
    least = 4 * tokens * 64 * 4 * 2 * 16  # q, k, v, output; width 64 in 4 bytes; 2 layers; a batch of 16
    with error("run.memory", image_size=16384, tokens=tokens, least_bytes=least, total_bytes=2**38) as caught:
        train.run(settings(*SMALL, "model.img_size=16384", "data=digits"), tmp_path)
    assert devices == {"meta"}
    message = str(caught.value)
    assert "16777216 tokens" in message and "512.0 GiB" in message and "data.batch_size to 8" in message


FACTS = ModelFacts(
    parameters=0,
    train_flops_per_image=0,
    attention=(
        Problem(batch=8, heads=3, q_tokens=50, kv_tokens=50, head_dim=16, dtype=torch.bfloat16, device_type="cpu"),
        Problem(batch=2, heads=3, q_tokens=1, kv_tokens=200, head_dim=16, dtype=torch.bfloat16, device_type="cpu"),
    ),
    attention_calls=(5, 1),
)
WINDOWS, POOLING = 8 * 3 * 4 * 50 * 16 * 2, 2 * 3 * 2 * 201 * 16 * 2  # bytes of each call's q, k, v and output


@pytest.mark.parametrize(
    ("training", "keeps_scores", "least"),
    [
        (True, False, 5 * WINDOWS + POOLING),
        (False, False, WINDOWS),
        (True, True, 5 * (WINDOWS + 8 * 3 * 50 * 50 * 4) + POOLING + 2 * 3 * 200 * 4),
    ],
    ids=["training", "evaluation", "scores"],
)
def test_check_memory__counts_what_attention_keeps(training, keeps_scores, least):
    class Device(Runtime):
        def total_memory_bytes(self):
            return self.total

    device, options = Device(), {"image_size": 9, "batch_size": 2, "training": training, "keeps_scores": keeps_scores}
    for enough in (None, least):
        device.total = enough
        check_memory(FACTS, device, **options)
    device.total = least - 1
    with error("run.memory", tokens=200, least_bytes=least, total_bytes=least - 1):
        check_memory(FACTS, device, **options)


def test_host_memory__is_the_least_of_the_machine_and_its_control_group(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal:       1000 kB\nMemFree: 9 kB\nSwapTotal:       24 kB\n")
    limits = [tmp_path / "memory.max", tmp_path / "absent"]
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    monkeypatch.setattr(machine, "_MEMORY_LIMITS", limits)
    for limit, expected in (("max", 1024 * 1024), ("4096", 4096 + 24 * 1024), ("9" * 18, 1024 * 1024)):
        limits[0].write_text(f"{limit}\n")
        assert machine.host_memory_bytes() == expected
    (tmp_path / "meminfo").unlink()
    assert machine.host_memory_bytes() is None
