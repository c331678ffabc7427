"""Chunks of packed segments: each lies within one segment (Triton).

A segment of 200 tokens gets four chunks, of 64, 64, 64 and 8 rows. Two chunks make a work item, and a tile of 128 rows.
So that these lie within one segment, a segment of more than 64 tokens begins with an even chunk and gets an even number
of them; some are empty. Shorter segments get one chunk, and two of them share a work item.

Shape suffixes: B batch, N tokens, C chunks of a batch entry.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitkernels.attention.pallas_flash.hopper.chunks import COMPARED, COUNT, END, FIELDS, FIRST, PADDING, ROW
from vitkernels.attention.pallas_flash.hopper.schedule import ROWS
from vitkernels.attention.segment_runs import BINS, runs_of_ids
from vitkernels.bridge.operator import operator
from vitkernels.bridge.triton import next_power_of_2, triton_call

LONGEST = 16384  # tokens of a batch entry: one program holds the ids of all
_LEAST = 32  # tokens per segment, on average, for which there are enough chunks

_FIRST, _END, _COMPARED, _ROW, _COUNT = (tl.constexpr(x) for x in (FIRST, END, COMPARED, ROW, COUNT))


@triton.jit
def _store_record(record, first, end, compared, row, count, mask):
    tl.store(record + _FIRST, first, mask=mask)
    tl.store(record + _END, end, mask=mask)
    tl.store(record + _COMPARED, compared, mask=mask)
    tl.store(record + _ROW, row, mask=mask)
    tl.store(record + _COUNT, count, mask=mask)


@triton.jit
def _chunks_of_both(first_even, first_odd, next_even, next_odd):
    """Return how many chunks two runs of segments take, if the first begins with an even or with an odd chunk."""
    even = first_even + tl.where(first_even % 2 == 0, next_even, next_odd)
    odd = first_odd + tl.where(first_odd % 2 == 1, next_even, next_odd)
    return even, odd


@triton.jit
def packed_chunks_kernel(
    ids_ptr, out_ptr, chunks_ptr, used_ptr, ids_b, ids_n, N, C,
    PADDING: tl.constexpr, ROWS: tl.constexpr, FIELDS: tl.constexpr, TOKENS: tl.constexpr, CHUNKS: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """Fill the ids and chunks of one batch entry; see `packed_chunks`. TOKENS and CHUNKS are powers of two >= N, C."""
    b = tl.cast(tl.program_id(0), tl.int64)
    ids_ptr += b * ids_b
    out_ptr += b * C * ROWS
    chunks_ptr += b * C * FIELDS
    i = tl.arange(0, TOKENS)
    _, begins, start, end, recurs = runs_of_ids(ids_ptr, ids_n, i, N, BINS)
    # Chunks of the token's segment. One of several chunks that would begin with an odd chunk leaves this one empty.
    owned = tl.where(end - start > ROWS, (end - start + 2 * ROWS - 1) // (2 * ROWS) * 2, 1)
    if_even = tl.where(begins, owned, 0)
    if_odd = if_even + tl.where(begins & (owned > 1), 1, 0)
    so_far, _ = tl.associative_scan((if_even, if_odd), 0, _chunks_of_both)
    base = so_far - owned
    used = (tl.max(so_far, 0) + 1) // 2 * 2
    fits = (used <= C) & (recurs == 0)

    # Otherwise chunks lie at multiples of 64 and compare all ids.
    plain = (N + ROWS - 1) // ROWS
    chunk = tl.arange(0, CHUNKS)
    _store_record(
        chunks_ptr + chunk * FIELDS,
        tl.where(fits, C, 0) + 0 * chunk,
        tl.where(fits, 0, plain) + 0 * chunk,
        tl.where(fits, C, 0) + 0 * chunk,
        tl.minimum(chunk * ROWS, N),
        tl.where(fits | (chunk >= plain), 0, ROWS),
        chunk < C,
    )
    used = tl.where(fits, used, (plain + 1) // 2 * 2)
    for first in range(0, used * ROWS, TOKENS):
        place = first + i
        values = tl.where(place < N, tl.load(ids_ptr + place * ids_n, mask=place < N, other=0).to(tl.int32), PADDING)
        tl.store(out_ptr + place, tl.where(fits, PADDING, values), mask=place < used * ROWS)
    tl.atomic_max(used_ptr, used)
    tl.atomic_max(used_ptr + 1, used)
    tl.debug_barrier()  # the stores below overwrite some of those above

    inside = (i < N) & fits
    row = i - start
    tl.store(out_ptr + base * ROWS + row, start, mask=inside)  # the start is an id that no other segment has
    own = base + row // ROWS
    first = inside & (row % ROWS == 0)
    last, full = base + (end - start + ROWS - 1) // ROWS, base + (end - start) // ROWS
    record = chunks_ptr + own * FIELDS
    _store_record(record, base, last, full, i, tl.minimum(end - i, ROWS), first)
    is_followed = first & (owned > 1) & (end - i <= ROWS) & (row // ROWS % 2 == 0)  # by an empty chunk
    _store_record(record + FIELDS, base, last, full, tl.minimum(i + ROWS, N), 0 * i, is_followed)


@operator("pallas_flash_hopper_packed_chunks(Tensor segment_ids) -> (Tensor, Tensor, Tensor)")
def packed_chunks(segment_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ids (B, 64 C), the chunks (B, C, 8), and how many of them are used (2,), of packed segments (B, N).

    Queries and keys have the same ids and chunks. If an id of a batch entry may recur after other ids, or if segments
    are so short that their chunks exceed C, the chunks of the batch entry lie at multiples of 64, and compare all ids.
    """
    B, N = segment_ids.shape
    C = _chunks(N)
    ids = segment_ids.new_empty(B, C * ROWS, dtype=torch.int32)
    chunks = segment_ids.new_empty(B, C, FIELDS, dtype=torch.int32)
    used = segment_ids.new_zeros(2, dtype=torch.int32)
    tokens = next_power_of_2(N)
    triton_call(
        segment_ids, ids, chunks, used, *segment_ids.stride(), N, C, kernel=packed_chunks_kernel, grid=(B,),
        PADDING=PADDING, ROWS=ROWS, FIELDS=FIELDS, TOKENS=tokens, CHUNKS=next_power_of_2(C), BINS=BINS,
        num_warps=min(16, max(4, tokens // 256)),
    )  # fmt: skip
    return ids, chunks, used


@packed_chunks.register_fake
def _(segment_ids):
    B, N = segment_ids.shape
    C = _chunks(N)
    like = segment_ids.new_empty
    return (
        like(B, C * ROWS, dtype=torch.int32),
        like(B, C, FIELDS, dtype=torch.int32),
        like(2, dtype=torch.int32),
    )


def _chunks(N: int) -> int:
    """Return C: enough for segments of at least _LEAST tokens, and for chunks at multiples of 64."""
    return 2 * -(-N // _LEAST)
