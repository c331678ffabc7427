"""Class folders of JPEG or PNG images: root/train/<class>/<image>, root/val/<class>/<image>.

Shapes: B rows, S image side.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from vitkernels.data.augment import Transform, eval_transform, train_transform
from vitkernels.data.checks import check_number, is_numbers, shown
from vitkernels.data.folder import Folder, check_headers, scan_splits
from vitkernels.data.loader import IGNORE, WHOLE, Data, DatasetLoader, Problem, Shard
from vitkernels.data.mixing import build_mixing
from vitkernels.data.randomness import Stream, seeded_globals
from vitkernels.errors import UsageError

log = logging.getLogger(__name__)

# The usual ones of models for ImageNet.
PREPROCESSING = {
    "mean": list(IMAGENET_DEFAULT_MEAN),
    "std": list(IMAGENET_DEFAULT_STD),
    "interpolation": "bicubic",
    "crop_pct": 0.9,
    "crop_mode": "center",
}


class FolderImages:
    """The images of one split as vitkernels.data.loader.Samples."""

    def __init__(self, folder: Folder, transform: Transform, *, image_size: int, seed: int):
        self.folder = folder
        self.transform = transform
        self.image_size = image_size
        self.seed = seed

    def __len__(self) -> int:
        return len(self.folder.images)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor | None, list[Problem]]:
        """(epoch, index) -> image (3, S, S), or None if the file cannot be read; and what is to be said about it."""
        epoch, index = key
        try:
            image, cautions = read_rgb(self.folder.image_path(index))
        except UnidentifiedImageError:
            return None, [Problem(index, "not an image in a format that Pillow knows", unreadable=True)]
        except Exception as error:  # a broken file can make a decoder raise almost anything
            return None, [Problem(index, f"{type(error).__name__}: {error}", unreadable=True)]
        with seeded_globals(self.seed, Stream.SAMPLE, epoch, index):
            pixels = self.transform(image)
        return pixels, [Problem(index, caution, unreadable=False) for caution in cautions]

    def load(self, ids: list[int], epoch: int) -> tuple[torch.Tensor, torch.Tensor, list[Problem]]:
        images = torch.zeros(len(ids), 3, self.image_size, self.image_size)
        targets = torch.full((len(ids),), IGNORE)
        problems = []
        for row, index in enumerate(ids):
            image, found = self[epoch, index]
            problems += found
            if image is not None:
                images[row] = image
                targets[row] = int(self.folder.targets[index])
        return images, targets, problems

    def describe(self, ids: list[int]) -> list[str]:
        return [self.folder.image_path(i) for i in ids]


def read_rgb(path: str) -> tuple[Image.Image, list[str]]:
    """Decode a file of any colour mode to 8-bit RGB; also what Pillow warned about. Raises what the decoder raises."""
    with warnings.catch_warnings(record=True) as caught, open(path, "rb") as file:
        warnings.simplefilter("ignore")  # of other code: what another thread warns of comes here too
        warnings.filterwarnings("always", module=r"PIL\.")
        image = Image.open(file)
        if image.mode.startswith("I;16"):  # Pillow would clip 16 bits to 8, which leaves most such images white
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode in ("I", "F"):
            raise ValueError(f"pixels of 32 bits (mode {image.mode}) have no known range: convert the file to 8 bits")
        return image.convert("RGB"), [str(warning.message) for warning in caught]


def build(
    *,
    image_size: int,
    in_chans: int,
    seed: int,
    batch_size: int,
    num_workers: int = 0,
    pin_memory: bool = False,
    train: bool = True,
    shard: Shard = WHOLE,
    root: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    interpolation: str | None = None,
    crop_pct: float | None = None,
    crop_mode: str | None = None,
    scale: Sequence[float] = (0.08, 1.0),
    ratio: Sequence[float] = (3 / 4, 4 / 3),
    hflip: float = 0.5,
    color_jitter: float | None = None,
    auto_augment: str | None = None,
    re_prob: float = 0.0,
    re_mode: str = "pixel",
    re_count: int = 1,
    mixup: Mapping[str, Any] | None = None,
    check_images: int | None = 20_000,
    small_images: str = "upscale",
    max_bad_share: float = 0.01,
) -> Data:
    """Images float32 (batch_size, 3, image_size, image_size); the classes are the folders' names in sorted order.

    train=False leaves out the training set: train/ need not exist. shard: the rows of each batch that
    this process loads. conf/data/imagefolder.yaml explains the other arguments; those of PREPROCESSING that are None
    have the values there. Raises UsageError, before any image is decoded, for a folder or values that cannot work.
    """
    if in_chans != 3:
        raise UsageError(
            f"in_chans={in_chans}: imagefolder decodes its images to RGB, so the model needs in_chans=3: "
            "another model=, or model.in_chans=3"
        )
    given = {"mean": mean, "std": std, "interpolation": interpolation, "crop_pct": crop_pct, "crop_mode": crop_mode}
    prepared = PREPROCESSING | {name: shown(value) for name, value in given.items() if value is not None}
    mean, std = prepared["mean"], prepared["std"]
    if not (is_numbers(mean, 3) and is_numbers(std, 3) and min(std) > 0):
        raise UsageError(
            f"data.mean={mean}, data.std={std}: expected three values each, red, green, blue, those of std above 0"
        )
    check_number("check_images", check_images, whole=True, null=True)
    check_number("max_bad_share", max_bad_share, 0, 1)
    of_evaluation = prepared | ({"interpolation": "bicubic"} if prepared["interpolation"] == "random" else {})
    transforms = {
        "train": train_transform(
            image_size,
            **{name: prepared[name] for name in ("mean", "std", "interpolation")},
            scale=scale,
            ratio=ratio,
            hflip=hflip,
            color_jitter=color_jitter,
            auto_augment=auto_augment,
            re_prob=re_prob,
            re_mode=re_mode,
            re_count=re_count,
        ),
        "val": eval_transform(image_size, **of_evaluation),
    }
    folders = scan_splits(root, ["train", "val"] if train else ["val"])
    classes = folders["val"].classes
    mixing = build_mixing(mixup, num_classes=len(classes), seed=seed, batch_size=batch_size)
    loaders = {}
    for split, folder in folders.items():
        check_headers(folder, image_size, check_images=check_images, small_images=small_images, log=log)
        loaders[split] = DatasetLoader(
            FolderImages(folder, transforms[split], image_size=image_size, seed=seed),
            batch_size=batch_size,
            seed=seed,
            training=split == "train",
            num_workers=num_workers,
            pin_memory=pin_memory,
            shard=shard,
            mixing=mixing if split == "train" else None,
            max_bad_share=max_bad_share,
            log=log,
        )
    return Data(loaders.get("train"), loaders["val"], len(classes), class_names=classes, preprocessing=of_evaluation)
