"""Small image folders and comparisons shared by several tests."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image


def write_noise(path: Path, size: tuple[int, int], seed: int) -> None:
    """Write an image of noise, so that no two images or crops are equal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def make_root(tmp_path):
    """make_root(train=..., val=...) creates a folder with that many images in each of the classes a, b and c."""

    def make(train: int = 7, val: int = 3, classes: str = "abc", size: tuple[int, int] = (40, 36)) -> Path:
        root = tmp_path / "images"
        for split, count in (("train", train), ("val", val)):
            for c, name in enumerate(classes):
                for i in range(count):
                    suffix = ("jpg", "png")[i % 2]
                    write_noise(root / split / name / f"{i}.{suffix}", size, seed=c * 100 + i)
        return root

    return make


@pytest.fixture
def same():
    """same(batches, others): whether lengths and all tensors are equal bit for bit."""

    def compare(batches, others) -> bool:
        batches, others = list(batches), list(others)
        return len(batches) == len(others) and all(
            torch.equal(a, b)
            for one, other in zip(batches, others, strict=True)
            for a, b in zip(one, other, strict=True)
        )

    return compare


@pytest.fixture
def rng_state():
    """rng_state() returns a comparable value that changes with any draw from the global generators."""

    def state():
        name, keys, position, *gauss = np.random.get_state()
        return random.getstate(), (name, keys.tobytes(), position, *gauss), torch.get_rng_state().numpy().tobytes()

    return state
