"""Batches whose images the device decodes: the files and crops that workers pass on, and their decoding.

Shapes: B rows, N of them with an encoded image, M with pixels from a worker, S image side, H, W of a decoded image.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.data.decode import Decoder
from vitkernels.data.geometry import TORCH_MODES, Crop, center

_DECODED_AT_A_TIME = 2**29  # bytes of decoded images that are held before they are resized


class EncodedCrop(NamedTuple):
    """A JPEG file, and the part of its upright image that is resized to (height, width)."""

    data: bytes
    orientation: int
    image_size: tuple[int, int]
    crop: Crop
    height: int
    width: int
    interpolation: str

    def plan(self) -> list[int]:
        """Return everything but the data."""
        mode = TORCH_MODES.index(self.interpolation)
        return [self.orientation, *self.image_size, *self.crop, self.height, self.width, mode]


class Undecoded(NamedTuple):
    """The images of a batch, in place of its pixels (B, 3, S, S).

    rows, side: B and S.
    files: uint8, N files one after another. plans: int64 (N, 12), the row of each file, where it ends in `files`, and
        its EncodedCrop.plan. One tensor, since each tensor that a worker sends costs a file descriptor.
    pixels: uint8 (M, 3, S, S), of images decoded in workers; pixel_rows: int64 (M,). Other rows have no sample.
    """

    rows: int
    side: int
    files: Tensor
    plans: Tensor
    pixels: Tensor
    pixel_rows: Tensor

    @classmethod
    def of(cls, images: Sequence[Tensor | EncodedCrop | None], side: int) -> "Undecoded":
        """Return the batch of these images; None has no sample."""
        encoded = [(row, image) for row, image in enumerate(images) if isinstance(image, EncodedCrop)]
        decoded = [(row, image) for row, image in enumerate(images) if isinstance(image, Tensor)]
        joined = bytearray(b"".join(image.data for _, image in encoded))
        ends = itertools.accumulate(len(image.data) for _, image in encoded)
        plans = [[row, end, *image.plan()] for (row, image), end in zip(encoded, ends, strict=True)]
        nothing = torch.empty(0, 3, side, side, dtype=torch.uint8)
        return cls(
            rows=len(images),
            side=side,
            files=torch.frombuffer(joined, dtype=torch.uint8) if joined else nothing.flatten(),
            plans=torch.tensor(plans, dtype=torch.int64).view(len(plans), -1),
            pixels=torch.stack([image for _, image in decoded]) if decoded else nothing,
            pixel_rows=torch.tensor([row for row, _ in decoded], dtype=torch.int64),
        )

    def padded(self, count: int) -> "Undecoded":
        """Return the batch with `count` rows without a sample appended."""
        return self._replace(rows=self.rows + count)

    def crops(self) -> Iterator[tuple[int, Tensor, EncodedCrop]]:
        """Yield each encoded row, its file uint8 (bytes,), and its plan, without the data."""
        begin = 0
        for row, end, orientation, image_width, image_height, *crop, height, width, mode in self.plans.tolist():
            size, interpolation = (image_width, image_height), TORCH_MODES[mode]
            yield (
                row,
                self.files[begin:end],
                EncodedCrop(b"", orientation, size, Crop(*crop), height, width, interpolation),
            )
            begin = end


class Undecodable(NamedTuple):
    """A row that the GPU could not decode; lost: whether Pillow could not either, so the row stays black."""

    row: int
    reason: str
    lost: bool


@dataclass(frozen=True)
class DeviceDecoder:
    """Decodes batches on the training device.

    decode: maps files uint8 (bytes,) to images uint8 (3, H, W) on the device; RuntimeError if it cannot read one.
    device: where the pixels go; None is the current GPU.
    border: color, 0 to 255, that pads images smaller than the model's.
    """

    decode: Callable[[list[Tensor]], list[Tensor]]
    border: Sequence[int]
    device: torch.device | None = None

    def __call__(self, batch: Undecoded) -> tuple[Tensor, list[Undecodable]]:
        """Return pixels uint8 (B, 3, S, S) on the device, and the rows that `decode` could not read.

        Given the same decoded pixels, a resized image differs from Pillow's by at most one gray level: it is computed
        in float32 and rounded once.
        """
        device = self.device or torch.device("cuda", torch.cuda.current_device())
        pixels = torch.zeros(batch.rows, 3, batch.side, batch.side, dtype=torch.uint8, device=device)
        rows: list[int] = []
        images: list[Tensor] = []
        problems: list[Undecodable] = []
        for part in _parts(batch):
            for (row, _, plan), decoded in zip(part, self._decoded(part, problems), strict=True):
                if decoded is not None:
                    rows.append(row)
                    images.append(center(_cut(decoded.to(device), plan), batch.side, self.border))
        if rows:
            pixels[_moved(torch.tensor(rows), device)] = torch.stack(images).round_().clamp_(0, 255).byte()
        if len(batch.pixel_rows):
            pixels[_moved(batch.pixel_rows, device)] = _moved(batch.pixels, device)
        return pixels, problems

    def _decoded(self, part: list[tuple[int, Tensor, EncodedCrop]], problems: list[Undecodable]) -> list[Tensor | None]:
        """Return the decoded images, None for one that no decoder can read. Append failures to `problems`."""
        try:
            return list(self.decode([file for _, file, _ in part]))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # for the whole batch: it does not name the image
            if len(part) > 1:
                return [image for one in part for image in self._decoded([one], problems)]
            row, file, plan = part[0]
            image, reason = _by_pillow(file, plan), str(error).splitlines()[0]
            problems.append(Undecodable(row, f"nvJPEG: {reason}", lost=image is None))
            return [image]


def _parts(batch: Undecoded) -> Iterator[list[tuple[int, Tensor, EncodedCrop]]]:
    """Yield the encoded rows in parts of one image, or of at most _DECODED_AT_A_TIME decoded bytes."""
    part: list[tuple[int, Tensor, EncodedCrop]] = []
    held = 0
    for entry in batch.crops():
        width, height = entry[2].image_size
        if part and held + 3 * width * height > _DECODED_AT_A_TIME:
            yield part
            part, held = [], 0
        part.append(entry)
        held += 3 * width * height
    if part:
        yield part


def _cut(image: Tensor, plan: EncodedCrop) -> Tensor:
    """Return the crop of a decoded image uint8 (3, H, W), resized to float32 (3, height, width)."""
    top, left, height, width = plan.crop
    part = _upright(image, plan.orientation)[None, :, top : top + height, left : left + width].float()
    size = (plan.height, plan.width)
    if (height, width) != size:
        part = F.interpolate(part, size=size, mode=plan.interpolation, antialias=True)
    return part[0]


def _upright(image: Tensor, orientation: int) -> Tensor:
    """Return an image (3, H, W) with the EXIF orientation applied, as `decode.contract.upright` does."""
    if orientation in (5, 6, 7, 8):
        image = image.mT
    flipped = [-2] * (orientation in (3, 4, 7, 8)) + [-1] * (orientation in (2, 3, 6, 7))
    return image.flip(flipped) if flipped else image


def _by_pillow(file: Tensor, plan: EncodedCrop) -> Tensor | None:
    """Return the image as the GPU would have decoded it, uint8 (3, H, W) and not upright; None if Pillow cannot."""
    decoder = Decoder("pillow")
    try:
        upright = torch.from_numpy(decoder.decode(decoder.open(file.numpy().tobytes())).copy()).permute(2, 0, 1)
    except Exception:  # a broken file can make a decoder raise almost anything
        return None
    back = {6: 8, 8: 6}.get(plan.orientation, plan.orientation)  # the others are their own inverse
    return _upright(upright, back)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=True)
