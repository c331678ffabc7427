"""Images that the device crops and resizes: what workers pass on, and what the device does with it.

Shapes: B rows, of which N are resized on the device and M in a worker, S image side, H, W of a decoded image, h, w of a
resized one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.data.decode import Decoder
from vitkernels.data.decode.contract import upright_size
from vitkernels.data.device_transforms import has_triton
from vitkernels.data.geometry import TORCH_MODES, Crop, center, center_offset
from vitkernels.data.shared_memory import by_value, hand_back

_DECODED_AT_A_TIME = 2**28  # bytes of decoded images that are held at once, before they are resized
LARGEST = 4  # most decoded pixels passed on per pixel of the square; workers resize larger crops
_INTERLEAVED = 0  # stands for the orientation of decoded pixels uint8 (H, W, 3), which are upright
# What the device must know about an image; device_crops_kernel.py reads the fields by position. begin: the offset in
# DeviceCrops.data. square_top, square_left: of the square (S, S) in the resized image; negative if that is smaller.
FIELDS = (
    *("row", "begin", "orientation", "image_width", "image_height", *Crop._fields),
    *("resized_height", "resized_width", "mode", "square_top", "square_left"),
)


class DeviceCrop(NamedTuple):
    """An image, and the part of it that is resized to (height, width).

    data: a JPEG file, or decoded pixels uint8 (H, W, 3), at least those that the center square depends on.
    orientation: the EXIF orientation of the file, 1 to 8; 0 for decoded pixels.
    image_size: W and H of the upright image.
    crop: in pixels of the upright image; it may extend beyond decoded pixels.
    """

    data: bytes | np.ndarray
    orientation: int
    image_size: tuple[int, int]
    crop: Crop
    height: int
    width: int
    interpolation: str

    @classmethod
    def of_pixels(cls, pixels: np.ndarray, part: Crop, crop: Crop, size: tuple[int, int], interpolation: str) -> Self:
        """Return a crop that is resized to `size`, with only this part of the image uint8 (H, W, 3)."""
        data = pixels[part.top : part.top + part.height, part.left : part.left + part.width]
        crop = crop._replace(top=crop.top - part.top, left=crop.left - part.left)
        return cls(data, _INTERLEAVED, (part.width, part.height), crop, *size, interpolation)

    def plan(self, side: int) -> list[int]:
        """Return the values of FIELDS from "orientation" on, for a square of this side."""
        square = center_offset(self.height, side), center_offset(self.width, side)
        mode = TORCH_MODES.index(self.interpolation)
        return [self.orientation, *self.image_size, *self.crop, self.height, self.width, mode, *square]


@dataclass(frozen=True)
class DeviceCrops:
    """The images of a batch, in place of its pixels (B, 3, S, S).

    rows, side: B and S.
    data: uint8, N images one after another: files or decoded pixels.
    plans: int64 (N, len(FIELDS)). One tensor for all images, because each tensor that a worker sends takes a file
        descriptor.
    encoded: whether the images are files.
    pixels, pixel_rows: uint8 (M, 3, S, S), images resized in workers, and int64 (M,), their rows. Rows that neither
        plans nor pixel_rows name have no sample.
    taken: the worker's memory that `data` was copied from, if it was.
    """

    rows: int
    side: int
    data: Tensor
    plans: Tensor
    encoded: bool
    pixels: Tensor
    pixel_rows: Tensor
    taken: Tensor | None = None

    @classmethod
    def of(cls, images: Sequence[Tensor | DeviceCrop | None], side: int, data: Tensor | None = None) -> "DeviceCrops":
        """Return the batch of these images, where None is a row without a sample.

        data: the crops' decoded pixels one after another; None if the crops are files.
        """
        crops = [(row, image) for row, image in enumerate(images) if isinstance(image, DeviceCrop)]
        finished = [(row, image) for row, image in enumerate(images) if isinstance(image, Tensor)]
        plans, begin = [], 0
        for row, crop in crops:
            plans.append([row, begin, *crop.plan(side)])
            begin += len(crop.data) if isinstance(crop.data, bytes) else crop.data.size
        nothing = torch.empty(0, 3, side, side, dtype=torch.uint8)
        encoded = data is None
        if data is None:
            files = bytearray().join(crop.data for _, crop in crops if isinstance(crop.data, bytes))
            data = torch.frombuffer(files, dtype=torch.uint8) if files else nothing.flatten()
        return cls(
            rows=len(images),
            side=side,
            data=data,
            plans=torch.tensor(plans, dtype=torch.int64).view(len(plans), len(FIELDS)),
            encoded=encoded,
            pixels=torch.stack([image for _, image in finished]) if finished else nothing,
            pixel_rows=torch.tensor([row for row, _ in finished], dtype=torch.int64),
        )

    def padded(self, count: int) -> "DeviceCrops":
        """Return the batch with `count` rows without a sample appended."""
        return replace(self, rows=self.rows + count)

    def pin_memory(self) -> "DeviceCrops":
        """Return a copy in page-locked memory, and hand the worker's memory back; the DataLoader calls this."""
        names = ("data", "plans", "pixels", "pixel_rows")
        pinned: dict[str, Any] = {name: getattr(self, name).pin_memory() for name in names}
        if self.encoded or not self.data.is_shared():
            return replace(self, **pinned)
        hand_back(self.data)
        return replace(self, **pinned, taken=self.data)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value if name == "data" else by_value(value) for name, value in vars(self).items()}

    def crops(self) -> Iterator[tuple[int, Tensor, DeviceCrop]]:
        """Yield each row for the device, its data uint8 (bytes,), and its DeviceCrop without the data."""
        return _crops(self.data, self.plans)


class Undecodable(NamedTuple):
    """A row that the GPU could not decode; lost: whether Pillow could not either, so the row stays black."""

    row: int
    reason: str
    lost: bool


@dataclass(frozen=True)
class DeviceCropper:
    """Crops and resizes batches on the training device.

    border: color, 0 to 255, that pads images smaller than the model's.
    decode: maps files uint8 (bytes,) to images uint8 (3, H, W) on the device; RuntimeError if it cannot read one. None
        for batches of decoded pixels.
    device: where the pixels go; None is the current GPU.
    """

    border: Sequence[int]
    decode: Callable[[list[Tensor]], list[Tensor]] | None = None
    device: torch.device | None = None

    def __call__(self, batch: DeviceCrops) -> tuple[Tensor, list[Undecodable]]:
        """Return pixels uint8 (B, 3, S, S) on the device, and the rows that `decode` could not read.

        A resized image differs from Pillow's, of the same decoded pixels, by at most two gray levels: it is computed in
        float32 and rounded once, whereas Pillow rounds after each of its two passes.
        """
        device = self.device or torch.device("cuda", torch.cuda.current_device())
        pixels = torch.zeros(batch.rows, 3, batch.side, batch.side, dtype=torch.uint8, device=device)
        problems: list[Undecodable] = []
        if batch.encoded:
            first = 0
            for part in _parts(batch):
                images = [image if image is None else image.to(device) for image in self._decoded(part, problems)]
                self._resize(*_joined(images, batch.plans[first : first + len(part)]), pixels)
                first += len(part)
        else:
            self._resize(_moved(batch.data, device), batch.plans, pixels)
        if len(batch.pixel_rows):
            pixels[_moved(batch.pixel_rows, device)] = _moved(batch.pixels, device)
        return pixels, problems

    def _decoded(self, part: list[tuple[int, Tensor, DeviceCrop]], problems: list[Undecodable]) -> list[Tensor | None]:
        """Return the decoded images, None for one that no decoder can read. Append failures to `problems`."""
        assert self.decode is not None, "a batch of files needs a decoder"
        try:
            return list(self.decode([file for _, file, _ in part]))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # it is about the whole batch and does not name the image
            if len(part) > 1:
                return [image for one in part for image in self._decoded([one], problems)]
            row, file, crop = part[0]
            image, reason = _by_pillow(file, crop), str(error).splitlines()[0]
            problems.append(Undecodable(row, f"on the GPU: {reason}", lost=image is None))
            return [image]

    def _resize(self, data: Tensor, plans: Tensor, pixels: Tensor) -> None:
        """Write the rows of pixels that the plans name, from decoded images uint8, one after another in `data`."""
        if not len(plans):
            return
        if pixels.is_cuda and has_triton():
            from vitkernels.data.device_crops_kernel import resize_crops

            resize_crops(data, _moved(plans, pixels.device), pixels, self.border)
        else:
            resize_plainly(data, plans, pixels, self.border)


def resize_plainly(data: Tensor, plans: Tensor, pixels: Tensor, border: Sequence[int]) -> None:
    """Write the rows of pixels, uint8 (B, 3, S, S), that the plans name, image by image.

    data: decoded images uint8, one after another: interleaved (H, W, 3), or (3, H, W) and not yet upright.
    """
    for row, flat, crop in _crops(data, plans):
        width, height = upright_size(crop.image_size, crop.orientation)  # as stored: the function is its own inverse
        if crop.orientation == _INTERLEAVED:
            image = flat[: 3 * height * width].view(height, width, 3).permute(2, 0, 1)
        else:
            image = _upright(flat[: 3 * height * width].view(3, height, width), crop.orientation)
        square = center(_cut(image, crop), pixels.shape[-1], border)
        pixels[row] = square.clamp(0, 255).add_(0.5).floor_().byte()


def _crops(data: Tensor, plans: Tensor) -> Iterator[tuple[int, Tensor, DeviceCrop]]:
    """Yield each plan's row, its data uint8 (bytes,), and its DeviceCrop without the data."""
    listed = plans.tolist()
    ends = [begin for _, begin, *_ in listed[1:]] + [len(data)]
    for plan, end in zip(listed, ends, strict=True):
        row, begin, orientation, image_width, image_height, *crop = plan[:9]
        height, width, mode = plan[9:12]
        sizes = (image_width, image_height), Crop(*crop), height, width
        yield row, data[begin:end], DeviceCrop(b"", orientation, *sizes, TORCH_MODES[mode])


def _parts(batch: DeviceCrops) -> Iterator[list[tuple[int, Tensor, DeviceCrop]]]:
    """Yield the encoded rows in parts of one image, or of at most _DECODED_AT_A_TIME decoded bytes."""
    part: list[tuple[int, Tensor, DeviceCrop]] = []
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


def _joined(images: list[Tensor | None], plans: Tensor) -> tuple[Tensor, Tensor]:
    """Return the images uint8 (3, H, W) one after another, and their plans; both without those that are None."""
    found = [image.flatten() for image in images if image is not None]
    plans = plans[[image is not None for image in images]]
    ends = torch.tensor([len(image) for image in found], dtype=torch.int64).cumsum(0)
    plans[1:, FIELDS.index("begin")] = ends[:-1]
    plans[:1, FIELDS.index("begin")] = 0
    return torch.cat(found) if found else torch.empty(0, dtype=torch.uint8), plans


def _cut(image: Tensor, crop: DeviceCrop) -> Tensor:
    """Return the crop of an upright image uint8 (3, H, W), resized to float32 (3, h, w)."""
    top, left, height, width = crop.crop
    part = image[:, max(top, 0) : top + height, max(left, 0) : left + width].float()
    beyond = max(-left, 0), max(left + width - image.shape[2], 0), max(-top, 0), max(top + height - image.shape[1], 0)
    part = F.pad(part, beyond)[None]  # any color will do: the square does not depend on it
    size = (crop.height, crop.width)
    if (height, width) != size:
        part = F.interpolate(part, size=size, mode=crop.interpolation, antialias=True)
    return part[0]


def _upright(image: Tensor, orientation: int) -> Tensor:
    """Return an image (3, H, W) with the EXIF orientation applied, as `decode.contract.upright` does."""
    if orientation in (5, 6, 7, 8):
        image = image.mT
    flipped = [-2] * (orientation in (3, 4, 7, 8)) + [-1] * (orientation in (2, 3, 6, 7))
    return image.flip(flipped) if flipped else image


def _by_pillow(file: Tensor, crop: DeviceCrop) -> Tensor | None:
    """Return the image as the GPU would have decoded it, uint8 (3, H, W) and not upright; None if Pillow cannot."""
    decoder = Decoder("pillow")
    try:
        upright = torch.from_numpy(decoder.decode(decoder.open(file.numpy().tobytes())).copy()).permute(2, 0, 1)
    except Exception:  # a broken file can make a decoder raise almost anything
        return None
    back = {6: 8, 8: 6}.get(crop.orientation, crop.orientation)  # the others are their own inverse
    return _upright(upright, back)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=True)
