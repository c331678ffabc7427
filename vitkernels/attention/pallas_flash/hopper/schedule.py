"""Schedules of the Hopper kernels of `pallas_flash`: tile sizes, pipeline stages and warpgroups.

They are fixed, from measurements on one H200 (notes/pallas_flash_hopper.md), so training starts without autotuning.
"""

import itertools
from dataclasses import dataclass, replace

from vitkernels.attention.pallas_flash.hopper.chunks import LISTED

MULTIPROCESSORS = 132  # of an H100 SXM or H200
ROWS = 64  # rows of a tile that one warpgroup multiplies at once
_SHARED_MEMORY = 227 * 1024  # bytes available to a thread block
_BARRIERS_AND_VECTORS = 4 * 1024
_FEW_BARRIERS_AND_VECTORS = 5 * 512  # of short kernels and of those with a bias; with ids, twice as much


@dataclass(frozen=True)
class Schedule:
    """One persistent thread block: `warpgroups` that compute, 64 rows each, and one that loads.

    It loops over work items with `buffers` buffers for own rows; a ring of `stages` slots streams tiles of `tile` rows
    and continues across items.
    """

    tile: int
    stages: int
    warpgroups: int
    buffers: int = 2
    is_listed: bool = False  # the work items are those that `packed_chunks` lists
    bias_slots: int = 1  # with a bias: of how many tiles it is in shared memory at a time

    def __post_init__(self):
        assert self.warpgroups <= 3, "more warpgroups request more registers than the launch provides, which deadlocks"

    @property
    def registers(self) -> tuple[int, int]:
        """Return the registers per thread of a compute warpgroup and of the loader, of a multiprocessor's 65536."""
        loader = 40 if self.warpgroups <= 2 else 32
        return min(240, (512 - loader) // self.warpgroups // 8 * 8), loader


def for_packed_segments(schedule: Schedule, head_dim: int) -> Schedule:
    """Return the backward schedule of a call whose chunks start where segments start.

    With quads, the pair processes listed work items, mostly of segments that are not long (see LONG). Otherwise items
    are pairs of chunks, so of two warpgroups.
    """
    if takes_quads(head_dim):
        return Schedule(ROWS, 4, LISTED, is_listed=True)
    return replace(schedule, warpgroups=min(2, schedule.warpgroups))


def forward_of_packed_segments(head_dim: int) -> Schedule:
    """Return the forward schedule of packed segments: three warpgroups, with listed work items, where they fit.

    At head dim 64, a third stage gains 1 to 4 % with segments of 320 to 900 tokens, whose items are short; nothing in
    dense calls.
    """
    columns = sum(widths(head_dim))
    if columns > 96:
        return Schedule(128, 2, 2)
    return Schedule(128, 3 if columns >= 64 else 2, LISTED, is_listed=True)


def unsupported_head_dim(head_dim: int) -> str | None:
    """Return why the kernels cannot compute this head dim; None if they can."""
    if head_dim % 8 or not 32 <= head_dim <= 128:
        supported = "head dims 32 to 128 in steps of 8"
        return f"its kernels for NVIDIA support {supported}, not {head_dim}; use triton_flash or sdpa"
    return None


def widths(head_dim: int) -> tuple[int, ...]:
    """Split a row's columns into parts one swizzle wide: 64 -> 64; 72, 80 -> 64, 16; 88 -> 64, 32."""
    full, rest = head_dim // 64, head_dim % 64  # torch.compile cannot trace divmod of a symbol
    return (64,) * full + tuple(w for w in (16, 32, 64) if w >= rest > 0)[:1]


def with_bias(schedule: Schedule, head_dim: int, kept: int, bytes_per_score: int, has_ids: bool) -> Schedule:
    """Return the schedule, or the most similar one, with two slots for the bias of streamed tiles, or with one.

    kept: tiles of 64 own rows per warpgroup.
    """
    row = 2 * sum(widths(head_dim))  # bytes
    free = _SHARED_MEMORY - _FEW_BARRIERS_AND_VECTORS * (1 + has_ids)
    for warpgroups, slots, buffers, tile in itertools.product(
        range(schedule.warpgroups, 0, -1), (2, 1), range(schedule.buffers, 0, -1), range(schedule.tile, 0, -ROWS)
    ):
        used = warpgroups * ROWS * (buffers * kept * row + slots * tile * bytes_per_score)
        stages = min(schedule.stages * schedule.tile // tile, 4, (free - used) // (2 * tile * row))
        if stages >= 2:
            return Schedule(tile, stages, warpgroups, buffers, bias_slots=slots)
    raise AssertionError(f"a bias with head dim {head_dim} does not fit into shared memory")


def forward_schedule(queries: int, keys: int, head_dim: int) -> Schedule:
    columns = sum(widths(head_dim))
    if columns > 96:
        return Schedule(128, 2, min(2, _tiles(queries)))
    warpgroups = 3 if _idle(queries, 3) < 1 / 3 else min(2, _tiles(queries))
    if keys <= 3 * ROWS:
        return Schedule(64, 4, warpgroups)
    return Schedule(128, 2 if columns <= 64 else 3, warpgroups)


# The overlapped forward kernel processes the last tile first from MANY_TILES full tiles on, or if keys fill more than
# half of it. With 4 to 19 full tiles, it takes 0.87 to 0.99 of the time that it took before it had this order (H200).
# With fewer, if the last tile has at most FEW_KEYS keys, the usual order is 2 % faster, with a third stage.
MANY_TILES, FEW_KEYS = 4, 32
_LARGE_TILE = 144  # keys


def overlapped_forward_schedule(queries: int, keys: int, head_dim: int) -> Schedule:
    """Return the schedule of a call without ids whose products overlap.

    At head dims above 96, tiles of 144 keys are faster than tiles of 128 where they are fewer: by at least two, or by
    one of up to seven. At head dims up to 64, a third stage is 4 to 9 % faster where two or three full tiles precede
    one of few keys.
    """
    schedule = forward_schedule(queries, keys, head_dim)
    tiles, rest = -(-keys // schedule.tile), keys % schedule.tile
    if sum(widths(head_dim)) <= 64:
        return replace(schedule, stages=3) if tiles <= MANY_TILES and 0 < rest <= FEW_KEYS else schedule
    fewer = tiles - -(-keys // _LARGE_TILE)
    return replace(schedule, tile=_LARGE_TILE) if fewer >= 2 or (fewer == 1 and tiles <= 7) else schedule


def overlaps_forward(keys: int, head_dim: int, is_causal: bool, has_bias: bool) -> bool:
    """Return whether the products of the forward kernel overlap: it has registers for that, and at least two tiles.

    At head dims 72 to 96, the kernel would have too few registers for three warpgroups. Before it had its present order
    of tiles and instructions, overlap took 10 to 16 % longer on an H200 with a bias in bfloat16, and 3 % less time with
    one in float32.
    """
    return keys >= 256 and widths(head_dim) in ((64,), (64, 64)) and not is_causal and not has_bias


def dq_schedule(queries: int, keys: int, head_dim: int, is_masked: bool, has_bias: bool) -> Schedule:
    columns = sum(widths(head_dim))
    if columns <= 64:
        return _narrow_backward(queries, keys, is_masked, has_bias)
    if columns > 96:
        return Schedule(64, 2, min(3, _tiles(queries)), buffers=1)
    warpgroups = min(2, _tiles(queries)) if _idle(queries, 2) < 1 / 4 else min(3, _tiles(queries))
    return _fitting(warpgroups, head_dim, kept=3)


def dkdv_schedule(queries: int, keys: int, head_dim: int, is_masked: bool, has_bias: bool) -> Schedule:
    if sum(widths(head_dim)) <= 64:
        return _narrow_backward(keys, queries, is_masked, has_bias)
    return _fitting(min(2, _tiles(keys)), head_dim, kept=2)


_FEW_TOKENS = 8  # of a last tile; with more, the first step of the kernel of dk and dv would exceed its registers


def starts_with_two(tokens: int, head_dim: int, schedule: Schedule) -> bool:
    """Return whether the first step of a backward kernel takes two streamed tiles: the last one and the first one.

    The last one then has few tokens. A step of its own takes almost as long as that of a full tile, as it waits as
    often. On an H200, the kernels take 0.96 to 0.99 of the time at 257 to 1025 tokens; at head dim 128, up to 1.08.
    """
    full, rest = divmod(tokens, schedule.tile)
    return schedule.tile == ROWS and sum(widths(head_dim)) <= ROWS and full > 0 and 0 < rest <= _FEW_TOKENS


def _narrow_backward(own: int, streamed: int, is_masked: bool, has_bias: bool) -> Schedule:
    """Choose three warpgroups, or two if a tenth fewer of them idle; under a mask, if any fewer do.

    With a bias, three leave little shared memory for it, and are chosen only if a fifth fewer of them idle.

    Two warpgroups take larger tiles, except under a mask, where larger tiles would exceed their registers.
    """
    least_gain = 0.2 if has_bias else 0 if is_masked else -0.1
    if _tiles(own) >= 3 and _idle(own, 2) - _idle(own, 3) >= least_gain:
        return Schedule(64, 4, 3)
    large = streamed > ROWS and not is_masked
    return Schedule(128 if large else 64, 2 if large else 4, min(2, _tiles(own)))


def _fitting(warpgroups: int, head_dim: int, kept: int) -> Schedule:
    """Choose two buffers if at least two stages then fit, else one; and as many stages as fit, at most four.

    kept: tiles of 64 own rows per warpgroup.
    """
    tile = 2 * ROWS * sum(widths(head_dim))  # bytes
    for buffers in (2, 1):
        stages = (_SHARED_MEMORY - _BARRIERS_AND_VECTORS - buffers * warpgroups * kept * tile) // (2 * tile)
        if stages >= 2:
            return Schedule(ROWS, min(4, stages), warpgroups, buffers)
    raise AssertionError(f"{warpgroups} warpgroups with head dim {head_dim} do not fit into shared memory")


def _tiles(rows: int) -> int:
    return -(-rows // ROWS)


def _idle(rows: int, warpgroups: int) -> float:
    """Return the fraction of a head's warpgroups without rows."""
    items = -(-_tiles(rows) // warpgroups)
    return 1 - _tiles(rows) / (items * warpgroups)


def bias_gradient_schedule(queries: int, head_dim: int) -> Schedule:
    warpgroups = min(2, _tiles(queries))
    slot = (2 * warpgroups + 2) * 2 * ROWS * sum(widths(head_dim))  # bytes of q, do, k and v
    return Schedule(ROWS, min(4, (_SHARED_MEMORY - 2 * _BARRIERS_AND_VECTORS) // slot), warpgroups)


def bias_gradient_parts(tiles: int, pairs: int, elements: int) -> int:
    """Return into how many parts the (image, head) pairs that share a bias are divided, for four work items per block.

    tiles: work items of one part. elements: those of the padded bias; the sums of all parts take at most 128 MB.
    No part is empty.
    """
    wanted = -(-4 * MULTIPROCESSORS // tiles)
    per_part = -(-pairs // max(1, min(wanted, pairs, 2**25 // elements)))
    return -(-pairs // per_part)


# The gradient of a bias of a short sequence is the sum of dS, 2 bytes per score, which the backward kernel stores for a
# moment. At most 1 GB: 2**29 scores are 864 images with 12 heads of 197 tokens. Beyond, the pair and BiasGradient run.
MOST_DS = 2**29


# --- the kernels for short sequences ----------------------------------------------------------------------------------


def is_short(queries: int, keys: int, head_dim: int, is_causal: bool) -> bool:
    """Return whether the kernels for short sequences apply: a head fits in shared memory, in rows of 128 bytes."""
    return max(queries, keys) <= 256 and widths(head_dim) == (64,) and not is_causal


def fits(tiles: int, biases: int, bytes_per_score: int, has_ids: bool) -> bool:
    """Return whether shared memory holds `tiles` tiles of a head and `biases` tiles of a bias."""
    used = ROWS * ROWS * (2 * tiles + bytes_per_score * biases)
    return used + _FEW_BARRIERS_AND_VECTORS * (1 + has_ids) <= _SHARED_MEMORY


def takes_quads(head_dim: int) -> bool:
    """Return whether these kernels can process quads of packed segments, as if they were sequences."""
    return widths(head_dim) == (64,)


# --- the fused backward kernel for long sequences ---------------------------------------------------------------------

APART = 2  # items of a head start this many turns, of 128 queries each, apart
# From LONG chunks of 64 tokens on, the fused kernel is faster than the pair; from LONG_IF_EVEN on if their number is
# even, as it pads keys to an even number of chunks.
LONG, LONG_IF_EVEN = 18, 10
_LONG_ENTRY = 900  # tokens of a batch entry: in shorter ones, the kernels that find no work could cost more


def fused_backward_schedule(
    heads: int, queries: int, keys: int, head_dim: int, is_masked: bool, has_segments: bool = False
) -> Schedule | None:
    """Return the schedule of the kernel that computes dq, dk and dv at any length, or None if the pair is faster.

    heads: of all images. A mask, or more than 64 columns, would exceed its registers. With too few heads, the items of
    a head would wait for their turns.

    has_segments: for packed segments. Only the device knows whether these are long enough.
    """
    tiles = _tiles(keys)
    is_long = keys > _LONG_ENTRY if has_segments else tiles >= (LONG if tiles % 2 else LONG_IF_EVEN)
    too_few = heads < fewest_heads(queries, MULTIPROCESSORS)
    if is_masked or queries != keys or not is_long or widths(head_dim) != (64,) or too_few:
        return None
    return Schedule(2 * ROWS, 2, 2)


def fewest_heads(queries: int, multiprocessors: int) -> int:
    """Return how many heads must alternate, at least, for the work items of a head to start APART turns apart."""
    return -(-APART * multiprocessors // -(-queries // 128))


def fewest_chunks(heads: int) -> int:
    """Return how many chunks a packed segment needs, so that its items start apart with `heads` heads of all images.

    The inverse of fewest_heads.
    """
    return 2 * -(-APART * MULTIPROCESSORS // heads) - 1


def interleaved_heads(heads: int, queries: int, multiprocessors: int) -> int:
    """Return how many heads the fused kernel's work items alternate between.

    All, if there are no more than fewest_heads. Otherwise at least that many and less than twice as many: the number
    whose last group is closest to full.
    """
    fewest = fewest_heads(queries, multiprocessors)
    return min(range(fewest, 2 * fewest), key=lambda together: -heads % together) if heads > fewest else heads
