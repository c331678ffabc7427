"""A trained run, and image files to use it on."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image

SMALL = ["runtime=cpu", "compile=false", "data.batch_size=16", "trainer.warmup_steps=1", "+model.kwargs.embed_dim=32"]
SMALL += ["+model.kwargs.num_heads=1", "+model.kwargs.depth=1"]


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """trained_run(*overrides) -> the folder of a run with these settings, each trained once."""
    import train
    from vitkernels.config.compose import compose

    made = {}

    def folder(*overrides):
        if overrides not in made:
            made[overrides] = tmp_path_factory.mktemp("run")
            plain = compose([*SMALL, *overrides]).to_dict()
            from omegaconf import OmegaConf

            train.run(OmegaConf.create(plain), made[overrides])
        return made[overrides]

    return folder


@pytest.fixture(scope="session")
def digit_files(tmp_path_factory):
    """The held-out digits as 8 × 8 PNG files in a folder; `targets` by file."""
    from vitkernels.data import digits

    folder, targets = tmp_path_factory.mktemp("digits"), {}
    data = digits.build(image_size=16, in_chans=1, seed=0, batch_size=32, train=False)
    samples = data.val._batches.samples
    for i in range(len(samples)):
        file = folder / f"{i:03d}.png"
        Image.fromarray((samples.pixels[i, 0] * 255).round().to(torch.uint8).numpy()).save(file)
        targets[str(file)] = str(int(samples.targets[i]))
    return SimpleNamespace(folder=folder, targets=targets)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    """An image folder with six classes of RGB images."""
    root = tmp_path_factory.mktemp("images")
    colours = {"blue": (20, 40, 200), "gray": (120, 120, 120), "green": (20, 180, 40), "pink": (250, 150, 200)}
    colours |= {"red": (200, 20, 20), "white": (240, 240, 240)}
    for split, count in (("train", 8), ("val", 4)):
        for name, colour in colours.items():
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                image = Image.new("RGB", (30 + 2 * i, 24), tuple(max(0, c - 5 * i) for c in colour))
                image.save(root / split / name / f"{i}.png")
    return root
