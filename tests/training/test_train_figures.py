"""The figures that a run reports, on a runtime whose clock the test controls."""

import json
import time
from functools import partial
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from small_runs import SMALL
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from vitkernels import attention, models
from vitkernels.parallel import Parallel
from vitkernels.runtime.base import Runtime
from vitkernels.training import result, trainer
from vitkernels.training.profiler import PROFILED_STEPS

STEP_MS, EVAL_MS, WAIT_MS, PEAK, HELD = 100.0, 50.0, 3.0, 1e10, 5 * 2**20
STEPS, WARMUP, IMAGES = 14, 2, 128  # 11 to an epoch


class Clocked(Runtime):
    """A runtime whose training steps take STEP_MS and evaluation batches EVAL_MS; each input arrives WAIT_MS late."""

    peak_flops = PEAK
    now = 0.0

    def feed(self, batches):
        for batch in super().feed(batches):
            time.sleep(WAIT_MS / 1e3)
            yield batch

    def end_step(self, *tensors, kind="train"):
        self.now += STEP_MS if kind == "train" else EVAL_MS

    def stamp(self):
        return self.now

    def elapsed_ms(self, start, end):
        return end - start

    def peak_memory_bytes(self):
        return HELD


def flops_of_an_image():
    sizes = {"embed_dim": 64, "num_heads": 2, "depth": 2}  # SMALL's
    build = partial(models.create_model, "vit_digits", num_classes=10, **sizes)
    facts = models.inspect_model(build, image_size=16, in_chans=1, batch_size=1, dtype=torch.float32, device_type="cpu")
    return facts.train_flops_per_image


def run(cfg, folder):
    train.run(cfg, folder, lambda name, precision: Clocked(precision))
    return json.loads((folder / ("summary.json" if cfg.mode == "train" else "eval.json")).read_text())


@pytest.mark.parametrize("devices", [1, 4])
def test_speed__counts_steps_only(settings, tmp_path, monkeypatch, devices):
    monkeypatch.setattr(Parallel, "devices", devices)
    monkeypatch.setattr(Parallel, "local_devices", 1)
    often = ["checkpoints.every_steps=3", "trainer.eval_every=1", f"data.batch_size={IMAGES}", "attn=sdpa"]
    summary = run(settings(*SMALL, *often, f"trainer.max_steps={STEPS}"), tmp_path)
    assert summary["step_time_ms"] == {
        **dict.fromkeys(("median", "p10", "p90", "mean"), STEP_MS),
        "n": STEPS - WARMUP,
    }
    assert summary["images_per_s"] == IMAGES / STEP_MS * 1e3
    flops = summary["train_flops_per_step"]
    assert flops == IMAGES * flops_of_an_image()
    assert summary["mfu"] == pytest.approx(flops / devices / (STEP_MS / 1e3) / PEAK, abs=1e-5)
    assert summary["peak_memory_bytes"] == HELD
    assert WAIT_MS <= summary["input_wait_ms"] < 10 * WAIT_MS
    board = EventAccumulator(str(tmp_path)).Reload()
    expected = {"step_ms": STEP_MS, "images_per_s": summary["images_per_s"], "mfu": summary["mfu"]}
    for name, value in {**{f"time/{k}": v for k, v in expected.items()}, "z_memory/peak_mib": HELD / 2**20}.items():
        values = [point.value for point in board.Scalars(name)]
        assert len(values) > 3 and values == pytest.approx([value] * len(values), rel=1e-3), name


def test_flops__are_those_of_all_devices(settings, tmp_path, monkeypatch):
    cfg = settings(*SMALL, "trainer.max_steps=3", "trainer.eval_every=null", "attn=sdpa")
    one = run(cfg, tmp_path / "one")["train_flops_per_step"]
    monkeypatch.setattr(Parallel, "devices", 4)
    assert run(cfg, tmp_path / "four")["train_flops_per_step"] == one, "of the same images"


def test_profiled_steps__are_not_timed(settings, tmp_path):
    steps = WARMUP + PROFILED_STEPS + 5
    cfg = settings(*SMALL, "trainer.profile=true", f"trainer.max_steps={steps}", "trainer.eval_every=null", "attn=sdpa")
    assert run(cfg, tmp_path)["step_time_ms"]["n"] == 5


def test_evaluation_speed__excludes_input_wait(settings, tmp_path):
    run(settings(*SMALL, "trainer.max_steps=3", "attn=sdpa"), tmp_path / "run")
    weights = f"checkpoint={tmp_path / 'run' / 'checkpoints' / 'best'}"
    result = run(settings(*SMALL, "mode=eval", f"data.batch_size={IMAGES}", weights), tmp_path / "eval")
    batches = -(-360 // IMAGES)
    assert result["images_per_s"] == pytest.approx((360 - IMAGES) / ((batches - 1) * EVAL_MS / 1e3))


def test_train_loss__is_the_mean_of_20_steps_however_logged_and_resumed(settings, losses, tmp_path):
    for name, log_every in (("often", 7), ("once", 1000)):
        more = [f"trainer.log_every={log_every}", "trainer.eval_every=null", "attn=sdpa"]
        cfg = settings(*SMALL, *more, "trainer.max_steps=23")
        summary = run(cfg, tmp_path / name)
        last = list(losses(tmp_path / name).values())[-20:]
        assert summary["train_loss"] == pytest.approx(fmean(last))
    begun = settings(*SMALL, "trainer.max_steps=8", "attn=sdpa")
    run(begun, tmp_path / "longer")
    longer = settings(*SMALL, "trainer.max_steps=12", "attn=sdpa", "resume=auto")
    assert run(longer, tmp_path / "longer")["train_loss"] == pytest.approx(fmean(losses(tmp_path / "longer").values()))


def test_parameters_without_gradient__are_counted_and_logged(settings, tmp_path, monkeypatch, caplog):
    backend = type(attention.get("sdpa"))
    attend = backend.run
    monkeypatch.setattr(backend, "run", lambda *args, **kwargs: attend(*args, **kwargs).detach())
    cfg = settings(*SMALL, "trainer.max_steps=2", "trainer.eval_every=null", "attn=sdpa")
    assert run(cfg, tmp_path)["parameters_without_gradient"] == 8  # the norm before and qkv, in each of two blocks
    assert "8 parameters received no gradient" in caplog.text and "blocks.0.norm1.weight" in caplog.text
    assert "has no backward pass" in caplog.text


@pytest.mark.parametrize(("cap", "steps"), [("0.1", 1), ("0.5", 5), ("null", 9)])
def test_warmup__is_capped_at_its_share_of_the_run(cap, steps, settings, tmp_path):
    short = [*SMALL, "trainer.max_steps=10", "trainer.eval_every=null", "checkpoints.every_epochs=null", "attn=sdpa"]
    run(settings(*short, "schedule.warmup_epochs=0.1", f"schedule.warmup_cap={cap}"), tmp_path)  # 9 of 89 steps
    rates = [json.loads(line)["lr"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rates[1] == pytest.approx(1e-6 + (1e-3 - 1e-6) / steps, rel=0.03)  # after one step the cosine has begun


def test_seconds__add_up_over_resumes(settings, tmp_path, monkeypatch):
    """The first process starts at 1000 s and ends at 1500 s, the second takes 7 s."""
    for begin, end, steps in ((1000.0, 1500.0, 4), (9000.0, 9007.0, 8)):
        monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda begin=begin: begin))
        for module in (trainer, result):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda end=end: end))
        cfg = settings(*SMALL, f"trainer.max_steps={steps}", "trainer.eval_every=null", "attn=sdpa", "resume=auto")
        summary = run(cfg, tmp_path)
    assert summary["seconds"] == 507.0
