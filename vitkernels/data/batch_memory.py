"""Collect the images of a batch, one after another, in memory that the DataLoader need not copy.

Shapes: B rows, S image side.
"""

import numpy as np
from torch import Tensor

from vitkernels.data.device_crops import LARGEST, DeviceCrop, DeviceCrops
from vitkernels.data.shared_memory import RecycledMemory, new_batch


class PixelBatch:
    """The pixels of a batch, uint8 (B, 3, S, S)."""

    def __init__(self, rows: int, side: int):
        self._pixels = new_batch(rows, 3, side, side)
        self._count = 0

    def put(self, image: Tensor | DeviceCrop | None) -> None:
        """Put the next image, uint8 (3, S, S), or None for a black row without a sample."""
        assert not isinstance(image, DeviceCrop), "a batch without a DeviceCropper"
        self._pixels[self._count] = 0 if image is None else image
        self._count += 1

    def finished(self) -> Tensor:
        return self._pixels


class CropBatch:
    """The DeviceCrops of a batch. memory: for decoded pixels; None if the batch holds files."""

    def __init__(self, rows: int, side: int, memory: RecycledMemory | None):
        self._side = side
        self._images: list[Tensor | DeviceCrop | None] = []
        # Room for the largest crops: the operating system provides only the pages that are written.
        self._memory = None if memory is None else memory.take(rows * LARGEST * 3 * side**2)
        self._bytes = None if self._memory is None else self._memory.numpy()
        self._used = 0

    def put(self, image: Tensor | DeviceCrop | None) -> None:
        """Put the next image. Decoded pixels are copied while in the cache, so that their image can be freed."""
        if self._bytes is not None and isinstance(image, DeviceCrop) and isinstance(image.data, np.ndarray):
            place = self._bytes[self._used : self._used + image.data.size].reshape(image.data.shape)
            place[...] = image.data
            self._used += place.size
            image = image._replace(data=place)
        self._images.append(image)

    def finished(self) -> DeviceCrops:
        data = None if self._memory is None else self._memory[: self._used]
        return DeviceCrops.of(self._images, self._side, data)
