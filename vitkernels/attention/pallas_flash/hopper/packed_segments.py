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
    COUNT,
    COUNTS,
    FIELDS,
    FIRST,
    ITEM,
    ITEM_COMPARED,
    ITEMS,
    LISTED,
    LONG_CHUNKS,
    LONG_SURPLUS,
    PADDING,
    QUAD,
    QUAD_ENTRY,
    QUAD_FIELDS,
    QUADS,
    UNMOVED_ENTRIES,
    USED_KEYS,
    USED_QUERIES,
)
from vitkernels.attention.pallas_flash.hopper.schedule import LONG, LONG_IF_EVEN, ROWS
from vitkernels.bridge.operator import operator
from vitkernels.bridge.triton import next_power_of_2, triton_call

LONGEST = 16384  # tokens of a batch entry: more would not fit into the words of a segment
_BINS = 1024  # segments whose ids are equal modulo this count as recurring
_LEAST = 32  # tokens per segment, on average, for which there are enough chunks
_BLOCK = 4096  # tokens processed at once

_FIRST, _COUNT = tl.constexpr(FIRST), tl.constexpr(COUNT)
_ITEM, _ITEM_COMPARED = tl.constexpr(ITEM), tl.constexpr(ITEM_COMPARED)
_QUAD_ENTRY, _QUAD_FIELDS = tl.constexpr(QUAD_ENTRY), tl.constexpr(QUAD_FIELDS)
_USED_QUERIES, _USED_KEYS, _ITEMS, _QUADS = (tl.constexpr(x) for x in (USED_QUERIES, USED_KEYS, ITEMS, QUADS))
_LONG, _LONG_IF_EVEN = tl.constexpr(LONG), tl.constexpr(LONG_IF_EVEN)
_LONG_SURPLUS, _UNMOVED_ENTRIES, _LONG_CHUNKS = (tl.constexpr(x) for x in (LONG_SURPLUS, UNMOVED_ENTRIES, LONG_CHUNKS))
# The kernel keeps words of its own. Per batch entry, there are _PARTS arrays of C words, and one of _BINS words:
# - by segment: its start in the lower bits, and its bin, that is, its id modulo _BINS;
# - _SEGMENTS, by chunk: the start and the length of the segment that begins there, or 0;
# - _ITEMS_SO_FAR, by chunk: the number of items up to the last one of the segment that begins there;
# - _ROWS_OF_ID, by chunk: how many rows have the chunk's id, and the id;
# - by bin: one of its segments.
_SEGMENTS, _ITEMS_SO_FAR, _ROWS_OF_ID, _PARTS = (tl.constexpr(x) for x in range(1, 5))
# Bits of the lower one of two numbers in a word. While segments are summed up, chunks lie below items.
_START_BITS, _CHUNKS_BITS, _ROWS_BITS = tl.constexpr(15), tl.constexpr(16), tl.constexpr(7)
_START_MASK, _CHUNKS_MASK, _ROWS_MASK = tl.constexpr(2**15 - 1), tl.constexpr(2**16 - 1), tl.constexpr(2**7 - 1)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _larger_of_both(a, b, next_a, next_b):
    return tl.maximum(a, next_a), tl.maximum(b, next_b)


@triton.jit
def _sums_of_both(even, odd, counts, next_even, next_odd, next_counts):
    """Return the sums of two runs of segments.

    The chunks and items are those of a run that begins with an even or with an odd chunk; the first run decides which
    ones of the second count.
    """
    behind_even = even + tl.where(even % 2 == 0, next_even, next_odd)
    behind_odd = odd + tl.where(odd % 2 == 1, next_even, next_odd)
    return behind_even, behind_odd, counts + next_counts


@triton.jit
def _store_four(address, a, b, c, d, mask):
    """Store four numbers side by side at each address, with one instruction, as each address takes a cycle."""
    numbers = tl.join(tl.join(a, c), tl.join(b, d)).reshape(a.shape[0], 4)
    tl.store(address[:, None] + tl.arange(0, 4)[None, :], numbers, mask=mask[:, None])


@triton.jit
def _store_starts(ids_ptr, words_ptr, segment_of_bin_ptr, ids_n, N, C, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Store each segment's start and id, and write its number to the bin of its id; return the number of segments.

    Of several segments with one bin, only one will find its own number there.
    """
    segments = 0
    for place in range(0, N, BLOCK):
        i = place + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + i * ids_n, mask=i < N, other=0)
        before = tl.load(ids_ptr + (i - 1) * ids_n, mask=(i > 0) & (i < N), other=0)
        begins = ((i < N) & ((i == 0) | (ids != before))).to(tl.int32)
        number = segments + tl.cumsum(begins, 0) - 1
        stored = (begins > 0) & (number < C)
        bin = ids.to(tl.int32) & (BINS - 1)
        tl.store(words_ptr + number, i | bin << _START_BITS, mask=stored)
        tl.store(segment_of_bin_ptr + bin, number, mask=stored)
        segments += tl.sum(begins, 0)
    return segments


@triton.jit
def _place_in_quads(own, rank, counts):
    """Return the first chunk of each segment of one to four chunks, counted from the first quad's, and how many follow.

    rank: how many segments of as many chunks precede this one. counts: how many have one, two, three and four chunks,
    in 16 bits each. Quads hold segments of four chunks; of three, each with one of a single chunk; of two and two; of
    single chunks.
    """
    count1, count2 = (counts & 0xFFFF).to(tl.int32), (counts >> 16 & 0xFFFF).to(tl.int32)
    count3, count4 = (counts >> 32 & 0xFFFF).to(tl.int32), (counts >> 48).to(tl.int32)
    behind_threes = tl.minimum(count1, count3)
    pairs = 4 * (count4 + count3)
    singles = pairs + 2 * count2
    of_one = tl.where(rank < behind_threes, 4 * (count4 + rank) + 3, singles + rank - behind_threes)
    of_two = pairs + 2 * rank
    of_more = 4 * tl.where(own == 3, count4 + rank, rank)
    return tl.where(own == 1, of_one, tl.where(own == 2, of_two, of_more)), singles + count1 - behind_threes


@triton.jit
def _store_segments(
    words_ptr, segment_of_bin_ptr, chunk, segments, N, C, ROWS: tl.constexpr, LISTED: tl.constexpr, QUAD: tl.constexpr,
    HAS_QUADS: tl.constexpr,
):  # fmt: skip
    """Store each segment's start, length and items so far at its first chunk.

    Return how many chunks are used outside quads, the first quad's first chunk, the number of quads, the number of
    items, and whether all chunks fit. One of several chunks that would begin with an odd chunk leaves this one empty.
    """
    stored = tl.minimum(segments, C)
    is_segment = chunk < stored
    word = tl.load(words_ptr + chunk, mask=is_segment, other=0)
    next_word = tl.load(words_ptr + chunk + 1, mask=chunk + 1 < stored, other=N)
    recurs = tl.load(segment_of_bin_ptr + (word >> _START_BITS), mask=is_segment, other=0) != chunk
    start = word & _START_MASK
    length = (next_word & _START_MASK) - start
    own = tl.where(is_segment, (length + ROWS - 1) // ROWS, 0)
    in_quad = HAS_QUADS & is_segment & (own <= QUAD)
    is_single = (own == 1) & (in_quad == 0)
    is_longer = (own > 1) & (in_quad == 0)
    owned = tl.where(is_longer, (own + 1) // 2 * 2, is_single.to(tl.int32))
    items = tl.where(is_longer, (own + LISTED - 1) // LISTED, 0) << _CHUNKS_BITS
    if_even = owned + items + (is_single.to(tl.int32) << _CHUNKS_BITS)
    if_odd = owned + items + is_longer.to(tl.int32)
    # Segments of one, two, three and four chunks are counted in 16 bits each.
    shift = tl.where(in_quad, 16 * (own - 1), 0).to(tl.int64)
    in_quad_of_size = in_quad.to(tl.int64) << shift
    so_far, _, ranks = tl.associative_scan((if_even, if_odd, in_quad_of_size), 0, _sums_of_both)
    flagged = so_far | ((is_segment & recurs).to(tl.int32) << 30)
    total, counts = tl.reduce((flagged, ranks), 0, _larger_of_both)

    used = ((total & _CHUNKS_MASK) + 1) // 2 * 2
    first_quad = (used + QUAD - 1) // QUAD * QUAD
    rank = ((ranks - in_quad_of_size) >> shift).to(tl.int32) & _CHUNKS_MASK
    place, of_quads = _place_in_quads(own, rank, counts)
    quads = (of_quads + QUAD - 1) // QUAD
    first = tl.where(in_quad, first_quad + place, (so_far & _CHUNKS_MASK) - owned)
    fits = (segments <= C) & (tl.maximum(used, first_quad + quads * QUAD) <= C) & (total >> 30 == 0)
    tl.store(words_ptr + _SEGMENTS * C + first, start + (length << _START_BITS), mask=is_segment & (first < C))
    tl.store(words_ptr + _ITEMS_SO_FAR * C + first, so_far >> _CHUNKS_BITS, mask=is_segment & (first < C))
    return used, first_quad, quads, total >> _CHUNKS_BITS, fits


@triton.jit
def _store_records(
    record, ids_of_chunks_ptr, chunk, exists, first, start, length, used, in_quad, fits, N, C, ROWS: tl.constexpr
):  # fmt: skip
    """Store each chunk's record, its id, and how many rows have it.

    Return the chunks' first rows; how many rows have their id; the end of the chunks of their segment, and the first of
    these that must be compared; and how many rows are theirs for the kernels that do not process quads.
    """
    row = tl.minimum(start + (chunk - first) * ROWS, N)
    rows = tl.minimum(tl.maximum(start + length - row, 0), ROWS)
    last = first + (length + ROWS - 1) // ROWS
    full = tl.where(fits, first + length // ROWS, 0)
    count = tl.where(in_quad, 0, rows)
    is_used = chunk < used
    needed, end, compared = tl.where(is_used, first, C), tl.where(is_used, last, 0), tl.where(is_used, full, C)
    _store_four(record + _FIRST, needed, end, compared, row, exists)
    _store_four(record + _COUNT, count, length, 0 * chunk, 0 * chunk, exists)
    tl.store(ids_of_chunks_ptr + chunk, first << _ROWS_BITS | rows, mask=exists)
    return row, rows, last, full, count


@triton.jit
def _store_items(
    list_ptr, b, chunk, first, last, full, own, start, length, count, so_far, FIELDS: tl.constexpr, LISTED: tl.constexpr
):
    """List the work items of batch entry b: a segment's chunks, divided as evenly as possible.

    One of one chunk shares an item with the next one. so_far: the number of items up to the chunk's segment.
    """
    position = chunk - first
    is_single = own == 1
    items = tl.where(is_single, 1 - chunk % 2, (own + LISTED - 1) // LISTED)  # of this chunk's segment
    item = (position * items + own - 1) // own  # the first that begins here or later
    begins = (count > 0) & (item < items) & (item * own // tl.maximum(items, 1) == position)
    size = tl.where(is_single, 2, (item + 1) * own // tl.maximum(items, 1) - position)
    last = tl.where(is_single, chunk + 2, last)
    of_item = list_ptr + (so_far - items + item) * FIELDS
    _store_four(of_item + _ITEM, chunk, size, first, last, begins)
    compared, entry = tl.where(is_single, chunk, full), b.to(tl.int32) + 0 * chunk
    _store_four(of_item + _ITEM_COMPARED, compared, length, start, entry, begins)


@triton.jit
def _count_long(counts_ptr, own, count, fits, fewest_chunks):
    """Add what the fused backward kernel needs to the counts. own: the number of chunks of each chunk's segment."""
    is_long = (own >= fewest_chunks) & ((own >= _LONG) | ((own >= _LONG_IF_EVEN) & (own % 2 == 0)))
    tl.atomic_add(
        counts_ptr + _LONG_SURPLUS, tl.sum(tl.where(count > 0, tl.where(is_long, own, -own), 0), 0), sem="relaxed"
    )
    tl.atomic_add(counts_ptr + _LONG_CHUNKS, tl.sum(((count > 0) & is_long).to(tl.int32), 0), sem="relaxed")
    tl.atomic_add(counts_ptr + _UNMOVED_ENTRIES, 1 - fits.to(tl.int32), sem="relaxed")


@triton.jit
def _store_ids(
    ids_ptr, out_ptr, ids_of_chunks_ptr, ids_n, chunks, fits, N,
    PADDING: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the ids of these chunks' rows, in the order of the chunks: the number of the segment's first chunk."""
    row = tl.arange(0, ROWS)[None, :]
    for place in range(0, chunks, BLOCK // ROWS):
        chunk = place + tl.arange(0, BLOCK // ROWS)
        word = tl.load(ids_of_chunks_ptr + chunk, mask=chunk < chunks, other=0)[:, None]
        at = chunk[:, None] * ROWS + row
        ids = tl.where(row < (word & _ROWS_MASK), word >> _ROWS_BITS, PADDING)
        if not fits:
            ids = tl.where(at < N, tl.load(ids_ptr + at * ids_n, mask=at < N, other=0).to(tl.int32), PADDING)
        tl.store(out_ptr + at, ids, mask=chunk[:, None] < chunks)


# With known strides, several aligned numbers would be loaded at once, and then moved to other threads for the scans.
@triton.jit(do_not_specialize=["ids_b", "words_b", "fewest_chunks"])
def packed_chunks_kernel(
    ids_ptr, out_ptr, chunks_ptr, counts_ptr, words_ptr, ids_b, ids_n, words_b, N, C, fewest_chunks,
    PADDING: tl.constexpr, ROWS: tl.constexpr, FIELDS: tl.constexpr, LISTED: tl.constexpr, QUAD: tl.constexpr,
    HAS_QUADS: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill the ids and chunks of one batch entry; see `packed_chunks`.

    CHUNKS is a power of two >= C. It is also at least the number of threads, as otherwise each thread would store fewer
    than four numbers of a record.

    The steps communicate through the kernel's own words: a barrier lies between the stores of one step and the loads
    of the next. BLOCK tokens are processed at once. The atomics are relaxed, as others wait for all earlier stores.
    """
    b = tl.cast(tl.program_id(0), tl.int64)
    ids_ptr += b * ids_b
    out_ptr += b * C * ROWS
    words_ptr += b * words_b
    all_chunks_ptr = chunks_ptr
    chunks_ptr += b * C * FIELDS
    segments_ptr, items_ptr = words_ptr + _SEGMENTS * C, words_ptr + _ITEMS_SO_FAR * C
    ids_of_chunks_ptr, segment_of_bin_ptr = words_ptr + _ROWS_OF_ID * C, words_ptr + _PARTS * C
    chunk = tl.arange(0, CHUNKS)
    record, exists = chunks_ptr + chunk * FIELDS, chunk < C
    tl.store(segments_ptr + chunk, 0 * chunk, mask=exists)
    segments = _store_starts(ids_ptr, words_ptr, segment_of_bin_ptr, ids_n, N, C, BINS, BLOCK)
    tl.debug_barrier()
    used, first_quad, quads, listed, fits = _store_segments(
        words_ptr, segment_of_bin_ptr, chunk, segments, N, C, ROWS, LISTED, QUAD, HAS_QUADS
    )
    tl.debug_barrier()

    # Records. If the chunks do not fit, they lie at multiples of 64, as those of one segment, and compare all ids.
    begins = tl.load(segments_ptr + chunk, mask=exists, other=0) > 0
    if HAS_QUADS:  # before the loaded numbers are needed, so that the sum arrives in the same time
        quad = (
            tl.atomic_add(counts_ptr + _QUADS, tl.where(fits, quads, 0), sem="relaxed") + (chunk - first_quad) // QUAD
        )
    first = tl.associative_scan(tl.where(fits & begins, chunk, 0), 0, _larger)
    word = tl.where(fits, tl.load(segments_ptr + first), N << _START_BITS)
    start, length = word & _START_MASK, word >> _START_BITS
    own = (length + ROWS - 1) // ROWS
    used = tl.where(fits, used, (N + 2 * ROWS - 1) // (2 * ROWS) * 2)
    listed = tl.where(fits, listed, (N + LISTED * ROWS - 1) // (LISTED * ROWS))
    items = tl.where(fits, tl.load(items_ptr + first), listed)
    list_ptr = all_chunks_ptr + tl.atomic_add(counts_ptr + _ITEMS, listed, sem="relaxed").to(tl.int64) * FIELDS
    tl.atomic_max(counts_ptr + _USED_QUERIES, used, sem="relaxed")
    tl.atomic_max(counts_ptr + _USED_KEYS, used, sem="relaxed")

    in_quad = fits & (chunk >= first_quad) & (chunk < first_quad + quads * QUAD)
    row, rows, last, full, count = _store_records(
        record, ids_of_chunks_ptr, chunk, exists, first, start, length, used, in_quad, fits, N, C, ROWS
    )
    if HAS_QUADS:
        entry = all_chunks_ptr + quad * FIELDS + _QUAD_ENTRY + (chunk - first_quad) % QUAD * _QUAD_FIELDS
        own_index = (b * C).to(tl.int32) + first
        _store_four(entry, row, rows, own_index, tl.where(rows > 0, own_index + own, own_index), in_quad)
    _store_items(list_ptr, b, chunk, first, last, full, own, start, length, count, items, FIELDS, LISTED)
    if HAS_QUADS:
        _count_long(counts_ptr, own, count, fits, fewest_chunks)
    tl.debug_barrier()
    end = tl.maximum(used, tl.where(fits, first_quad + quads * QUAD, 0))
    _store_ids(ids_ptr, out_ptr, ids_of_chunks_ptr, ids_n, end, fits, N, PADDING, ROWS, BLOCK)


@operator(
    "pallas_flash_hopper_packed_chunks(Tensor segment_ids, bool has_quads, SymInt fewest_chunks)"
    " -> (Tensor, Tensor, Tensor)"
)
def packed_chunks(segment_ids: Tensor, has_quads: bool, fewest_chunks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ids (B, 64 C), the chunks (B, C, 32), and counts (7,), of packed segments (B, N).

    Queries and keys have the same ids and chunks; see chunks.py for the counts. If an id of a batch entry may recur
    after other ids, or if segments are so short that their chunks exceed C, the chunks of the batch entry lie at
    multiples of 64, and compare all ids.

    has_quads: put the chunks of segments of up to 256 tokens into quads, and count what prefers_fused needs.
    fewest_chunks: how many chunks a segment must have to count as long; see schedule.fewest_chunks.
    """
    B, N = segment_ids.shape
    C = _chunks(N)
    ids = segment_ids.new_empty(B, C * ROWS, dtype=torch.int32)
    chunks = segment_ids.new_empty(B, C, FIELDS, dtype=torch.int32)
    counts = segment_ids.new_zeros(COUNTS, dtype=torch.int32)
    words = segment_ids.new_empty(B, _PARTS * C + _BINS, dtype=torch.int32)
    tokens = next_power_of_2(N)
    warps = 4 if tokens <= 1024 else 8
    triton_call(
        segment_ids, ids, chunks, counts, words, *segment_ids.stride(), words.stride(0), N, C, fewest_chunks,
        kernel=packed_chunks_kernel, grid=(B,), PADDING=PADDING, ROWS=ROWS, FIELDS=FIELDS, LISTED=LISTED, QUAD=QUAD,
        HAS_QUADS=has_quads, CHUNKS=max(32 * warps, next_power_of_2(C)), BINS=_BINS,
        BLOCK=min(tokens, _BLOCK), num_warps=warps,
    )  # fmt: skip
    return ids, chunks, counts


@packed_chunks.register_fake
def _(segment_ids, has_quads, fewest_chunks):
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
