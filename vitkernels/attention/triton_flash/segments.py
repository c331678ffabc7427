"""Tiles of packed sequences: each lies within one segment, and its program streams only that segment.

A table on the device lists the tiles of each batch entry. The number of segments depends on the data, so the table has
a fixed number of rows, and the programs of unused rows exit at once.

Shape suffixes: B batch, N tokens, T tiles of a batch entry.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitkernels.attention.triton_flash.tiling import LEAST_SEGMENT, LONGEST_PACKED, SEGMENT_ROWS
from vitkernels.bridge.operator import operator
from vitkernels.bridge.triton import cdiv, next_power_of_2, triton_call

_BINS = 1024  # of ids, by which `_runs_of_ids` finds those that recur


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def _runs_of_ids(ids_ptr, ids_n, i, N, BINS: tl.constexpr):
    """Return where the run of each token i = 0, 1, ... starts and ends, and whether ids may recur.

    i holds more tokens than N or as many. An id recurs if tokens with other ids lie between tokens with this id. Two
    runs whose ids are equal modulo BINS count as recurring, so up to BINS runs with consecutive ids do not.
    """
    ids = tl.load(ids_ptr + i * ids_n, mask=i < N, other=0)
    before = tl.load(ids_ptr + (i - 1) * ids_n, mask=(i > 0) & (i < N), other=0)
    after = tl.load(ids_ptr + (i + 1) * ids_n, mask=i < N - 1, other=0)
    begins = (i < N) & ((i == 0) | (ids != before))
    start = tl.associative_scan(tl.where(begins, i, 0), 0, _larger)
    last = (i >= N - 1) | (ids != after)
    end = tl.associative_scan(tl.where(last, i + 1, N), 0, _smaller, reverse=True)
    recurs = tl.max(tl.histogram(ids.to(tl.int32) & (BINS - 1), BINS, mask=begins), 0) > 1
    return start, end, recurs


@triton.jit
def segment_tiles_kernel(
    ids_ptr, table_ptr, ids_b, ids_n, N, T,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Fill the table of one batch entry; see `segment_tiles`. TOKENS and TILES are powers of two >= N and T."""
    b = tl.cast(tl.program_id(0), tl.int64)
    ids_ptr += b * ids_b
    table_ptr += b * T * 4
    i = tl.arange(0, TOKENS)
    start, end, recurs = _runs_of_ids(ids_ptr, ids_n, i, N, BINS)

    owns = (i < N) & ((i - start) % ROWS == 0)
    count = tl.sum(owns.to(tl.int32), 0)
    fits = count <= T
    row = table_ptr + (tl.cumsum(owns.to(tl.int32), 0) - 1) * 4
    tl.store(row, i, mask=owns & fits)
    tl.store(row + 1, end, mask=owns & fits)
    tl.store(row + 2, start, mask=owns & fits)
    tl.store(row + 3, tl.zeros([TOKENS], tl.int32) + recurs.to(tl.int32), mask=owns & fits)

    tile = tl.arange(0, TILES)
    row = table_ptr + tile * 4
    rest = (tile < T) & ((tile >= count) | (count > T))
    first = tl.where(fits, 0, tl.minimum(tile * ROWS, N))
    end = tl.where(fits, 0, N)
    tl.store(row, first, mask=rest)
    tl.store(row + 1, end, mask=rest)
    tl.store(row + 2, tl.zeros([TILES], tl.int32), mask=rest)
    tl.store(row + 3, tl.zeros([TILES], tl.int32) + (count > T).to(tl.int32), mask=rest)


@operator("triton_flash_segment_tiles(Tensor segment_ids) -> Tensor")
def segment_tiles(segment_ids: Tensor) -> Tensor:
    """Return the tiles of packed sequences (B, T, 4): first row, end and start of its segment, whether to compare ids.

    A tile has up to SEGMENT_ROWS rows from `first` on, which end where its segment ends, and it streams rows `start` to
    `end`. An unused tile has first = end.

    Tiles compare ids, and stream whatever `keys_in_reach` finds, if an id of the batch entry may recur after other
    ids. If segments are so short that their tiles exceed T, the tiles of the batch entry ignore segments, and compare.
    """
    B, N = segment_ids.shape
    T = _tiles(N)
    table = segment_ids.new_empty(B, T, 4, dtype=torch.int32)
    if B:
        tokens = next_power_of_2(N)
        triton_call(
            segment_ids, table, *segment_ids.stride(), N, T, kernel=segment_tiles_kernel, grid=(B,),
            ROWS=SEGMENT_ROWS, TOKENS=tokens, TILES=next_power_of_2(T), BINS=_BINS,
            num_warps=min(16, max(4, tokens // 256)),
        )  # fmt: skip
    return table


@segment_tiles.register_fake
def _(segment_ids):
    B, N = segment_ids.shape
    return segment_ids.new_empty(B, _tiles(N), 4, dtype=torch.int32)


def _tiles(N: int) -> int:
    """Return T: enough for segments of at least LEAST_SEGMENT tokens, and for tiles that ignore segments."""
    return cdiv(N, min(LEAST_SEGMENT, SEGMENT_ROWS))


def tiles_of_call(x: Tensor, bias, mask, segment_ids: Tensor | None, is_causal, sizes) -> Tensor | None:
    """Return the table of a call whose kernels use it, else None; x has the dtype and device of q.

    This runs outside the attention operators, so a compiled model computes the table once for all layers. Calls with
    bias, mask or causality mask every tile anyway, so they compare ids there. Requested tile sizes, and those of
    float32 on CUDA, may differ from the table's.
    """
    if segment_ids is None:
        return None
    masks = bias is not None or mask is not None or is_causal
    other_sizes = any(sizes) or (x.is_cuda and x.dtype == torch.float32)
    if masks or other_sizes or not SEGMENT_ROWS < segment_ids.shape[1] <= LONGEST_PACKED:
        return None
    return segment_tiles(segment_ids)
