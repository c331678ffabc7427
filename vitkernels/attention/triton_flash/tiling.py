"""Choose the tiles of each flash-attention kernel, and how many programs share a loop.

Tile sizes are fixed here from measurements on Hopper GPUs (notes/triton_flash.md): training starts without autotuning.
A backend can be configured with other sizes (`TritonFlash.configured(tiles=...)`).

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from vitkernels.attention.triton_flash.inputs import FlashInputs, split_head_dim
from vitkernels.bridge.operator import row_strides
from vitkernels.bridge.triton import cdiv, multiprocessors, next_power_of_2


@dataclass(frozen=True)
class TileConfig:
    """Queries (n) and keys (m) per tile, warps per program, software-pipeline stages, registers per thread."""

    n: int
    m: int
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None  # fewer registers: more resident programs per multiprocessor
    fixed: str = ""  # "n" or "m" must not shrink, because a table of segments' tiles has been made for it

    @property
    def options(self) -> dict[str, int]:
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}

    def smaller(self) -> "TileConfig | None":
        """Return the next configuration that needs less shared memory: fewer stages, then half the tile."""
        if self.num_stages > 1:
            return replace(self, num_stages=self.num_stages - 1)
        n, m = 0 if self.fixed == "n" else self.n, 0 if self.fixed == "m" else self.m
        if max(n, m) == 16:
            return None
        return replace(self, n=n // 2) if n > m else replace(self, m=m // 2)


# Packed sequences. A short segment needs small tiles, and a long one gains little from larger ones.
SEGMENT_ROWS = 64  # rows that a program owns: queries, or keys in the dkdv pass
SEGMENT_STEP = 32  # rows that it streams at a time
LEAST_SEGMENT = 32  # average length of segments, from which on their tiles always fit into the table; see segments.py
LONGEST_PACKED = 16384  # tokens of a batch entry whose ids one program can hold

PROGRAMS_PER_MULTIPROCESSOR = 8
_multiprocessors = cache(multiprocessors)  # asked in every call


def runs(entries: int, owners: int, device: torch.device) -> tuple[int, int]:
    """Split the `entries` that each of `owners` programs would loop over; return the number of runs and their length.

    Each run has its own programs, which write its partial sums, so the number of runs bounds the workspace.
    """
    wanted = max(1, PROGRAMS_PER_MULTIPROCESSOR * _multiprocessors(device) // owners)
    length = max(1, cdiv(entries, wanted))
    return max(1, cdiv(entries, length)), length


def tail_tile(length: int, tile: int) -> int:
    """Return the tile for the remainder of `length` after full tiles: at least 16, for tensor cores; 0 if none."""
    rest = length % tile
    return min(tile, max(16, next_power_of_2(rest))) if rest else 0


def requested_tiles(inputs: FlashInputs, sizes: Sequence[int], which: int) -> TileConfig | None:
    """Return the tiles requested for pass 0 (forward), 1 (dq) or 2 (dkdv), or None to choose by shape.

    sizes: (queries, keys) of each pass in turn, 0 if not requested; or empty.
    """
    n, m = sizes[2 * which : 2 * which + 2] or (0, 0)
    if n == 0:
        return None
    return replace((forward_tiles, dq_tiles, dkdv_tiles)[which](inputs), n=n, m=m, maxnreg=None)


# --- single-tile kernels ----------------------------------------------------------------------------------------------


def fits_one_tile(inputs: FlashInputs, sizes: Sequence[int]) -> bool:
    """Return whether the single-tile kernels run the call: short sequences, no requested tiles.

    float32 calls on CUDA do not run on them: registers cannot hold entire tiles of float32 operands.
    """
    length, width = _size(inputs)
    return (
        not any(sizes)
        and not _is_f32(inputs)
        and width <= 64
        and length <= 64
        and 0 not in (*inputs.q.shape, inputs.k.shape[2])
    )


def single_tile_runs(inputs: FlashInputs) -> tuple[int, int]:
    """Return the runs of batch entries that a head is split into, and their length.

    A program holds one bias during its run, so a bias that varies over the batch makes runs of one entry.
    """
    B, H, _, _ = inputs.q.shape
    if inputs.bias is not None and inputs.bias.stride(0) != 0:
        return B, 1
    return runs(B, H, inputs.q.device)


def single_forward_tiles(inputs: FlashInputs) -> TileConfig:
    """Return tiles that hold all tokens. With fewer stages, loads of the next batch entry would wait for products."""
    return TileConfig(*_covering(inputs), 4, 3 if inputs.segment_ids is None else 4)


def single_backward_tiles(inputs: FlashInputs) -> TileConfig:
    """Return tiles that hold all tokens, as `single_forward_tiles`."""
    return TileConfig(*_covering(inputs), 4, 3)


def _covering(inputs: FlashInputs) -> tuple[int, int]:
    N, M = inputs.q.shape[2], inputs.k.shape[2]
    return max(16, next_power_of_2(N)), max(16, next_power_of_2(M))


# --- kernels with loops over tiles ------------------------------------------------------------------------------------


def _reads_wide_matrix(inputs: FlashInputs) -> bool:
    """Return whether each query has its own mask, or its own bias in float32."""
    has_wide_bias = inputs.bias is not None and inputs.bias.dtype == torch.float32 and row_strides(inputs.bias)[2] != 0
    return has_wide_bias or (inputs.mask is not None and row_strides(inputs.mask)[2] != 0)


def _is_f32(inputs: FlashInputs) -> bool:
    """Return whether products run in float32 on CUDA cores, where registers hold few of a tile's operands."""
    return inputs.q.dtype == torch.float32 and inputs.q.is_cuda


def _size(inputs: FlashInputs) -> tuple[int, int]:
    """Return the longer of queries and keys, and the number of columns of a head's tiles."""
    return max(inputs.q.shape[2], inputs.k.shape[2]), sum(split_head_dim(inputs.q.shape[3]))


def _fits_128(length: int) -> bool:
    """Return whether tiles of 128 rows leave few rows empty."""
    return length > 512 or length % 128 > 64


def _segment_tiles(inputs: FlashInputs, own: str, maxnreg: int) -> TileConfig:
    """Return the tiles of a pass over packed segments, whose programs own queries ("n") or keys ("m")."""
    width = _size(inputs)[1]
    n, m = (SEGMENT_ROWS, SEGMENT_STEP) if own == "n" else (SEGMENT_STEP, SEGMENT_ROWS)
    if width > 128:
        return TileConfig(n, m, 8, 1, fixed=own)
    return TileConfig(n, m, SEGMENT_ROWS // 16, 3, maxnreg if width <= 64 else None, own)


def forward_tiles(inputs: FlashInputs) -> TileConfig:
    """Choose many small programs for short sequences, large tiles for long ones, small steps for ragged ones."""
    length, width = _size(inputs)
    if _is_f32(inputs):
        return TileConfig(32, 32, 4, 1) if width <= 128 else TileConfig(16, 16, 8, 1)
    if inputs.segment_tiles is not None:
        return _segment_tiles(inputs, "n", 80)
    if width > 128:
        return TileConfig(64, 32, 8, 1)
    if inputs.general:
        wide = width <= 64 and length > 512 and not _reads_wide_matrix(inputs)
        return TileConfig(64, 64 if wide else 32, 4, 3)
    if width > 96 and length > 512:
        return TileConfig(128, 64, 8, 3)
    if width > 64 and length % 64 == 0:
        return TileConfig(64, 64, 4, 2)
    if width == 96 and not _fits_128(length):
        return TileConfig(64, 32, 4, 3)
    if width > 80:
        return TileConfig(128, 64, 8, 3)
    if width > 64:
        return TileConfig(128, 64, 8, 3, 128) if _fits_128(length) else TileConfig(64, 64, 4, 3, 128)
    if length > 2048:
        return TileConfig(128, 64, 8, 3, 128)
    if length > 512:
        return TileConfig(128, 64, 8, 3, 104)
    return TileConfig(64, 64, 4, 3) if length % 64 == 0 else TileConfig(64, 32, 4, 3, 80)


def dq_tiles(inputs: FlashInputs) -> TileConfig:
    """Choose the tiles of the dq pass, measured like `forward_tiles`."""
    length, width = _size(inputs)
    if _is_f32(inputs):
        return TileConfig(32, 16, 4, 1) if width <= 128 else TileConfig(16, 16, 8, 1)
    if inputs.segment_tiles is not None:
        return _segment_tiles(inputs, "n", 96)
    if width > 128:
        return TileConfig(64, 32, 8, 1)
    if inputs.general:
        return TileConfig(64, 32, 4, 2 if 64 < width <= 96 else 3)
    if width > 96 and length > 512:
        return TileConfig(128, 32, 8, 3)
    if width > 64 and length % 64 == 0:
        return TileConfig(64, 32, 4, 2)
    if width > 80:
        return TileConfig(64, 32, 4, 3)
    if width > 64:
        return TileConfig(128, 64, 8, 3, 128) if length > 512 else TileConfig(64, 32, 4, 2, 128)
    return TileConfig(128, 64, 8, 3, 128) if length > 512 else TileConfig(64, 32, 4, 3, 96)


def dkdv_tiles(inputs: FlashInputs) -> TileConfig:
    """Choose the tiles of the dkdv pass, measured like `forward_tiles`."""
    length, width = _size(inputs)
    if _is_f32(inputs):
        return TileConfig(16, 32, 4, 1) if width <= 128 else TileConfig(16, 16, 8, 1)
    if inputs.segment_tiles is not None:
        return _segment_tiles(inputs, "m", 128)
    if width > 128:
        return TileConfig(32, 64, 8, 1)
    if inputs.general and width > 96:
        return TileConfig(64, 64, 4, 2)
    if inputs.general:
        return TileConfig(32, 64, 4, 3, (168 if inputs.bias is not None else 128) if width <= 64 else None)
    if width > 96 and length > 512:
        return TileConfig(64, 64, 4, 2)
    if width > 64 and length % 64 == 0:
        return TileConfig(32, 64, 4, 3)
    if width == 96 and not _fits_128(length):
        return TileConfig(32, 64, 4, 3)
    if width > 80:
        return TileConfig(64, 64, 4, 3)
    if width > 64:
        return TileConfig(32, 128, 8, 3, 128) if _fits_128(length) else TileConfig(64, 64, 4, 2, 168)
    if length > 2048:
        return TileConfig(64, 64, 4, 3)
    return TileConfig(64, 64, 4, 3, 168) if length > 512 else TileConfig(32, 64, 4, 3, 128)
