"""imagefolder's transforms, by timm.data.create_transform: PIL image -> float32 (3, S, S), normalized."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import AugmentOp

from vitkernels.data.checks import check_number, check_range, value_error
from vitkernels.errors import UsageError, unknown_name

Transform = Callable[[Image.Image], torch.Tensor]
_SECTIONS = {"rand": ("m", "n", "p", "mstd", "mmax", "inc"), "augmix": ("m", "w", "d", "a", "b", "mstd")}  # timm's
CROP_MODES = ("center", "squash", "border")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")


def train_transform(
    image_size: int,
    *,
    interpolation: str,
    mean: Sequence[float],
    std: Sequence[float],
    scale: Sequence[float],
    ratio: Sequence[float],
    hflip: float,
    color_jitter: float | None,
    auto_augment: str | None,
    re_prob: float,
    re_mode: str,
    re_count: int,
) -> Transform:
    """Return random resized crop, flip, RandAugment or color jitter, and random erasing.

    Draws from the global generators. Raises UsageError for invalid values.
    """
    check_range("scale", scale)
    check_range("ratio", ratio)
    check_number("hflip", hflip, 0, 1)
    check_number("re_prob", re_prob, 0, 1)
    check_number("re_count", re_count, 1, integer=True)
    if interpolation not in (*INTERPOLATIONS, "random"):
        raise unknown_name("interpolation", str(interpolation), (*INTERPOLATIONS, "random"))
    if auto_augment:
        _check_auto_augment(auto_augment)
    # timm annotates these as tuples and color_jitter as a number, but takes sequences and None.
    untyped: dict[str, Any] = {"mean": mean, "std": std, "scale": scale, "ratio": ratio}
    untyped["color_jitter"] = color_jitter or None
    try:
        transform = create_transform(
            image_size,
            is_training=True,
            interpolation=interpolation,
            hflip=hflip,
            auto_augment=auto_augment,
            re_prob=re_prob,
            re_mode=re_mode,
            re_count=re_count,
            **untyped,
        )
    except (AssertionError, KeyError, ValueError, TypeError) as error:
        raise UsageError(
            f"timm cannot build the augmentation auto_augment={auto_augment!r}, re_mode={re_mode!r}, "
            f"color_jitter={color_jitter!r} ({error}). Tested values: auto_augment='rand-m9-mstd0.5-inc1', "
            "re_mode='const', 'rand' or 'pixel'",
            code="data.augmentation",
            auto_augment=auto_augment,
            re_mode=re_mode,
            color_jitter=color_jitter,
        ) from error
    for op in _augment_ops(transform):
        if op.name.startswith("Posterize"):
            op.aug_fn = _posterize
    return transform


def eval_transform(
    image_size: int, *, interpolation: str, mean: Sequence[float], std: Sequence[float], crop_pct: float, crop_mode: str
) -> Transform:
    """Return a resize to image_size / crop_pct, of the side or sides that crop_mode names, and a center crop.

    Raises UsageError for invalid values.
    """
    if crop_mode not in CROP_MODES:
        raise unknown_name("crop_mode", str(crop_mode), CROP_MODES)
    check_number("crop_pct", crop_pct)
    if not 0 < crop_pct <= 1:
        raise value_error("crop_pct", crop_pct, "a share above 0 and up to 1")
    statistics: dict[str, Any] = {"mean": mean, "std": std}  # timm annotates tuples, but takes sequences
    return create_transform(
        image_size, interpolation=interpolation, **statistics, crop_pct=crop_pct, crop_mode=crop_mode
    )


def _check_auto_augment(text: str) -> None:
    """Raise UsageError for a section that timm would ignore: it reads NAME[-SECTION]..., each a key and a number."""
    policy, *sections = str(text).split("-")
    keys = next((keys for name, keys in _SECTIONS.items() if policy.startswith(name)), ("mstd",))
    for section in sections:
        key = re.split(r"[\d.]", section)[0]
        is_choice = policy == "rand" and section.startswith("t") and len(section) > 1  # names a set of operations
        if not is_choice and (key not in keys or not re.fullmatch(r"\d+(\.\d+)?", section[len(key) :])):
            raise UsageError(
                f"auto_augment={text!r}: {section!r} is no section of {policy!r}; it takes "
                f"{', '.join(f'{key}NUMBER' for key in keys)}, as in 'rand-m9-mstd0.5-inc1'",
                code="data.augmentation",
                auto_augment=text,
                section=section,
            )


def _augment_ops(transform: Any) -> Iterator[AugmentOp]:
    """Yield every AugmentOp in timm's RandAugment (ops), AutoAugment (policy: lists of them) or AugMix (ops)."""
    for step in transform.transforms:
        for ops in (getattr(step, "ops", ()), *getattr(step, "policy", ())):
            yield from ops


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Posterize down to 0 bits, a black image, as published recipes do through timm; newer Pillow refuses 0."""
    if bits >= 8:
        return image
    mask = 0xFF & ~(2 ** (8 - bits) - 1)
    return image.point([value & mask for value in range(256)] * len(image.getbands()))
