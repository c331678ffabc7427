"""imagefolder's transforms: they draw timm's augmentations, and the worker applies those that the device does not.

A worker decodes, crops and resizes. `DeviceTransforms` flips, jitters colors, normalizes and erases on the device, by
the draws that come with the image. On an NVIDIA GPU, it also applies the operations of RandAugment, AutoAugment and
3-Augment; elsewhere, the worker does. AugMix, which only timm implements, always runs in the worker.

Shapes: S image side, N boxes.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import AugmentOp
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision.transforms import ColorJitter, RandomHorizontalFlip

from vitkernels.data.augment_operations import OperationDraws, kept_bits
from vitkernels.data.checks import as_list, check_number, check_range, is_numbers, value_error
from vitkernels.data.decode import Decoder, ImageFile
from vitkernels.data.decode.contract import REDUCTIONS
from vitkernels.data.decode.gpu import EncodedJpeg
from vitkernels.data.device_crops import LARGEST, DeviceCrop
from vitkernels.data.geometry import TORCH_MODES, Crop, center, crop_and_resize
from vitkernels.errors import UsageError, unknown_name

_SECTIONS = {"rand": ("m", "n", "p", "mstd", "mmax", "inc"), "augmix": ("m", "w", "d", "a", "b", "mstd")}  # timm's
CROP_MODES = ("center", "squash", "border")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")


class PreparedImage(NamedTuple):
    """One sample as a worker prepares it.

    pixels: uint8 (3, S, S), or the crop from which the device computes them.
    draws: the random numbers that DeviceTransforms applies; the same names and shapes for each sample of a split.
    """

    pixels: torch.Tensor | DeviceCrop
    draws: dict[str, torch.Tensor]


class DrawnImage(NamedTuple):
    """One sample before it is decoded: a worker draws for several samples at once, and then decodes them.

    make_pixels: returns the pixels of a PreparedImage, and draws nothing.
    draws: those of a PreparedImage.
    """

    make_pixels: Callable[[], torch.Tensor | DeviceCrop]
    draws: dict[str, torch.Tensor]

    def prepared(self) -> PreparedImage:
        return PreparedImage(self.make_pixels(), self.draws)


def _resized(
    image: ImageFile, decoder: Decoder, crop: Crop, size: tuple[int, int], interpolation: str, side: int
) -> torch.Tensor | DeviceCrop:
    """Return the crop of an image, resized to uint8 (3, height, width), or the DeviceCrop of it.

    side: that of the center square of the resized image, which is the only part that is used.

    A worker decodes images that are reduced by 8 or more: libjpeg then skips most of the work, which nvJPEG cannot.
    """
    reduction = crop.reduction(*size)
    if isinstance(image, EncodedJpeg):
        if reduction < REDUCTIONS[-1]:
            return DeviceCrop(image.data, image.orientation, image.size, crop, *size, interpolation)
        encoded = image
        image = decoder.open_in_worker(image.data, "JPEG much larger than the model's images")
        encoded.fallback, encoded.warnings, decoder = image.fallback, image.warnings, decoder.in_worker
    needed = crop.needed(*size, side)
    passes_on = decoder.passes_on_pixels and needed.height * needed.width <= LARGEST * side**2
    reduction = 1 if passes_on else reduction
    part = needed if passes_on else crop
    rows = part.top + part.height
    decoded = decoder.decode(image, reduction, rows)
    # An icon's header, for one, states the size of its slot, and the image in it may have another one.
    is_full_size = reduction == 1 and len(decoded) >= rows and decoded.shape[1] == image.size[0]
    if passes_on and is_full_size:
        return DeviceCrop.of_pixels(decoded, needed, crop, size, interpolation)
    if not is_full_size:
        crop = crop.reduced(image.size, decoded)
    return crop_and_resize(decoded, crop, *size, interpolation, decoder.is_reference)


class TrainAugmentation:
    """Random resized crop, flip, RandAugment or color jitter, and random erasing, as timm.data.create_transform draws.

    augment_on_device: whether DeviceTransforms can apply the operations of RandAugment, AutoAugment and 3-Augment.
    Draws from the global generators. Raises UsageError for invalid values.
    """

    is_random = True

    def __init__(
        self,
        image_size: int,
        *,
        interpolation: str,
        mean: Sequence[float],
        scale: Sequence[float],
        ratio: Sequence[float],
        hflip: float,
        color_jitter: float | None,
        auto_augment: str | None,
        re_prob: float,
        re_mode: str,
        re_count: int,
        augment_on_device: bool = False,
    ):
        check_range("scale", scale, 1)  # shares of the image's area
        check_range("ratio", ratio)
        check_number("hflip", hflip, 0, 1)
        check_number("re_prob", re_prob, 0, 1)
        check_number("re_count", re_count, 1, integer=True)
        if interpolation not in (*INTERPOLATIONS, "random"):
            raise unknown_name("interpolation", str(interpolation), (*INTERPOLATIONS, "random"))
        if auto_augment:
            _check_auto_augment(auto_augment)
        if color_jitter:
            _check_color_jitter(color_jitter)
        self.image_size = image_size
        self._auto_augment = auto_augment
        # timm annotates these as tuples and color_jitter as a number, but takes sequences and None.
        untyped: dict[str, Any] = {"mean": mean, "scale": scale, "ratio": ratio, "color_jitter": color_jitter or None}
        transform = _timm_transform(
            image_size,
            interpolation=interpolation,
            hflip=hflip,
            auto_augment=auto_augment,
            re_prob=re_prob,
            re_mode=re_mode,
            re_count=re_count,
            **untyped,
        )
        for op in _augment_ops(transform):
            if op.name.startswith("Posterize"):
                op.aug_fn = _posterize
        steps = transform.transforms
        self._crop: RandomResizedCropAndInterpolation = steps[0]
        modes = self._crop.interpolation
        self._interpolations = [mode.value for mode in (modes if isinstance(modes, tuple | list) else (modes,))]
        self._erasing = next((step for step in steps if isinstance(step, RandomErasing)), None)
        erases = self._erasing is not None
        on_images = steps[1 : len(steps) - 2 - erases]  # the last steps are conversion, normalization and erasing
        if erases:
            assert self._erasing is not None
            self._box_colors = self._erasing.rand_color
            self._erasing.rand_color = self._erasing.per_pixel = False  # the values are drawn elsewhere
        others = [step for step in on_images if not isinstance(step, RandomHorizontalFlip | ColorJitter)]
        on_device = all(augment_on_device and OperationDraws.can_draw(step) for step in others)
        # Steps on Pillow images, in the worker; if there are none, the device applies every step.
        self.worker_steps: list[Callable] = [] if on_device else on_images
        self._operations = OperationDraws(others[0], image_size) if on_device and others else None
        self._flip = next((step for step in on_images if isinstance(step, RandomHorizontalFlip)), None)
        self._jitter = next((step for step in on_images if isinstance(step, ColorJitter)), None)
        if self._jitter is not None and self._jitter.hue is not None and not self.worker_steps:
            raise UsageError(
                f"color_jitter={as_list(color_jitter)}: the device does not jitter hue, the last number: leave it out",
                code="data.augmentation",
                color_jitter=color_jitter,
            )

    def __call__(self, image: ImageFile, decoder: Decoder) -> PreparedImage:
        return self.draw(image, decoder).prepared()

    def draw(self, image: ImageFile, decoder: Decoder) -> DrawnImage:
        size = self.image_size
        width, height = image.size
        crop = Crop(*self._crop.get_params(_SizeOnly(image.size), self._crop.scale, self._crop.ratio)).within(
            height, width
        )
        several = len(self._interpolations) > 1
        interpolation = random.choice(self._interpolations) if several else self._interpolations[0]
        make_pixels = partial(_resized, image, decoder, crop, (size, size), interpolation, size)
        if not self.worker_steps:
            return DrawnImage(make_pixels, self._draw_for_device() | self._draw_boxes())
        pixels = make_pixels()  # now, because the steps draw
        assert isinstance(pixels, torch.Tensor), "the device does not resize what workers augment"
        augmented = self.augment_in_worker(pixels)
        return DrawnImage(lambda: augmented, self._draw_boxes())

    @property
    def blurs_on_device(self) -> bool:
        return self._operations is not None and self._operations.blurs

    @property
    def needs_worker(self) -> str | None:
        """Return why images must be prepared in a worker; None if the device can prepare them too."""
        if self.worker_steps:
            return f"auto_augment={self._auto_augment} runs in the workers, at twice the time per image or more"
        return _only_in_worker(self._interpolations)

    def augment_in_worker(self, pixels: torch.Tensor) -> torch.Tensor:
        """Apply the steps that only timm implements to pixels uint8 (3, S, S)."""
        # Plane by plane takes a tenth of the time of one array whose channels must be interleaved.
        image: Any = Image.merge("RGB", [Image.fromarray(plane) for plane in pixels.numpy()])
        for step in self.worker_steps:
            image = step(image)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def _draw_for_device(self) -> dict[str, torch.Tensor]:
        """Return the draws of the steps between crop and erasing, drawn in timm's order."""
        draws: dict[str, torch.Tensor] = {}
        if self._flip is not None:
            draws["flip"] = torch.rand(()) < self._flip.p
        if self._operations is not None:
            draws["operations"] = self._operations.draw()
        if self._jitter is not None:
            j = self._jitter
            order, *factors = ColorJitter.get_params(j.brightness, j.contrast, j.saturation, j.hue)
            draws["jitter_order"] = order
            draws["jitter"] = torch.tensor([1.0 if factor is None else factor for factor in factors[:3]])
        return draws

    def _draw_boxes(self) -> dict[str, torch.Tensor]:
        """Return boxes int64 (N, 4), each (top, bottom, left, right) and empty if unused, and their fill."""
        if self._erasing is None:
            return {}
        boxes = _Boxes(self.image_size)
        self._erasing(boxes)
        count = self._erasing.max_count
        padded = boxes.found + [(0, 0, 0, 0)] * (count - len(boxes.found))
        draws = {"erase": torch.tensor(padded)}
        if self._box_colors:
            draws["erase_colors"] = torch.randn(count, 3)
        else:
            draws["erase_seed"] = torch.randint(2**31, ())
        return draws


class EvalPreprocessing:
    """A resize to image_size / crop_pct, of the side or sides that crop_mode names, and a center crop.

    Raises UsageError for invalid values.
    """

    is_random = False

    def __init__(self, image_size: int, *, interpolation: str, mean: Sequence[float], crop_pct: float, crop_mode: str):
        if crop_mode not in CROP_MODES:
            raise unknown_name("crop_mode", str(crop_mode), CROP_MODES)
        check_number("crop_pct", crop_pct)
        if not 0 < crop_pct <= 1:
            raise value_error("crop_pct", crop_pct, "a share above 0 and up to 1")
        if interpolation not in INTERPOLATIONS:
            raise unknown_name("interpolation", str(interpolation), INTERPOLATIONS)
        self.image_size, self.interpolation, self.crop_mode = image_size, interpolation, crop_mode
        self.resized = int(image_size / crop_pct)  # rounded down, as timm does
        self.border = [round(255 * value) for value in mean]

    def __call__(self, image: ImageFile, decoder: Decoder) -> PreparedImage:
        return self.draw(image, decoder).prepared()

    def draw(self, image: ImageFile, decoder: Decoder) -> DrawnImage:
        return DrawnImage(partial(self._center, image, decoder), {})

    def _center(self, image: ImageFile, decoder: Decoder) -> torch.Tensor | DeviceCrop:
        width, height = image.size
        everything = Crop(0, 0, height, width)
        size = self._resized_size(height, width)
        pixels = _resized(image, decoder, everything, size, self.interpolation, self.image_size)
        return center(pixels, self.image_size, self.border) if isinstance(pixels, torch.Tensor) else pixels

    @property
    def needs_worker(self) -> str | None:
        """Return why images must be prepared in a worker; None if the device can prepare them too."""
        return _only_in_worker([self.interpolation])

    def _resized_size(self, height: int, width: int) -> tuple[int, int]:
        side = self.resized
        if self.crop_mode == "squash":
            return side, side
        if self.crop_mode == "border":  # the longer side; timm rounds the other, and fails if nothing of it is left
            scale = max(height, width) / side
            return max(1, round(height / scale)), max(1, round(width / scale))
        long = int(side * max(height, width) / min(height, width))  # rounded down, as torchvision does
        return (long, side) if height > width else (side, long)


class _SizeOnly(Image.Image):
    """A stand-in for an image, of which RandomResizedCrop reads only the size."""

    def __init__(self, size: tuple[int, int]):
        self._given = size

    @property
    def size(self) -> tuple[int, int]:
        return self._given


class _Boxes:
    """A stand-in for an image that records the boxes that RandomErasing erases."""

    dtype = torch.float32

    def __init__(self, image_size: int):
        self._size = (3, image_size, image_size)
        self.found: list[tuple[int, int, int, int]] = []

    def size(self) -> tuple[int, int, int]:
        return self._size

    def __setitem__(self, place: tuple[slice, slice, slice], value: torch.Tensor) -> None:
        _, rows, columns = place
        self.found.append((rows.start, rows.stop, columns.start, columns.stop))


def _only_in_worker(interpolations: Sequence[str]) -> str | None:
    others = [mode for mode in interpolations if mode not in TORCH_MODES]
    return f"Pillow resizes by {others[0]}, in the workers" if others else None


def _timm_transform(image_size: int, **settings: Any) -> Any:
    try:
        return create_transform(image_size, is_training=True, **settings)
    except (AssertionError, KeyError, ValueError, TypeError) as error:
        named = {name: settings[name] for name in ("auto_augment", "re_mode", "color_jitter")}
        raise UsageError(
            f"timm cannot build the augmentation {', '.join(f'{name}={value!r}' for name, value in named.items())} "
            f"({error}). Tested values: auto_augment='rand-m9-mstd0.5-inc1', re_mode='const', 'rand' or 'pixel'",
            code="data.augmentation",
            **named,
        ) from error


def _check_auto_augment(text: str) -> None:
    """Raise UsageError for a section that timm would ignore: it reads NAME[-SECTION]..., each a key and a number."""
    policy, *sections = str(text).split("-")
    keys = next((keys for name, keys in _SECTIONS.items() if policy.startswith(name)), ("mstd",))
    for section in sections:
        key = re.split(r"[\d.]", section)[0]
        is_choice = policy == "rand" and section.startswith("t") and len(section) > 1  # names a set of operations
        if not is_choice and (key not in keys or not re.fullmatch(r"\d+(\.\d+)?", section[len(key) :])):
            raise UsageError(
                f"auto_augment={text!r}: {section!r} is not a section of {policy!r}; valid are "
                f"{', '.join(f'{key}NUMBER' for key in keys)}, as in 'rand-m9-mstd0.5-inc1'",
                code="data.augmentation",
                auto_augment=text,
                section=section,
            )


def _check_color_jitter(value: Any) -> None:
    """Raise UsageError unless the value is a strength, or a list of 3, or 4 with that of hue."""
    strengths = value if isinstance(value, list | tuple) else [value] * 3
    if len(strengths) not in (3, 4) or not is_numbers(strengths, len(strengths)) or min(strengths) < 0:
        expected = "a number of at least 0, three of them for brightness, contrast and saturation, or null"
        raise value_error("color_jitter", value, expected)


def _augment_ops(transform: Any) -> Iterator[AugmentOp]:
    """Yield every AugmentOp in timm's RandAugment (ops), AutoAugment (policy: lists of them) or AugMix (ops)."""
    for step in transform.transforms:
        for ops in (getattr(step, "ops", ()), *getattr(step, "policy", ())):
            yield from ops


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Posterize down to 0 bits, a black image, as published recipes do through timm; newer Pillow refuses 0."""
    if bits >= 8:
        return image
    mask = kept_bits(bits)
    return image.point([value & mask for value in range(256)] * len(image.getbands()))
