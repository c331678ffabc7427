"""What the paged-attention kernels for TPU share: the plan of a call, and the online softmax over one block of pages.

Shape suffixes: B sequences, H query heads, K key heads, G = H / K query heads to one (padded to whole registers),
D head dim, P pages, S tokens per page, T pages per sequence, N tokens of a block.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

LOG2E = math.log2(math.e)
LANES, ROWS = 128, 8  # of a register of float32
ROWS_16 = 16  # of one of bfloat16
BUFFER_LIMIT = 32 * 2**20  # bytes of VMEM for the pages of two blocks, keys and values
MOST_WINDOWS = 16  # pages of a block where each has a window of its own, and each window its bookkeeping
VMEM_LIMIT = 100 * 2**20  # of 128 MiB on v5e and v6e; the compiler's own default is 16 MiB

f32 = jnp.float32


def cdiv(a, b):
    return (a + b - 1) // b


@dataclass(frozen=True)
class Plan:
    """One call's static side: what a grid step attends, and how the grid is divided between cores."""

    B: int
    K: int
    G: int
    D: int
    P: int
    S: int
    T: int
    pages: int  # of a block
    heads: int  # key heads of a step
    megacore_mode: str | None
    soft_cap: float | None

    @classmethod
    def of(cls, query, key_cache, block_tables, pages_per_compute_block, megacore_mode, soft_cap) -> "Plan":
        (B, H, D), (K, P, S, _), T = query.shape, key_cache.shape, block_tables.shape[1]
        page_bytes = 4 * S * cdiv(D, LANES) * LANES * key_cache.dtype.itemsize
        pages = max(1, min(pages_per_compute_block, T, BUFFER_LIMIT // page_bytes))
        pages = min(pages, MOST_WINDOWS) if _by_windows(S, D) else pages
        most = K // 2 if megacore_mode == "kv_head" else K
        fitting = max(1, BUFFER_LIMIT // (pages * page_bytes))
        heads = max(h for h in range(1, most + 1) if most % h == 0 and h <= fitting)
        G = cdiv(H // K, ROWS) * ROWS
        return cls(B, K, G, D, P, S, T, pages, heads, megacore_mode, soft_cap)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Cores, steps over key heads, steps over sequences; a core has all of two of them, and its part of one."""
        groups = self.K // self.heads
        if self.megacore_mode == "kv_head":
            return 2, groups // 2, self.B
        return (2, groups, self.B // 2) if self.megacore_mode == "batch" else (1, groups, self.B)

    @property
    def by_windows(self) -> bool:
        """Whether the compiler moves the pages: a copy's last dimension must fill whole registers."""
        return _by_windows(self.S, self.D)

    @property
    def turned(self) -> bool:
        """Whether pages are (D, S): so XLA lays out a cache whose S fills registers and whose D does not."""
        return self.D % LANES != 0 and not self.by_windows

    @property
    def tokens(self) -> int:
        """Of a block."""
        return self.pages * self.S

    def at(self, core, group, sequence):
        """The sequence and the group of key heads of a grid step."""
        if self.megacore_mode == "batch":
            sequence += core * (self.B // 2)
        if self.megacore_mode == "kv_head":
            group += core * (self.K // self.heads // 2)
        return sequence, group

    def order(self, lens_B, tables_BT) -> "Order":
        """In which order blocks are attended, as arrays."""
        blocks = cdiv(lens_B, self.tokens).reshape(2 if self.megacore_mode == "batch" else 1, -1)
        before = jnp.cumsum(blocks, axis=1) - blocks
        busy = jnp.where(blocks > 0, jnp.arange(self.B).reshape(blocks.shape), self.B)
        first = lax.cummin(busy, axis=1, reverse=True)
        following = jnp.pad(first[:, 1:], ((0, 0), (0, 1)), constant_values=self.B)
        following, first = (jnp.where(x == self.B, -1, x) for x in (following, first[:, 0]))
        arrays = (lens_B, tables_BT, before, following, first, jnp.sum(blocks, axis=1))
        return Order(*(x.reshape(-1).astype(jnp.int32) for x in arrays))

    def next_block(self, step_group, group, b, i, order: "Order"):
        """What is attended after block i of sequence b: (key heads, sequence, block); a sequence of -1 is none.

        The next block of this sequence, else the first of the next one, else that of the first with the next key heads.
        """
        here = i + 1 < cdiv(order.lens[b], self.tokens)
        following = order.following[b]
        again = (following < 0) & (step_group + 1 < self.grid[1])
        next_b = jnp.where(here, b, jnp.where(again, order.first[self.part(b)], following))
        return jnp.where(here | ~again, group, group + 1), next_b, jnp.where(here, i + 1, 0)

    def part(self, b):
        """Of the batch: each core has its own where they share it."""
        return b // (self.B // 2) if self.megacore_mode == "batch" else 0


def _by_windows(S: int, D: int) -> bool:
    return D % LANES != 0 and S % LANES != 0


class Order(NamedTuple):
    """The prefetched scalars, arrays or references: int32."""

    lens: object  # of each sequence
    tables: object  # B * T
    before: object  # blocks of the sequences before each one, of its core's
    following: object  # the next sequence that has tokens, -1 for none
    first: object  # that has tokens, of each core's part of the batch; -1 for none
    blocks: object  # of each core's part


class State(NamedTuple):
    """The online softmax of a step's heads, float32 in VMEM: maxima and sums (K, G, 1), values summed (K, G, D)."""

    top: object
    total: object
    acc: object

    @classmethod
    def scratch(cls, plan: Plan) -> list:
        column = pltpu.VMEM((plan.heads, plan.G, 1), f32)
        return [column, column, pltpu.VMEM((plan.heads, plan.G, plan.D), f32)]

    def clear(self) -> None:
        self.top[...] = jnp.full_like(self.top, -jnp.inf)
        self.total[...] = jnp.zeros_like(self.total)
        self.acc[...] = jnp.zeros_like(self.acc)

    def result(self):
        """(K, G, D); zeros where there were no tokens."""
        total = self.total[...]
        return self.acc[...] / jnp.where(total == 0.0, 1.0, total)


def attend_block(plan: Plan, state: State, q_ref, keys: Callable, values: Callable, left=None) -> None:
    """Takes a block into the state: keys and values give (K, N, D), turned (K, D, N); left: its tokens."""
    token_axis, dim_axis = (2, 1) if plan.turned else (1, 2)
    s_KGN = _dot(q_ref[0], keys(), dim_axis)
    if plan.soft_cap is not None:
        s_KGN = plan.soft_cap * jnp.tanh(s_KGN / plan.soft_cap)
    s_KGN *= LOG2E
    if left is not None:
        s_KGN = jnp.where(lax.broadcasted_iota(jnp.int32, s_KGN.shape, 2) < left, s_KGN, -jnp.inf)
    top = jnp.maximum(state.top[...], jnp.max(s_KGN, axis=2, keepdims=True))
    shrink = jnp.exp2(state.top[...] - top)
    p_KGN = jnp.exp2(s_KGN - top)
    state.top[...] = top
    state.total[...] = state.total[...] * shrink + jnp.sum(p_KGN, axis=2, keepdims=True)
    v = values()
    if left is not None:  # what lies past the end may be NaN, and 0 · NaN is not 0
        v = jnp.where(lax.broadcasted_iota(jnp.int32, v.shape, token_axis) < left, v, jnp.zeros_like(v))
    state.acc[...] = state.acc[...] * shrink + _dot(p_KGN.astype(v.dtype), v, token_axis)


def _dot(a, b, over: int):
    """The products of each key head, summed over the last axis of `a` and axis `over` of `b`, in float32."""
    # A float32 product of honest float32: the MXU would otherwise round its inputs to bfloat16.
    precision = lax.Precision.HIGHEST if a.dtype == f32 else None
    return lax.dot_general(a, b, (((2,), (over,)), ((0,), (0,))), precision=precision, preferred_element_type=f32)
