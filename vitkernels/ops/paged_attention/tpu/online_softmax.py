"""The online softmax over blocks of pages, shared by the TPU kernels.

Shape suffixes: K key heads of a grid step, G query heads per key head, D head dim, N tokens of a block.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from vitkernels.ops.paged_attention.tpu.page_grid import PageGrid

_LOG2E = math.log2(math.e)
_f32 = jnp.float32


class OnlineSoftmax(NamedTuple):
    """The running softmax of a step's heads, float32 in VMEM: maxima and sums (K, G, 1), sums of values (K, G, D)."""

    maximum: object
    total: object
    acc: object

    @classmethod
    def scratch(cls, grid: PageGrid) -> list:
        """Return the scratch shapes of the fields."""
        column = pltpu.VMEM((grid.heads, grid.G, 1), _f32)
        return [column, column, pltpu.VMEM((grid.heads, grid.G, grid.D), _f32)]

    def clear(self) -> None:
        """Start a sequence."""
        self.maximum[...] = jnp.full_like(self.maximum, -jnp.inf)
        self.total[...] = jnp.zeros_like(self.total)
        self.acc[...] = jnp.zeros_like(self.acc)

    def result(self):
        """Return (K, G, D), zeros for a sequence without tokens."""
        total = self.total[...]
        return self.acc[...] / jnp.where(total == 0.0, 1.0, total)


def add_block(grid: PageGrid, softmax: OnlineSoftmax, q_ref, keys: Callable, values: Callable, valid=None) -> None:
    """Update the softmax with a block of pages.

    Args:
        keys, values: load the block as (K, N, D), or (K, D, N) if grid.transposed.
        valid: the number of tokens in the block; None for a full one.
    """
    token_axis, dim_axis = (2, 1) if grid.transposed else (1, 2)
    s_KGN = _dot(q_ref[0], keys(), dim_axis)
    if grid.soft_cap is not None:
        s_KGN = grid.soft_cap * jnp.tanh(s_KGN / grid.soft_cap)
    s_KGN *= _LOG2E
    if valid is not None:
        s_KGN = jnp.where(lax.broadcasted_iota(jnp.int32, s_KGN.shape, 2) < valid, s_KGN, -jnp.inf)
    maximum = jnp.maximum(softmax.maximum[...], jnp.max(s_KGN, axis=2, keepdims=True))
    rescale = jnp.exp2(softmax.maximum[...] - maximum)
    p_KGN = jnp.exp2(s_KGN - maximum)
    softmax.maximum[...] = maximum
    softmax.total[...] = softmax.total[...] * rescale + jnp.sum(p_KGN, axis=2, keepdims=True)
    v = values()
    if valid is not None:  # memory past the end may hold NaN, and 0 · NaN is NaN
        v = jnp.where(lax.broadcasted_iota(jnp.int32, v.shape, token_axis) < valid, v, jnp.zeros_like(v))
    softmax.acc[...] = softmax.acc[...] * rescale + _dot(p_KGN.astype(v.dtype), v, token_axis)


def _dot(a, b, over: int):
    """Return the product of each key head, summed over the last axis of `a` and axis `over` of `b`, in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == _f32 else None  # by default the MXU rounds float32 to bfloat16
    return lax.dot_general(a, b, (((2,), (over,)), ((0,), (0,))), precision=precision, preferred_element_type=_f32)
