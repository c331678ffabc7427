"""How the Hopper kernels of `pallas_flash` share out their work; chosen once and for all from measurements on one H200
(notes/pallas_flash_hopper.md), so that nothing is searched for when training starts.
"""

from dataclasses import dataclass

MULTIPROCESSORS = 132  # of an H100 or H200
_SHARED_MEMORY = 227 * 1024  # bytes that thread blocks on one multiprocessor have together


@dataclass(frozen=True)
class Schedule:
    """One thread block: `warpgroups` that compute, 64 rows each, on `stages` tiles of `tile` rows that stream by.

    Without a loader all tiles are requested at once and stay (so stages must be all of them), and several blocks fit
    on a multiprocessor. A loader is one more warpgroup, which refills a ring of tiles; its block goes from piece to
    piece of the work, has `rooms` for their own rows, and the ring runs on between them.
    """

    tile: int = 64
    stages: int = 2
    warpgroups: int = 2
    loader: bool = False
    rooms: int = 1

    @property
    def registers(self) -> tuple[int, int]:
        """Per thread of a computing warpgroup and of the loader, from a multiprocessor's 65536."""
        loader = 40 if self.warpgroups <= 2 else 24
        return min(240, (512 - loader) // self.warpgroups // 8 * 8), loader


def widths(head_dim: int) -> tuple[int, ...]:
    """The columns of a row, cut so that each part is one swizzle wide: 64 -> 64; 72, 80 -> 64, 16; 88 -> 64, 32."""
    whole, rest = divmod(head_dim, 64)
    return (64,) * whole + tuple(w for w in (16, 32, 64) if w >= rest > 0)[:1]


def forward_schedule(keys: int, head_dim: int) -> Schedule:
    wide = head_dim > 64
    return (
        (None if wide else _resident(128, 2, keys, head_dim, kept=1, blocks=2))
        or _resident(64, 2, keys, head_dim, kept=1, blocks=2)
        or (None if wide else _resident(128, 4, keys, head_dim, kept=1))
        or Schedule(128 if sum(widths(head_dim)) <= 96 else 64, 2, 3, loader=True)
    )


def fits_short_backward(queries: int, keys: int, head_dim: int, is_causal: bool) -> bool:
    """Whether one kernel for dq, dk and dv can do it: where a whole head fits into shared memory, in rows of 128 bytes.

    A causal call's masks would not fit into its registers.
    """
    return max(queries, keys) <= 256 and widths(head_dim) == (64,) and not is_causal


def fits_short_forward(queries: int, keys: int, head_dim: int, is_causal: bool) -> bool:
    """Whether the forward kernel that goes from head to head takes it: two whole heads fit, and are worth a block."""
    return min(queries, keys) > 128 and fits_short_backward(queries, keys, head_dim, is_causal)


def dq_schedule(queries: int, keys: int, head_dim: int) -> Schedule:
    """Four resident warpgroups where all have rows, single ones where those save rows, or else a ring."""
    rows = {warpgroups: -(-queries // (64 * warpgroups)) * 64 * warpgroups for warpgroups in (1, 2, 3, 4)}
    four = rows[4] == rows[1] and _resident(64, 4, keys, head_dim, kept=3)
    one = rows[1] < min(rows[2], rows[3]) and _resident(64, 1, keys, head_dim, kept=3, blocks=2)
    if four or one:
        return four or one
    if rows[3] <= rows[2]:
        return Schedule(64, 3 if sum(widths(head_dim)) <= 96 else 2, 3, loader=True)
    return Schedule(128 if head_dim <= 64 else 64, 2, 2, loader=True)


def dkdv_schedule(queries: int, head_dim: int) -> Schedule:
    return (
        (_resident(128, 1, queries, head_dim, kept=2, blocks=2) if sum(widths(head_dim)) <= 96 else None)
        or _resident(64, 1, queries, head_dim, kept=2, blocks=2)
        or Schedule(128 if head_dim <= 64 else 64, 2, 2, loader=True)
    )


def _resident(tile: int, warpgroups: int, streamed: int, head_dim: int, kept: int, blocks: int = 1) -> Schedule | None:
    """All of the two streamed operands at once, where `blocks` such blocks fit on a multiprocessor.

    kept: tiles of 64 rows that each warpgroup has for itself.
    """
    schedule = Schedule(tile, -(-streamed // tile), warpgroups)
    row = 2 * sum(widths(head_dim))  # bytes
    tiles = kept * 64 * warpgroups * row + 2 * schedule.stages * tile * row
    return schedule if blocks * (tiles + 8 * 1024) <= _SHARED_MEMORY else None
