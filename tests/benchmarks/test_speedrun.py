"""The speed run: its clock, its undone warm-up, its rules and its table."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from expecting import error

from vitkernels import parallel, runtime
from vitkernels.benchmarks import speedrun
from vitkernels.benchmarks.tables import speedrun as page
from vitkernels.config.compose import compose
from vitkernels.training import setup

SMALL = [
    "runtime=cpu", "attn=sdpa", "model.img_size=16", "+model.kwargs.depth=1", "+model.kwargs.embed_dim=24",
    "+model.kwargs.num_heads=1", "data.batch_size=16", "data.items=999", "data.val_items=16",
    "trainer.max_steps=4", "ema.decay=0.9",
]  # fmt: skip


def test_measure__stops_at_the_evaluation_that_reaches_the_target():
    row = speedrun.measure(SMALL, [3, 4], target=0.0, eval_every=2)
    assert [(one["seed"], one["steps"], one["reached"]) for one in row["attempts"]] == [(3, 2, True), (4, 2, True)]
    assert row["reached"] and row["mean_seconds"] > 0 and row["val_items"] == 16


def test_attempt__closes_its_feeds(monkeypatch):
    opened = []  # keeps them from being closed when nothing refers to them
    batches = speedrun._batches
    monkeypatch.setattr(speedrun, "_batches", lambda trainer: opened.append(batches(trainer)) or opened[-1])
    speedrun.measure(SMALL, [0], target=0.0, eval_every=2)
    assert [one.gi_frame for one in opened] == [None, None], "of the warm-up and of training"


def test_measure__ends_with_the_run_if_the_target_is_not_reached():
    row = speedrun.measure(SMALL, [0], target=100.1, eval_every=3)
    assert not row["reached"] and row["attempts"][0]["steps"] == 4


@pytest.mark.parametrize("words", [[], ["optim.opt=lookahead_lamb"]])
def test_warmup__is_undone(words):
    """LAMB and Lookahead count their steps in the parameter groups."""
    cfg = compose(["experiment=speedrun", *SMALL, *words])
    weights = []
    for warm in (False, True):
        with parallel.create("none", runtime.create("cpu")) as strategy:
            trainer, _ = setup.trainer_from_config(cfg, strategy)
            if warm:
                speedrun._undone_warmup(trainer, cfg.seed)
            batches = speedrun._batches(trainer)
            for _ in range(2):
                trainer.train_step(batches)
            weights.append([*trainer.model.parameters(), *trainer.ema.module.parameters()])
    for fresh, warmed in zip(*weights, strict=True):
        torch.testing.assert_close(warmed, fresh, rtol=0, atol=0)


@pytest.mark.parametrize("word", ["data=digits", "model.img_size=null"])
def test_task__is_fixed(word):
    with error("speedrun.task"):
        speedrun.measure([word], [0])


def test_records__are_faster_than_all_before_them():
    def row(seconds, reached=True, device="H200"):
        attempts = [{"seconds": seconds, "steps": 100}]
        return {
            "image_size": 64, "target": 95.0, "val_items": 8192, "device": device, "reached": reached,
            "mean_seconds": seconds, "attempts": attempts, "images_per_step": 512, "settings": ["ops=fused"],
            "date": "2026-11-24", "commit": "abc", "note": "",
        }  # fmt: skip

    rows = [row(50.0), row(60.0), row(40.0), row(10.0, reached=False), row(99.0, device="CPU")]
    assert [one["mean_seconds"] for one in page.records(rows[:4])] == [50.0, 40.0]
    text = page.page(rows)
    assert text.index("| 40.00 |") < text.index("| 50.00 |") and "60.00" not in text and "`ops=fused`" in text
    assert text.count("## 95 % of 8192 images of 64 px") == 2
    assert "No run" in page.page([])


def test_script__records_only_runs_that_reach_the_target(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    script = importlib.import_module("speedrun")
    monkeypatch.delitem(sys.modules, "speedrun")

    path = tmp_path / "rows.jsonl"
    common = ["speedrun.py", *SMALL, "--seeds", "0", "--eval-every", "1", "--results", str(path)]
    monkeypatch.setattr(sys, "argv", [*common, "--target", "100.1"])
    assert script.main() == 1 and not path.exists()
    monkeypatch.setattr(sys, "argv", [*common, "--target", "0", "--note", "first"])
    assert script.main() == 0
    assert json.loads(path.read_text())["note"] == "first"
    monkeypatch.setattr(sys, "argv", [*common, "lr=3"])
    assert script.main() == 2 and "error:" in capsys.readouterr().err
