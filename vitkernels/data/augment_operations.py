"""timm's RandAugment, AutoAugment and 3-Augment as numbers: workers draw the operations, the device applies them.

timm's own classes draw the operations, on a stand-in for an image that only records them. So the draws equal those of
a worker that augments, and a sample is the same wherever it is augmented.

Sources: "RandAugment" (arXiv:1909.13719), "AutoAugment" (arXiv:1805.09501), 3-Augment (DeiT III, arXiv:2204.07118).

Shapes: L operations of an image, S image side.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from PIL import Image, ImageFilter
from timm.data import auto_augment as timm_operations
from timm.data.auto_augment import NAME_TO_OP, AugmentOp, AutoAugment, RandAugment
from torch import Tensor

ARGUMENTS = 6  # of the operation that has the most
_ZEROS = (0.0,) * (1 + ARGUMENTS)


class Operation(IntEnum):
    """What the device does to an image, and the arguments of it."""

    NOTHING = 0
    SOLARIZE = 1  # (threshold): gray levels from the threshold on are inverted
    SOLARIZE_ADD = 2  # (increase): of gray levels below 128
    POSTERIZE = 3  # (mask): bits of a gray level that are kept
    BRIGHTNESS = 4  # (factor), of Pillow's ImageEnhance; so are the next three
    CONTRAST = 5
    COLOR = 6
    SHARPNESS = 7
    AUTOCONTRAST = 8
    EQUALIZE = 9
    AFFINE_BILINEAR = 10  # (a, b, c, d, e, f): (ax + by + c, dx + ey + f) is the source of (x, y)
    AFFINE_BICUBIC = 11
    GAUSSIAN_BLUR = 12  # (reach, weight, edge weight) of the box blurs that stand for it; see _box_blur


class _Notes(Image.Image):
    """A stand-in for an image of this side, which notes the operations applied to it."""

    def __init__(self, side: int):
        self._side = side
        self.operations: list[tuple[float, ...]] = []

    @property
    def size(self) -> tuple[int, int]:
        return self._side, self._side

    def note(self, operation: Operation, *arguments: float) -> Self:
        self.operations.append((operation, *arguments))
        return self

    def transform(self, size: Any, method: Any, data: Sequence[float], resample: int, **_: Any) -> Self:  # type: ignore[override]
        assert size == self.size and method == Image.Transform.AFFINE
        bicubic = resample == Image.Resampling.BICUBIC
        return self.note(Operation.AFFINE_BICUBIC if bicubic else Operation.AFFINE_BILINEAR, *data)

    def transpose(self, method: Image.Transpose) -> Self:
        """Note a rotation by a multiple of 90 degrees, which Pillow does without a filter."""
        side = self._side
        matrices = {
            Image.Transpose.ROTATE_90: (0, -1, side, 1, 0, 0),
            Image.Transpose.ROTATE_180: (-1, 0, side, 0, -1, side),
            Image.Transpose.ROTATE_270: (0, 1, 0, -1, 0, side),
        }
        return self.note(Operation.AFFINE_BILINEAR, *matrices[method])

    def filter(self, filter: Any) -> Self:
        assert isinstance(filter, ImageFilter.GaussianBlur) and not isinstance(filter.radius, Sequence)
        return self.note(Operation.GAUSSIAN_BLUR, *_box_blur(filter.radius))

    def copy(self) -> Self:
        return self


def kept_bits(bits: int) -> int:
    """Return the mask of the highest `bits` of a gray level."""
    return 0xFF & ~(2 ** max(8 - bits, 0) - 1)


def _box_blur(deviation: float) -> tuple[int, int, int]:
    """Return the box blur of which Pillow makes a Gaussian blur: it takes three along rows, then three along columns.

    A box weighs `reach` pixels on both sides and its center equally, and the next pixel on each side less. Weights are
    parts of 2²⁴. Pillow rounds to float32 where this does.
    Source: Gwosdek et al., "Theoretical foundations of Gaussian convolution by extended box filtering", SSVM 2011.
    """
    variance = np.float32(deviation) * np.float32(deviation) / np.float32(3)  # of each of the three
    width = np.float32(np.sqrt(12.0 * float(variance) + 1))
    reach = np.float32(np.floor((float(width) - 1) / 2))
    one, two, three, six = (np.float32(n) for n in (1, 2, 3, 6))
    share = (two * reach + one) * (reach * (reach + one) - three * variance)
    share = share / (six * (variance - (reach + one) * (reach + one)))
    weight = int(np.float32(2**24) / ((reach + share) * two + one))
    reached = int(reach + share)
    return reached, weight, (2**24 - (2 * reached + 1) * weight) // 2


def _note(operation: Operation, notes: _Notes, *arguments: float, **_: Any) -> _Notes:
    return notes.note(operation, *arguments)


def _note_invert(notes: _Notes, **_: Any) -> _Notes:
    return notes.note(Operation.SOLARIZE, 0)


def _note_posterize(notes: _Notes, bits: int, **_: Any) -> _Notes:
    return notes.note(Operation.POSTERIZE, kept_bits(bits))


def _note_desaturate(notes: _Notes, factor: float, **_: Any) -> _Notes:
    return notes.note(Operation.COLOR, min(1.0, max(0.0, 1.0 - factor)))


# What stands in for timm's functions. Those that move or blur pixels stay: they call methods of Pillow that _Notes has.
_NOTED: dict[Callable, Callable] = {
    timm_operations.auto_contrast: partial(_note, Operation.AUTOCONTRAST),
    timm_operations.brightness: partial(_note, Operation.BRIGHTNESS),
    timm_operations.color: partial(_note, Operation.COLOR),
    timm_operations.contrast: partial(_note, Operation.CONTRAST),
    timm_operations.desaturate: _note_desaturate,
    timm_operations.equalize: partial(_note, Operation.EQUALIZE),
    timm_operations.invert: _note_invert,
    timm_operations.posterize: _note_posterize,
    timm_operations.sharpness: partial(_note, Operation.SHARPNESS),
    timm_operations.solarize: partial(_note, Operation.SOLARIZE),
    timm_operations.solarize_add: partial(_note, Operation.SOLARIZE_ADD),
}
_BLURRING = ("gaussian_blur", "gaussian_blur_rand")
_MOVING = ("rotate", "shear_x", "shear_y", "translate_x_abs", "translate_x_rel", "translate_y_abs", "translate_y_rel")
_NOTED |= {getattr(timm_operations, name): getattr(timm_operations, name) for name in (*_BLURRING, *_MOVING)}


class OperationDraws:
    """Draws the operations of timm's RandAugment or AutoAugment (3-Augment is one) for an image of this side.

    It patches the augmentation to record its operations, so that this no longer transforms images.

    blurs: whether an operation may be a Gaussian blur.
    """

    def __init__(self, augmentation: RandAugment | AutoAugment, side: int):
        self._augmentation = augmentation
        self._side = side
        policies = _policies(augmentation)
        self._most = augmentation.num_layers if isinstance(augmentation, RandAugment) else max(map(len, policies))
        for ops in policies:
            for op in ops:
                op.aug_fn = _noted(op)
        self.blurs = any(NAME_TO_OP[op.name].__name__ in _BLURRING for ops in policies for op in ops)

    @staticmethod
    def can_draw(step: Any) -> bool:
        """Return whether the device has all operations of this augmentation."""
        known = isinstance(step, RandAugment | AutoAugment)
        return known and all(_noted(op) for ops in _policies(step) for op in ops)

    def draw(self) -> Tensor:
        """Return float64 (L, 1 + ARGUMENTS): each operation and its arguments, in their order, padded with zeros.

        Draws from the global generators.
        """
        notes = _Notes(self._side)
        self._augmentation(notes)
        unused = [(Operation.NOTHING,)] * (self._most - len(notes.operations))
        rows = [(*noted, *_ZEROS[len(noted) :]) for noted in notes.operations + unused]
        return torch.tensor(rows, dtype=torch.float64)


def _noted(op: AugmentOp) -> Callable | None:
    """Return what stands in for the operation's function; None if the device does not have it."""
    function: Any = NAME_TO_OP[op.name]
    return _NOTED.get(function)


def _policies(augmentation: RandAugment | AutoAugment) -> Sequence[Sequence[AugmentOp]]:
    """Return the lists of operations that the augmentation chooses from."""
    return [augmentation.ops] if isinstance(augmentation, RandAugment) else augmentation.policy
