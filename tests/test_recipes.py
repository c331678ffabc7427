"""Every recipe in conf/experiment trains for three steps, with a small model and few images, and names its source."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import train

CONF = Path(__file__).resolve().parents[1] / "conf/experiment"
RECIPES = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem not in ("rise_of_pallas", "speedrun"))


@pytest.fixture
def images(tmp_path):
    """The folder of a data set with two classes of noise."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 2)):
        for name in "ab":
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = draw.integers(0, 256, (64, 64, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return tmp_path / "images"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe__trains_three_steps(recipe, images, settings, tmp_path, losses):
    side = 56 if recipe in ("dinov2_finetune", "eva02_finetune") else 64
    small = [f"model.img_size={side}", "model.pretrained=false", "++model.kwargs.depth=2"]
    short = ["trainer.max_epochs=1", "trainer.max_steps=3", "trainer.accum_steps=2", "trainer.log_every=1"]
    if "teacher:" in (CONF / f"{recipe}.yaml").read_text():
        torch.save(timm.create_model("resnet10t", num_classes=2).state_dict(), tmp_path / "teacher.pt")
        small += ["distill.teacher=resnet10t", f"distill.checkpoint={tmp_path / 'teacher.pt'}"]
    machine = ["runtime=cpu", "data.batch_size=4", "data.num_workers=0", f"data.root={images}"]
    run = tmp_path / "run"
    train.run(settings(f"experiment={recipe}", *small, *short, *machine), run)
    found = losses(run)
    assert sorted(found) == [1, 2, 3] and all(math.isfinite(loss) for loss in found.values())
    assert json.loads((run / "summary.json").read_text())["status"] == "done"


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe__header_names_source_accuracy_cost_and_whether_it_was_run(recipe):
    text = (CONF / f"{recipe}.yaml").read_text().split("defaults:")[0]
    assert re.search(r"arXiv:\d{4}\.\d{5}", text)
    assert f"experiment={recipe} " in text
    assert "Expected top-1" in text
    assert re.search(r"Cost: |Step time: ", text)
    assert re.search(r"[Nn]ever (run|trained to the end) here", text)


# Figures that the sources state, against what the settings work out to on ImageNet-1k (1,281,167 images).
STEPS = {"vit_s16": 1024, "deit3_base": 2048, "deit3_base_224": 512, "dinov2_finetune": 512, "siglip_finetune": 2048}
STEPS |= {"eva02_finetune": 1024, "deit_small_distilled": 1024}


@pytest.mark.parametrize(("recipe", "images_per_step"), [*STEPS.items(), ("augreg_finetune", 512)])
def test_recipe__has_the_batch_of_its_source(recipe, images_per_step, settings):
    cfg = settings(f"experiment={recipe}", "data.root=somewhere")
    assert cfg.data.batch_size * cfg.trainer.accum_steps == images_per_step


def test_vit_s16__warms_up_for_ten_thousand_steps(settings):
    cfg = settings("experiment=vit_s16", "data.root=somewhere")
    steps = cfg.schedule.warmup_epochs * (1_281_167 // 1024)
    assert steps == pytest.approx(10_000, rel=1e-3)
    assert cfg.schedule.warmup_epochs < cfg.schedule.warmup_cap * cfg.trainer.max_epochs


def test_augreg_finetune__warms_up_for_five_hundred_steps(settings):
    cfg = settings("experiment=augreg_finetune", "data.root=somewhere")
    assert cfg.schedule.warmup_epochs * (1_281_167 // 512) == pytest.approx(500, rel=1e-2)
