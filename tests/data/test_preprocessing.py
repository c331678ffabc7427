"""Images are prepared as the weights were trained: by timm's record of them, or by this project's own."""

import json

import pytest
import timm
import torch
from finished_batches import finished_epoch
from PIL import Image
from safetensors.torch import load_file
from timm.data import create_transform, resolve_data_config
from torchvision.datasets import ImageFolder

import train
from vitkernels import models
from vitkernels.data import imagefolder

# ImageNet's means; 0.5; CLIP's, both sides squashed; another interpolation.
NAMES = ["deit_small_patch16_224", "vit_base_patch16_224", "vit_base_patch16_clip_384.openai_ft_in12k_in1k"]
NAMES += ["vit_base_patch16_224_miil.in21k"]


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_images__equal_those_of_timm(name, make_root):
    root, (size, _) = make_root(size=(300, 200)), models.input_spec(name)
    data = imagefolder.build(
        root=str(root),
        image_size=size,
        in_chans=3,
        seed=0,
        batch_size=3,
        train=False,
        decode="pillow",
        **models.preprocessing(name),
    )
    cfg = timm.get_pretrained_cfg(name).to_dict()
    transform = create_transform(**resolve_data_config(pretrained_cfg=cfg), is_training=False)
    images, _ = next(finished_epoch(data.val, 0))
    for image, path in zip(images, data.val.describe([0, 1, 2]), strict=True):
        assert torch.equal(image, transform(Image.open(path)))


def test_preprocessing__differs_between_the_tested_models():
    assert len({json.dumps(models.preprocessing(name)) for name in NAMES}) == len(NAMES)
    assert models.preprocessing("vit_b16_256") == {}


SMALL = ["runtime=cpu", "attn=sdpa", "data=imagefolder", "data.batch_size=4", "data.num_workers=0", "model.img_size=32"]
SMALL += ["model.name=vit_tiny_patch16_224", "+model.kwargs.embed_dim=48", "+model.kwargs.depth=1"]


def loss_in_timm(folder):
    """Return the loss of the run's weights and images by timm and torchvision alone."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, embed_dim=48, depth=1)
    model.load_state_dict(load_file(folder / "run/model.safetensors"))
    transform = create_transform(**json.loads((folder / "run/preprocessing.json").read_text()))
    data = ImageFolder(folder / "images/val", transform)
    images, targets = zip(*data, strict=True)
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model.eval()(torch.stack(images)), torch.tensor(targets)).item()


def test_evaluation__prepares_images_as_training_did_and_logs_differences(make_root, settings, tmp_path, caplog):
    caplog.set_level("INFO", "vitkernels")
    cfg = [*SMALL, f"data.root={make_root()}"]
    ours = ["data.mean=[0.1,0.2,0.3]", "data.crop_pct=1.0", "data.interpolation=random", "trainer.max_steps=3"]
    train.run(settings(*cfg, *ours), tmp_path / "run")
    trained = json.loads((tmp_path / "run/preprocessing.json").read_text())
    timms = models.preprocessing("vit_tiny_patch16_224") | {"input_size": [3, 32, 32]}
    assert trained == timms | {"mean": [0.1, 0.2, 0.3], "crop_pct": 1.0} and timms["std"] == [0.5] * 3
    logged = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    (loss,) = [entry["val_loss"] for entry in logged if "val_loss" in entry]
    assert loss == pytest.approx(loss_in_timm(tmp_path), rel=1e-5)
    (tmp_path / "run/model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    for number, weights in enumerate(("run/checkpoints/best", "elsewhere.safetensors")):
        evaluation = [*cfg, "mode=eval", f"checkpoint={tmp_path / weights}"]
        train.run(settings(*evaluation), tmp_path / f"as trained {number}")
        found = json.loads((tmp_path / f"as trained {number}/eval.json").read_text())
        assert found["loss"] == pytest.approx(loss, rel=1e-6) and "prepared differently" not in caplog.text
        assert found["preprocessing"]["mean"] == [0.1, 0.2, 0.3]
        train.run(settings(*evaluation, "data.mean=[0.5,0.5,0.5]"), tmp_path / f"otherwise {number}")
        assert json.loads((tmp_path / f"otherwise {number}/eval.json").read_text())["loss"] != found["loss"]
        difference = "data.mean was [0.1, 0.2, 0.3] and is now [0.5, 0.5, 0.5]"
        assert "prepared differently" in caplog.text and difference in caplog.text
        caplog.clear()
    # Training that starts from these weights prepares images equally.
    train.run(settings(*cfg, f"checkpoint={tmp_path / 'run/checkpoints/best'}", "trainer.max_steps=1"), tmp_path / "on")
    assert json.loads((tmp_path / "on/preprocessing.json").read_text()) == trained
