"""The static side of a call to the TPU kernels, and the order in which they attend to blocks of pages.

Shape suffixes: B sequences, H query heads, K key heads, G = H / K query heads per key head (padded to full registers),
D head dim, P pages, S tokens per page, T pages per sequence, N tokens of a block.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

LANES, ROWS = 128, 8  # of a float32 register
ROWS_16 = 16  # of a bfloat16 register
VMEM_LIMIT = 100 * 2**20  # of 128 MiB on v5e and v6e; the compiler's default is 16 MiB
_BUFFER_LIMIT = 32 * 2**20  # bytes of VMEM for two blocks of pages, keys and values
_MAX_PIPELINED_PAGES = 16  # pages per block if pipelined: each adds per-step bookkeeping


def cdiv(a, b):
    """Return a / b rounded up."""
    return (a + b - 1) // b


@dataclass(frozen=True)
class PageGrid:
    """The sizes of a call, the pages and heads of a grid step, and how cores divide the grid.

    pages: of a block.
    heads: key heads of a grid step.
    """

    B: int
    K: int
    G: int
    D: int
    P: int
    S: int
    T: int
    pages: int
    heads: int
    megacore_mode: str | None
    soft_cap: float | None

    @classmethod
    def of(cls, query, key_cache, block_tables, pages_per_compute_block, megacore_mode, soft_cap) -> "PageGrid":
        """Choose the pages and heads of a step so that two blocks fit in the VMEM buffers."""
        (B, H, D), (K, P, S, _), T = query.shape, key_cache.shape, block_tables.shape[1]
        page_bytes = 4 * S * cdiv(D, LANES) * LANES * key_cache.dtype.itemsize
        pages = max(1, min(pages_per_compute_block, T, _BUFFER_LIMIT // page_bytes))
        pages = min(pages, _MAX_PIPELINED_PAGES) if _is_pipelined(S, D) else pages
        most = K // 2 if megacore_mode == "kv_head" else K
        fitting = max(1, _BUFFER_LIMIT // (pages * page_bytes))
        heads = max(h for h in range(1, most + 1) if most % h == 0 and h <= fitting)
        G = cdiv(H // K, ROWS) * ROWS
        return cls(B, K, G, D, P, S, T, pages, heads, megacore_mode, soft_cap)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Cores, steps over groups of key heads, steps over sequences. Cores divide at most one of the latter."""
        groups = self.K // self.heads
        if self.megacore_mode == "kv_head":
            return 2, groups // 2, self.B
        return (2, groups, self.B // 2) if self.megacore_mode == "batch" else (1, groups, self.B)

    @property
    def pipelined(self) -> bool:
        """Whether the compiler moves the pages: the last dimension of an explicit DMA must fill full registers."""
        return _is_pipelined(self.S, self.D)

    @property
    def transposed(self) -> bool:
        """Whether pages are (D, S): XLA's layout of a cache whose S fills registers and whose D does not."""
        return self.D % LANES != 0 and not self.pipelined

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.pages * self.S

    def position(self, core, group_step, sequence_step):
        """Return the sequence and the group of key heads of a grid step."""
        sequence, group = sequence_step, group_step
        if self.megacore_mode == "batch":
            sequence += core * (self.B // 2)
        if self.megacore_mode == "kv_head":
            group += core * (self.K // self.heads // 2)
        return sequence, group

    def schedule(self, lens_B, tables_BT) -> "BlockSchedule":
        """Return the order in which blocks are attended to, as arrays."""
        blocks = cdiv(lens_B, self.block_tokens).reshape(2 if self.megacore_mode == "batch" else 1, -1)
        before = jnp.cumsum(blocks, axis=1) - blocks
        nonempty = jnp.where(blocks > 0, jnp.arange(self.B).reshape(blocks.shape), self.B)
        first = lax.cummin(nonempty, axis=1, reverse=True)
        following = jnp.pad(first[:, 1:], ((0, 0), (0, 1)), constant_values=self.B)
        following, first = (jnp.where(x == self.B, -1, x) for x in (following, first[:, 0]))
        arrays = (lens_B, tables_BT, before, following, first, jnp.sum(blocks, axis=1))
        return BlockSchedule(*(x.reshape(-1).astype(jnp.int32) for x in arrays))

    def next_block(self, group_step, group, b, i, schedule: "BlockSchedule"):
        """Return (group of key heads, sequence, block) that follows block i of sequence b; sequence -1 for none.

        That is the next block of this sequence, else the first block of the next sequence, else that of the first
        sequence with the next group of key heads.
        """
        same_sequence = i + 1 < cdiv(schedule.lens[b], self.block_tokens)
        following = schedule.next_nonempty[b]
        next_group = (following < 0) & (group_step + 1 < self.shape[1])
        next_b = jnp.where(
            same_sequence, b, jnp.where(next_group, schedule.first_nonempty[self.batch_half(b)], following)
        )
        return jnp.where(same_sequence | ~next_group, group, group + 1), next_b, jnp.where(same_sequence, i + 1, 0)

    def batch_half(self, b):
        """Return the half of the batch with sequence b if the cores divide the batch, else 0."""
        return b // (self.B // 2) if self.megacore_mode == "batch" else 0


def _is_pipelined(S: int, D: int) -> bool:
    return D % LANES != 0 and S % LANES != 0


class BlockSchedule(NamedTuple):
    """The prefetched scalars, int32 arrays or references to them.

    Entries per sequence: lens; blocks_before, of the sequences before it on the same core; next_nonempty, the next
    sequence that has tokens, or -1. Entries per half of the batch (see batch_half): first_nonempty, the first sequence
    that has tokens, or -1; blocks, the number of blocks. tables has B * T entries.
    """

    lens: object
    tables: object
    blocks_before: object
    next_nonempty: object
    first_nonempty: object
    blocks: object
