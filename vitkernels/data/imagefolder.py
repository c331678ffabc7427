"""Class folders of JPEG or PNG images: root/train/<class>/<image>, root/val/<class>/<image>.

Shapes: B rows, S image side.
"""

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from vitkernels.data.augment import EvalPreprocessing, PreparedImage, TrainAugmentation
from vitkernels.data.checks import as_list, check_number, is_numbers
from vitkernels.data.contract import IGNORE, Data, RawBatch
from vitkernels.data.decode import Decoder, ImageFile, choose_decoder
from vitkernels.data.device_transforms import DeviceTransforms
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


Prepare = Callable[[ImageFile, Decoder], PreparedImage]


class FolderImages:
    """The images of one split, as Samples.

    prepare: what a worker does with an image; it may draw from the global generators.
    """

    def __init__(
        self,
        folder: Folder,
        prepare: Prepare,
        decoder: Decoder,
        device_transforms: DeviceTransforms,
        *,
        seed: int,
    ):
        self.folder = folder
        self.prepare = prepare
        self.decoder = decoder
        self.device_transforms = device_transforms
        self.seed = seed
        self._blank = self._prepare_blank()

    def __len__(self) -> int:
        return len(self.folder.images)

    def __getitem__(self, key: tuple[int, int]) -> tuple[PreparedImage | None, list[SampleProblem]]:
        """Return the image of (epoch, index), or None if the file cannot be read, and the problems found."""
        epoch, index = key
        try:
            with open(self.folder.image_path(index), "rb") as file:
                image = self.decoder.open(file.read())
            with seeded_globals(self.seed, Stream.SAMPLE, epoch, index):
                prepared = self.prepare(image, self.decoder)
        except UnidentifiedImageError:
            return None, [SampleProblem(index, "not an image format that Pillow knows", unreadable=True)]
        except Exception as error:  # a broken file can make a decoder raise almost anything
            return None, [SampleProblem(index, f"{type(error).__name__}: {error}", unreadable=True)]
        problems = [SampleProblem(index, warning, unreadable=False) for warning in image.warnings]
        if image.fallback is not None:
            problems.append(SampleProblem(index, image.fallback, unreadable=False, fallback=True))
        return prepared, problems

    def load(self, ids: list[int], epoch: int) -> tuple[RawBatch, torch.Tensor, list[SampleProblem]]:
        size = self._blank.pixels.shape[-1]
        pixels = torch.zeros(len(ids), 3, size, size, dtype=torch.uint8)
        draws = {name: torch.stack([draw] * len(ids)) for name, draw in self._blank.draws.items()}
        targets = torch.full((len(ids),), IGNORE)
        problems = []
        for row, index in enumerate(ids):
            image, found = self[epoch, index]
            problems += found
            if image is None:
                continue
            pixels[row] = image.pixels
            for name, draw in image.draws.items():
                draws[name][row] = draw
            targets[row] = int(self.folder.targets[index])
        return {"pixels": pixels, **draws}, targets, problems

    def describe(self, ids: list[int]) -> list[str]:
        return [self.folder.image_path(i) for i in ids]

    def _prepare_blank(self) -> PreparedImage:
        """Prepare a black image, for the draws' names and shapes."""
        file = io.BytesIO()
        Image.new("RGB", (64, 64)).save(file, "png")
        with seeded_globals(self.seed, Stream.SAMPLE):
            return self.prepare(self.decoder.open(file.getvalue()), self.decoder)


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
    decode: str = "auto",
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
    augmentation |= {name: prepared[name] for name in ("mean", "interpolation")}
    resize = {name: value for name, value in prepared_eval.items() if name != "std"}
    decoder = choose_decoder(decode)
    prepare: dict[str, Prepare] = {
        "train": TrainAugmentation(spec.image_size, **augmentation),
        "val": EvalPreprocessing(spec.image_size, **resize),
    }
    finish = DeviceTransforms(tuple(prepared["mean"]), tuple(prepared["std"]), noise=re_mode == "pixel")
    folders = scan_splits(root, ["train", "val"] if spec.train else ["val"])
    classes = folders["val"].classes
    mixing = spec.mixing(mixup, num_classes=len(classes))
    loaders = {}
    for split, folder in folders.items():
        check_headers(folder, spec.image_size, check_images=check_images, small_images=small_images, log=log)
        samples = FolderImages(folder, prepare[split], decoder, finish, seed=spec.seed)
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
