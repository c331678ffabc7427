"""Chunks of packed segments: each lies within one segment (Triton).

A segment of 200 tokens gets four chunks, of 64, 64, 64 and 8 rows. Two chunks make a tile of 128 rows, and a work item
of the kernels without listed items. So that these lie within one segment, a segment of more than 64 tokens begins with
an even chunk and gets an even number of them; some are empty. Shorter segments get one chunk, and two of them share a
work item.

With quads, segments of up to 256 tokens get chunks behind those of the longer segments: four chunks are a quad, and no
segment crosses from one quad to the next. Segments are put together so that few chunks remain empty.

Shape suffixes: B batch, N tokens, C chunks of a batch entry.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitkernels.attention.pallas_flash.hopper.chunks import (
    COMPARED,
    COUNT,
    COUNTS,
    END,
    FIELDS,
    FIRST,
    ITEM,
    ITEM_CHUNKS,
    ITEM_COMPARED,
    ITEM_END,
    ITEM_FIRST,
    ITEMS,
    LISTED,
    LONG,
    LONGER,
    PADDING,
    QUAD,
    QUAD_COUNT,
    QUAD_END,
    QUAD_ENTRY,
    QUAD_FIELDS,
    QUAD_FIRST,
    QUAD_ROW,
    QUADS,
    ROW,
    SEGMENT_TOKENS,
    UNMOVED,
    USED_KEYS,
    USED_QUERIES,
)
from vitkernels.attention.pallas_flash.hopper.schedule import ROWS
from vitkernels.bridge.operator import operator
from vitkernels.bridge.triton import next_power_of_2, triton_call

LONGEST = 16384  # tokens of a batch entry: one program holds the ids of all
_BINS = 1024  # segments whose ids are equal modulo this count as recurring
_LEAST = 32  # tokens per segment, on average, for which there are enough chunks

_FIRST, _END, _COMPARED, _ROW, _COUNT = (tl.constexpr(x) for x in (FIRST, END, COMPARED, ROW, COUNT))
_ITEM, _ITEM_CHUNKS = tl.constexpr(ITEM), tl.constexpr(ITEM_CHUNKS)
_ITEM_FIRST, _ITEM_END, _ITEM_COMPARED = (tl.constexpr(x) for x in (ITEM_FIRST, ITEM_END, ITEM_COMPARED))
_QUAD_ENTRY, _QUAD_FIELDS = tl.constexpr(QUAD_ENTRY), tl.constexpr(QUAD_FIELDS)
_QUAD_ROW, _QUAD_COUNT, _QUAD_FIRST, _QUAD_END = (tl.constexpr(x) for x in (QUAD_ROW, QUAD_COUNT, QUAD_FIRST, QUAD_END))
_USED_QUERIES, _USED_KEYS, _ITEMS, _QUADS = (tl.constexpr(x) for x in (USED_QUERIES, USED_KEYS, ITEMS, QUADS))
_SEGMENT_TOKENS, _LONG, _LONGER, _UNMOVED = (tl.constexpr(x) for x in (SEGMENT_TOKENS, LONG, LONGER, UNMOVED))
# Fields that only the kernel uses: a segment's start; the segment that begins with a chunk, or -1; a chunk's id, and
# how many rows have it.
_START, _SEGMENT, _ID, _ROWS_OF_ID = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7), tl.constexpr(13)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _chunks_of_both(first_even, first_odd, next_even, next_odd):
    """Return how many chunks two runs of segments take, if the first begins with an even or with an odd chunk."""
    even = first_even + tl.where(first_even % 2 == 0, next_even, next_odd)
    odd = first_odd + tl.where(first_odd % 2 == 1, next_even, next_odd)
    return even, odd


@triton.jit
def _rank_and_count(flags):
    """Return how many flags precede each one, and how many there are."""
    ones = flags.to(tl.int32)
    return tl.cumsum(ones, 0) - ones, tl.sum(ones, 0)


@triton.jit
def _store_starts(ids_ptr, chunks_ptr, ids_n, i, N, C, FIELDS: tl.constexpr):
    """Store each segment's start in the record with the segment's number; return the number of segments."""
    ids = tl.load(ids_ptr + i * ids_n, mask=i < N, other=0)
    before = tl.load(ids_ptr + (i - 1) * ids_n, mask=(i > 0) & (i < N), other=0)
    begins = ((i < N) & ((i == 0) | (ids != before))).to(tl.int32)
    number = tl.cumsum(begins, 0) - 1
    tl.store(chunks_ptr + number * FIELDS + _START, i, mask=(begins > 0) & (number < C))
    return tl.sum(begins, 0)


@triton.jit
def _places_in_quads(own):
    """Return the first chunk of each segment of one to four chunks, counted from the first quad's, and how many follow.

    Quads hold segments of four chunks; of three, each with one of a single chunk; of two and two; of single chunks.
    """
    rank4, count4 = _rank_and_count(own == 4)
    rank3, count3 = _rank_and_count(own == 3)
    rank2, count2 = _rank_and_count(own == 2)
    rank1, count1 = _rank_and_count(own == 1)
    behind_threes = tl.minimum(count1, count3)
    pairs = 4 * (count4 + count3)
    singles = pairs + 2 * count2
    of_one = tl.where(rank1 < behind_threes, 4 * (count4 + rank1) + 3, singles + rank1 - behind_threes)
    of_two = pairs + 2 * rank2
    of_more = 4 * tl.where(own == 3, count4 + rank3, rank4)
    return tl.where(own == 1, of_one, tl.where(own == 2, of_two, of_more)), singles + count1 - behind_threes


@triton.jit
def _store_places(
    ids_ptr, chunks_ptr, ids_n, chunk, segments, N, C,
    ROWS: tl.constexpr, FIELDS: tl.constexpr, QUAD: tl.constexpr, HAS_QUADS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Store the number of each segment in the record of its first chunk.

    Return how many chunks are used outside quads, the first quad's first chunk, the number of quads, and whether all
    chunks fit. One of several chunks that would begin with an odd chunk leaves this one empty.
    """
    record = chunks_ptr + chunk * FIELDS
    is_segment = chunk < tl.minimum(segments, C)
    start = tl.load(record + _START, mask=is_segment, other=0)
    end = tl.load(record + FIELDS + _START, mask=chunk + 1 < tl.minimum(segments, C), other=N)
    ids_of_segments = tl.load(ids_ptr + start * ids_n, mask=is_segment, other=0)
    recurs = tl.max(tl.histogram(ids_of_segments.to(tl.int32) & (BINS - 1), BINS, mask=is_segment), 0) > 1
    own = tl.where(is_segment, (end - start + ROWS - 1) // ROWS, 0)
    in_quad = HAS_QUADS & (own <= QUAD)
    owned = tl.where(in_quad, 0, tl.where(own > 1, (own + 1) // 2 * 2, own))
    if_odd = owned + (owned > 1).to(tl.int32)
    so_far, _ = tl.associative_scan((owned, if_odd), 0, _chunks_of_both)
    base = so_far - owned
    used = (tl.max(so_far, 0) + 1) // 2 * 2
    first_quad = (used + QUAD - 1) // QUAD * QUAD
    quads = 0
    if HAS_QUADS:
        place, of_quads = _places_in_quads(own)
        base = tl.where(in_quad, first_quad + place, base)
        quads = (of_quads + QUAD - 1) // QUAD
    fits = (segments <= C) & (tl.maximum(used, first_quad + quads * QUAD) <= C) & (recurs == 0)
    tl.store(chunks_ptr + base * FIELDS + _SEGMENT, chunk, mask=is_segment & (base < C))
    return used, first_quad, quads, fits


@triton.jit
def _store_items(
    chunks_ptr, chunk, exists, first, last, full, own, count, FIELDS: tl.constexpr, LISTED: tl.constexpr
):  # fmt: skip
    """List the work items: a segment's chunks, divided as evenly as possible; return how many there are.

    One of one chunk shares an item with the next one.
    """
    record, position = chunks_ptr + chunk * FIELDS, chunk - first
    is_single = own == 1
    items = tl.where(is_single, 1 - chunk % 2, (own + LISTED - 1) // LISTED)  # of this chunk's segment
    so_far = tl.cumsum(tl.where((count > 0) & (position == 0), items, 0), 0)
    item = (position * items + own - 1) // own  # the first that begins here or later
    begins = (count > 0) & (item < items) & (item * own // tl.maximum(items, 1) == position)
    size = (item + 1) * own // tl.maximum(items, 1) - position
    of_item = chunks_ptr + (so_far - items + item) * FIELDS
    tl.store(of_item + _ITEM, chunk, mask=begins)
    tl.store(of_item + _ITEM_CHUNKS, tl.where(is_single, 2, size), mask=begins)
    tl.store(of_item + _ITEM_FIRST, first, mask=begins)
    tl.store(of_item + _ITEM_END, tl.where(is_single, chunk + 2, last), mask=begins)
    tl.store(of_item + _ITEM_COMPARED, tl.where(is_single, chunk, full), mask=begins)
    listed = tl.max(so_far, 0)
    is_empty = exists & (chunk >= listed)
    tl.store(record + _ITEM, 0 * chunk, mask=is_empty)
    tl.store(record + _ITEM_CHUNKS, 0 * chunk, mask=is_empty)
    tl.store(record + _ITEM_FIRST, 0 * chunk, mask=is_empty)
    tl.store(record + _ITEM_END, 0 * chunk, mask=is_empty)
    tl.store(record + _ITEM_COMPARED, 0 * chunk, mask=is_empty)
    return listed


@triton.jit
def _store_ids(
    ids_ptr, out_ptr, chunks_ptr, ids_n, i, end, fits, N,
    PADDING: tl.constexpr, ROWS: tl.constexpr, FIELDS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store the ids of the rows up to `end`, in the order of the chunks: the number of the segment's first chunk."""
    for place in range(0, end, TOKENS):
        at = place + i
        inside = at < end
        of_chunk = chunks_ptr + at // ROWS * FIELDS
        own_rows = tl.load(of_chunk + _ROWS_OF_ID, mask=inside & fits, other=0)
        packed = tl.where(at % ROWS < own_rows, tl.load(of_chunk + _ID, mask=inside & fits, other=0), PADDING)
        plain = tl.load(ids_ptr + at * ids_n, mask=(at < N) & (fits == 0), other=0).to(tl.int32)
        tl.store(out_ptr + at, tl.where(fits, packed, tl.where(at < N, plain, PADDING)), mask=inside)


@triton.jit
def packed_chunks_kernel(
    ids_ptr, out_ptr, chunks_ptr, used_ptr, ids_b, ids_n, N, C,
    PADDING: tl.constexpr, ROWS: tl.constexpr, FIELDS: tl.constexpr, LISTED: tl.constexpr, QUAD: tl.constexpr,
    HAS_QUADS: tl.constexpr, CAN_FUSE: tl.constexpr, TOKENS: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Fill the ids and chunks of one batch entry; see `packed_chunks`. TOKENS and CHUNKS are powers of two >= N, C.

    Only the first step is a scan of all tokens, as scans take most of the time. The steps communicate through the
    records: a barrier lies between the stores of one step and the loads of the next.
    """
    b = tl.cast(tl.program_id(0), tl.int64)
    ids_ptr += b * ids_b
    out_ptr += b * C * ROWS
    all_chunks_ptr = chunks_ptr
    chunks_ptr += b * C * FIELDS
    chunk = tl.arange(0, CHUNKS)
    record, exists = chunks_ptr + chunk * FIELDS, chunk < C
    tl.store(record + _SEGMENT, -1 + 0 * chunk, mask=exists)

    i = tl.arange(0, TOKENS)
    segments = _store_starts(ids_ptr, chunks_ptr, ids_n, i, N, C, FIELDS)
    tl.debug_barrier()
    used, first_quad, quads, fits = _store_places(
        ids_ptr, chunks_ptr, ids_n, chunk, segments, N, C, ROWS, FIELDS, QUAD, HAS_QUADS, BINS
    )
    end_of_quads = first_quad + quads * QUAD
    tl.debug_barrier()

    # Records. If the chunks do not fit, they lie at multiples of 64, as those of one segment, and compare all ids.
    segment = tl.load(record + _SEGMENT, mask=exists, other=-1)
    first = tl.associative_scan(tl.where(fits & (segment >= 0), chunk, 0), 0, _larger)
    segment = tl.load(chunks_ptr + first * FIELDS + _SEGMENT, mask=exists & fits, other=0)
    of_segment = chunks_ptr + segment * FIELDS
    is_segment = exists & fits
    start = tl.load(of_segment + _START, mask=is_segment, other=0)
    end = tl.load(of_segment + FIELDS + _START, mask=is_segment & (segment + 1 < segments), other=N)
    used = tl.where(fits, used, (N + 2 * ROWS - 1) // (2 * ROWS) * 2)
    own = (end - start + ROWS - 1) // ROWS
    row = tl.minimum(start + (chunk - first) * ROWS, N)
    count = tl.minimum(tl.maximum(end - row, 0), ROWS)
    last = first + own
    full = tl.where(fits, first + (end - start) // ROWS, 0)
    is_used = chunk < used
    in_quad = fits & (chunk >= first_quad) & (chunk < end_of_quads)
    quad_count = tl.where(in_quad, count, 0)
    count = tl.where(in_quad, 0, tl.where(fits | (count == 0), count, ROWS))
    tl.store(record + _FIRST, tl.where(is_used, first, C), mask=exists)
    tl.store(record + _END, tl.where(is_used, last, 0), mask=exists)
    tl.store(record + _COMPARED, tl.where(is_used, full, C), mask=exists)
    tl.store(record + _ROW, row, mask=exists)
    tl.store(record + _COUNT, count, mask=exists)
    tl.store(record + _ID, first, mask=exists)
    tl.store(record + _ROWS_OF_ID, count + quad_count, mask=exists)
    tl.store(record + _SEGMENT_TOKENS, end - start, mask=exists)
    if CAN_FUSE:
        tl.atomic_add(used_ptr + _LONGER, tl.sum(tl.where(count > 0, tl.where(own >= _LONG, own, -own), 0), 0))
        tl.atomic_add(used_ptr + _UNMOVED, 1 - fits.to(tl.int32))
    if HAS_QUADS:
        listed = tl.atomic_add(used_ptr + _QUADS, tl.where(fits, quads, 0)) + (chunk - first_quad) // QUAD
        entry = all_chunks_ptr + listed * FIELDS + _QUAD_ENTRY + (chunk - first_quad) % QUAD * _QUAD_FIELDS
        before = (b * C).to(tl.int32)
        tl.store(entry + _QUAD_ROW, row, mask=in_quad)
        tl.store(entry + _QUAD_COUNT, quad_count, mask=in_quad)
        tl.store(entry + _QUAD_FIRST, before + first, mask=in_quad)
        tl.store(entry + _QUAD_END, before + tl.where(quad_count > 0, last, first), mask=in_quad)

    listed = _store_items(chunks_ptr, chunk, exists, first, last, full, own, count, FIELDS, LISTED)
    tl.atomic_max(used_ptr + _USED_QUERIES, used)
    tl.atomic_max(used_ptr + _USED_KEYS, used)
    tl.atomic_max(used_ptr + _ITEMS, listed)
    tl.debug_barrier()
    end = tl.maximum(used, tl.where(fits, end_of_quads, 0)) * ROWS
    _store_ids(ids_ptr, out_ptr, chunks_ptr, ids_n, i, end, fits, N, PADDING, ROWS, FIELDS, TOKENS)


@operator(
    "pallas_flash_hopper_packed_chunks(Tensor segment_ids, bool has_quads, bool can_fuse) -> (Tensor, Tensor, Tensor)"
)
def packed_chunks(segment_ids: Tensor, has_quads: bool, can_fuse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ids (B, 64 C), the chunks (B, C, 32), and counts (6,), of packed segments (B, N).

    Queries and keys have the same ids and chunks; see chunks.py for the counts. If an id of a batch entry may recur
    after other ids, or if segments are so short that their chunks exceed C, the chunks of the batch entry lie at
    multiples of 64, and compare all ids.

    has_quads: put the chunks of segments of up to 256 tokens into quads. can_fuse: whether the call has a fused
    backward kernel, and so counts what prefers_fused needs.
    """
    B, N = segment_ids.shape
    C = _chunks(N)
    ids = segment_ids.new_empty(B, C * ROWS, dtype=torch.int32)
    chunks = segment_ids.new_empty(B, C, FIELDS, dtype=torch.int32)
    used = segment_ids.new_zeros(COUNTS, dtype=torch.int32)
    tokens = next_power_of_2(N)
    triton_call(
        segment_ids, ids, chunks, used, *segment_ids.stride(), N, C, kernel=packed_chunks_kernel, grid=(B,),
        PADDING=PADDING, ROWS=ROWS, FIELDS=FIELDS, LISTED=LISTED, QUAD=QUAD, HAS_QUADS=has_quads, CAN_FUSE=can_fuse,
        TOKENS=tokens, CHUNKS=next_power_of_2(C), BINS=_BINS, num_warps=min(16, max(4, tokens // 256)),
    )  # fmt: skip
    return ids, chunks, used


@packed_chunks.register_fake
def _(segment_ids, has_quads, can_fuse):
    B, N = segment_ids.shape
    C = _chunks(N)
    like = segment_ids.new_empty
    return (
        like(B, C * ROWS, dtype=torch.int32),
        like(B, C, FIELDS, dtype=torch.int32),
        like(COUNTS, dtype=torch.int32),
    )


def _chunks(N: int) -> int:
    """Return C: enough for segments of at least _LEAST tokens, and for chunks at multiples of 64."""
    return 2 * -(-N // _LEAST)
