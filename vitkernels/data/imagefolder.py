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
from vitkernels.data.checks import as_list, check_number, is_numbers
from vitkernels.data.contract import IGNORE, Data
from vitkernels.data.folder import Folder, check_headers, scan_splits
from vitkernels.data.input_spec import InputSpec, data_set
from vitkernels.data.randomness import Stream, seeded_globals
from vitkernels.data.samples import SampleProblem
from vitkernels.errors import UsageError

log = logging.getLogger(__name__)

# What most models for ImageNet use.
PREPROCESSING = {
    "mean": list(IMAGENET_DEFAULT_MEAN),
    "std": list(IMAGENET_DEFAULT_STD),
    "interpolation": "bicubic",
    "crop_pct": 0.9,
    "crop_mode": "center",
}


class FolderImages:
    """The images of one split, as Samples."""

    def __init__(self, folder: Folder, transform: Transform, *, image_size: int, seed: int):
        self.folder = folder
        self.transform = transform
        self.image_size = image_size
        self.seed = seed

    def __len__(self) -> int:
        return len(self.folder.images)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor | None, list[SampleProblem]]:
        """Return image (3, S, S) of (epoch, index), or None if the file cannot be read, and the problems found."""
        epoch, index = key
        try:
            image, cautions = read_rgb(self.folder.image_path(index))
        except UnidentifiedImageError:
            return None, [SampleProblem(index, "not an image format that Pillow knows", unreadable=True)]
        except Exception as error:  # a broken file can make a decoder raise almost anything
            return None, [SampleProblem(index, f"{type(error).__name__}: {error}", unreadable=True)]
        with seeded_globals(self.seed, Stream.SAMPLE, epoch, index):
            pixels = self.transform(image)
        return pixels, [SampleProblem(index, caution, unreadable=False) for caution in cautions]

    def load(self, ids: list[int], epoch: int) -> tuple[torch.Tensor, torch.Tensor, list[SampleProblem]]:
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
    """Decode a file of any color mode to 8-bit RGB; return it and Pillow's warnings. Raises what the decoder raises."""
    with warnings.catch_warnings(record=True) as caught, open(path, "rb") as file:
        warnings.simplefilter("ignore")  # warnings of other threads, which are recorded here too
        warnings.filterwarnings("always", module=r"PIL\.")
        image: Image.Image = Image.open(file)
        if image.mode.startswith("I;16"):  # Pillow would clip 16 bits to 8, turning most such images white
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode in ("I", "F"):
            raise ValueError(f"32-bit pixels (mode {image.mode}) have no known range: convert the file to 8 bits")
        return image.convert("RGB"), [str(warning.message) for warning in caught]


@data_set
def build(
    spec: InputSpec,
    *,
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
    """Return images float32 (B, 3, image_size, image_size); classes are the folders' names in sorted order.

    With spec.train=False, train/ need not exist. conf/data/imagefolder.yaml explains the arguments; those of
    PREPROCESSING that are None take its values. Raises UsageError, before any image is decoded, for an unusable folder
    or invalid values.
    """
    check_number("check_images", check_images, integer=True, null=True)
    check_number("max_bad_share", max_bad_share, 0, 1)
    given = {"mean": mean, "std": std, "interpolation": interpolation, "crop_pct": crop_pct, "crop_mode": crop_mode}
    prepared, prepared_eval = _preprocessing(spec.in_chans, given)
    augmentation: dict[str, Any] = {"scale": scale, "ratio": ratio, "hflip": hflip, "color_jitter": color_jitter}
    augmentation |= {"auto_augment": auto_augment, "re_prob": re_prob, "re_mode": re_mode, "re_count": re_count}
    augmentation |= {name: prepared[name] for name in ("mean", "std", "interpolation")}
    transforms = {
        "train": train_transform(spec.image_size, **augmentation),
        "val": eval_transform(spec.image_size, **prepared_eval),
    }
    folders = scan_splits(root, ["train", "val"] if spec.train else ["val"])
    classes = folders["val"].classes
    mixing = spec.mixing(mixup, num_classes=len(classes))
    loaders = {}
    for split, folder in folders.items():
        check_headers(folder, spec.image_size, check_images=check_images, small_images=small_images, log=log)
        samples = FolderImages(folder, transforms[split], image_size=spec.image_size, seed=spec.seed)
        training = split == "train"
        loaders[split] = spec.loader(
            samples, training=training, mixing=mixing if training else None, max_bad_share=max_bad_share, log=log
        )
    return Data(loaders.get("train"), loaders["val"], len(classes), class_names=classes, preprocessing=prepared_eval)


def _preprocessing(in_chans: int, given: dict[str, Any]) -> tuple[dict, dict]:
    """Return the preprocessing of training and of evaluation, with defaults for what is None. UsageError if invalid."""
    if in_chans != 3:
        raise UsageError(
            f"in_chans={in_chans}: imagefolder decodes images to RGB, so the model needs in_chans=3",
            code="data.in_chans",
            in_chans=in_chans,
        )
    own = {name: as_list(value) for name, value in given.items() if value is not None}
    prepared: dict[str, Any] = PREPROCESSING | own
    mean, std = prepared["mean"], prepared["std"]
    if not (is_numbers(mean, 3) and is_numbers(std, 3) and min(std) > 0):
        raise UsageError(
            f"mean={mean}, std={std}: expected three values each (red, green, blue), with std above 0",
            code="data.value",
            setting="mean, std",
            value=[mean, std],
        )
    return prepared, prepared | ({"interpolation": "bicubic"} if prepared["interpolation"] == "random" else {})
