"""Ids and chunks of calls with a mask of keys, or whose chunks must lie at multiples of 64 (Triton).

One kernel writes the ids and a summary of each chunk, a second one compares the summaries of queries and keys.

Shape suffixes: B batch, N query tokens, M key tokens, Q and K chunks of queries and of keys.
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
    MASKED,
    PADDING,
    ROW,
)
from vitkernels.attention.pallas_flash.hopper.schedule import ROWS
from vitkernels.attention.pallas_flash.hopper.tiles import padded
from vitkernels.bridge.operator import operator
from vitkernels.bridge.triton import triton_call

_BLOCK = 64  # summaries that a program compares at a time
_LARGEST = tl.constexpr(2**31 - 1)
_FIRST, _END, _COMPARED, _ROW, _COUNT = (tl.constexpr(x) for x in (FIRST, END, COMPARED, ROW, COUNT))
# Fields of a record that only these kernels use: the smallest and largest id, without masked keys and padding; and
# whether all rows but padding have one id (1), or all rows (2).
_LOW, _HIGH, _UNIFORM = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)


@triton.jit
def _summarize_kernel(
    segment_ptr, mask_ptr, q_ids_ptr, k_ids_ptr, q_chunks_ptr, k_chunks_ptr, used_ptr,
    segment_b, segment_n, mask_b, mask_m, N, M, Q, K,
    MASKED: tl.constexpr, PADDING: tl.constexpr, ROWS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Write the ids of one chunk of queries or keys, and its summary."""
    b, chunk = tl.cast(tl.program_id(1), tl.int64), tl.program_id(0)
    is_key = chunk >= Q
    chunk = tl.where(is_key, chunk - Q, chunk)
    tokens = tl.where(is_key, M, N)
    at = tl.arange(0, ROWS)
    row = chunk * ROWS + at
    ids = tl.zeros([ROWS], tl.int32)
    if segment_ptr is not None:
        ids = tl.load(segment_ptr + b * segment_b + row * segment_n, mask=row < tokens, other=0).to(tl.int32)
    if mask_ptr is not None:
        keeps = tl.load(mask_ptr + b * mask_b + row * mask_m, mask=is_key & (row < M), other=1)
        ids = tl.where(keeps != 0, ids, MASKED)
    ids = tl.where(row < tokens, ids, PADDING)
    counts = ids > PADDING
    low = tl.min(tl.where(counts, ids, _LARGEST), 0)
    high = tl.max(tl.where(counts, ids, MASKED), 0)
    is_uniform = (tl.max((ids == MASKED).to(tl.int32), 0) == 0) & (low == high)
    uniform = tl.where(is_uniform, tl.where(tl.min(counts.to(tl.int32), 0) == 1, 2, 1), 0)
    if is_key:
        tl.store(k_ids_ptr + b * K * ROWS + row, ids)
        record = k_chunks_ptr + (b * K + chunk) * FIELDS
    else:
        tl.store(q_ids_ptr + b * Q * ROWS + row, ids)
        record = q_chunks_ptr + (b * Q + chunk) * FIELDS
    tl.store(record + _ROW, chunk * ROWS)
    tl.store(record + _COUNT, tl.where(chunk * ROWS < tokens, ROWS, 0))
    tl.store(record + _LOW, low)
    tl.store(record + _HIGH, high)
    tl.store(record + _UNIFORM, uniform)
    if (b == 0) & (chunk == 0):
        tl.store(used_ptr + is_key.to(tl.int32), (tokens + ROWS - 1) // ROWS)
        tl.store(used_ptr + 2 + is_key.to(tl.int32), 0)  # neither work items nor quads are listed
        tl.store(used_ptr + 4 + is_key.to(tl.int32), 0)
        tl.store(used_ptr + 6, 0)


@triton.jit
def _compare_kernel(q_chunks_ptr, k_chunks_ptr, Q, K, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """Find the chunks that one chunk of queries or keys needs."""
    b, chunk = tl.cast(tl.program_id(1), tl.int64), tl.program_id(0)
    if chunk >= Q:
        record, others_ptr, count = k_chunks_ptr + (b * K + chunk - Q) * FIELDS, q_chunks_ptr + b * Q * FIELDS, Q
    else:
        record, others_ptr, count = q_chunks_ptr + (b * Q + chunk) * FIELDS, k_chunks_ptr + b * K * FIELDS, K
    low, high, uniform = tl.load(record + _LOW), tl.load(record + _HIGH), tl.load(record + _UNIFORM)
    first, end, compared = count, 0, count
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        other_low = tl.load(others_ptr + at * FIELDS + _LOW, mask=inside, other=_LARGEST)
        other_high = tl.load(others_ptr + at * FIELDS + _HIGH, mask=inside, other=-_LARGEST)
        meets = inside & (low <= other_high) & (other_low <= high)
        first = tl.minimum(first, tl.min(tl.where(meets, at, count), 0))
        end = tl.maximum(end, tl.max(tl.where(meets, at + 1, 0), 0))
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = (at < count) & (at >= first)
        other_low = tl.load(others_ptr + at * FIELDS + _LOW, mask=inside, other=0)
        other_uniform = tl.load(others_ptr + at * FIELDS + _UNIFORM, mask=inside, other=0)
        same = (uniform > 0) & (other_uniform == 2) & (low == other_low)
        compared = tl.minimum(compared, tl.min(tl.where(inside & (same == 0), at, count), 0))
    tl.store(record + _FIRST, first)
    tl.store(record + _END, end)
    tl.store(record + _COMPARED, compared)


@operator(
    "pallas_flash_hopper_masked_ids(Tensor? mask, Tensor? segment_ids, SymInt B, SymInt N, SymInt M)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def masked_ids(mask: Tensor | None, segment_ids: Tensor | None, B: int, N: int, M: int) -> tuple[Tensor, ...]:
    """Return what `token_ids` does. mask: boolean, (B or 1, M or 1), True keeps; segment_ids: (B, N). One is given."""
    q_ids, k_ids, q_chunks, k_chunks, used = results = _empty(mask, segment_ids, B, N, M)
    Q, K = q_chunks.shape[1], k_chunks.shape[1]
    strides = (0, 0) if segment_ids is None else segment_ids.stride()
    of_mask = (
        (0, 0) if mask is None else tuple(s if n > 1 else 0 for s, n in zip(mask.stride(), mask.shape, strict=True))
    )
    triton_call(
        segment_ids, mask, q_ids, k_ids, q_chunks, k_chunks, used, *strides, *of_mask, N, M, Q, K,
        kernel=_summarize_kernel, grid=(Q + K, B),
        MASKED=MASKED, PADDING=PADDING, ROWS=ROWS, FIELDS=FIELDS, num_warps=1,
    )  # fmt: skip
    triton_call(
        q_chunks, k_chunks, Q, K, kernel=_compare_kernel, grid=(Q + K, B), FIELDS=FIELDS, BLOCK=_BLOCK, num_warps=1
    )
    return results


@masked_ids.register_fake
def _(mask, segment_ids, B, N, M):
    return _empty(mask, segment_ids, B, N, M)


def _empty(mask, segment_ids, B, N, M) -> tuple[Tensor, ...]:
    like = segment_ids if mask is None else mask
    Q, K = padded(N) // ROWS, padded(M) // ROWS
    shapes = (B, Q * ROWS), (B, K * ROWS), (B, Q, FIELDS), (B, K, FIELDS), (COUNTS,)
    return tuple(like.new_empty(shape, dtype=torch.int32) for shape in shapes)
