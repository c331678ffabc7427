"""The stored order of a bias on Hopper: into it, out of it, its transpose, and the sum of gradients into it (Triton).

The kernels read 64 × 8 values, a group, in the order in which the threads of a product hold them: (..., tiles of 64
rows, groups of 8 columns, 512), and within a group (warp, row of 8, pair of columns, half of 16 rows, column).

Shape suffixes: B batch, H heads, N query tokens, M key tokens, R and C rows and columns of a bias.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitkernels.attention.pallas_flash.hopper.tiles import lowest_score, stored_bias_shape
from vitkernels.bridge.operator import interpretable
from vitkernels.bridge.triton import cdiv, next_power_of_2, triton_call

_ROWS = 16  # of a program of the kernel that stores: those of a warp
_ELEMENTS = 1024  # of a program of the other kernels
_ABSORBING = 2.0**29  # float32 numbers of this size are 32 or 64 apart, so scores below 32 are lost in a sum with them
# In bfloat16, rows whose maximum is smaller keep their values, because differences would be rounded. Above, differences
# of up to 512 are exact.
_UNSHIFTED = 1024.0
_UNROLLED = 8  # pairs whose loads are in flight at a time


@triton.jit
def _place(row, column, groups):
    """Return where a tile's rows and columns are stored, relative to the (image, head) pair."""
    tile, group = row // 64, column // 8
    thread = row % 64 // 16 * 32 + row % 8 * 4 + column % 8 // 2
    return (tile * groups + group) * 512 + thread * 4 + row % 16 // 8 * 2 + column % 2


@triton.jit
def _store_kernel(
    bias_ptr, out_ptr, bias_b, bias_h, bias_r, bias_c, H, R, C, tiles, groups, low, absorbing, unshifted, factor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store ROWS rows of a bias; see padded_bias."""
    pair = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    bias_ptr += (pair // H).to(tl.int64) * bias_b + (pair % H).to(tl.int64) * bias_h
    out_ptr += pair.to(tl.int64) * tiles * groups * 512
    highest = tl.full((ROWS, COLUMNS), -float("inf"), tl.float32)
    for first in range(0, C, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        inside = (row < R) & (column < C)
        x = tl.load(bias_ptr + row * bias_r + column * bias_c, mask=inside, other=-float("inf")).to(tl.float32)
        highest = tl.maximum(highest, x)
    top = tl.max(highest, 1)[:, None]
    top = tl.where((tl.abs(top) == float("inf")) | (tl.abs(top) < unshifted), 0.0, top)
    absorbs = tl.abs(top) >= absorbing
    shift = tl.where(absorbs, low, 0.0)
    limit = tl.where(absorbs, 0.0, low / 4)
    for first in range(0, groups * 8, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        inside = (row < R) & (column < C)
        x = tl.load(bias_ptr + row * bias_r + column * bias_c, mask=inside, other=-float("inf")).to(tl.float32)
        scores = (x - top) * factor
        # Finite, so that a row whose other keys a causal mask hides is not mistaken for one without keys.
        scores = tl.where(scores < limit, 4 * low, scores + shift)
        scores = tl.where(x == -float("inf"), x, scores)
        tl.store(out_ptr + _place(row, column, groups), scores, mask=(row < tiles * 64) & (column < groups * 8))


@triton.jit
def _transpose_kernel(x_ptr, out_ptr, tiles, groups, ELEMENTS: tl.constexpr):
    """Fill out, of tiles × groups, with the transpose of x."""
    pair = tl.program_id(1).to(tl.int64) * tiles * groups * 512
    element = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    group, rest = element // 512, element % 512
    row = group // groups * 64 + rest // 128 * 16 + rest // 2 % 2 * 8 + rest // 16 % 8
    column = group % groups * 8 + rest // 4 % 4 * 2 + rest % 2
    x = tl.load(x_ptr + pair + _place(column, row, tiles * 8))
    tl.store(out_ptr + pair + element, x)


@triton.jit
def _rows_kernel(x_ptr, out_ptr, R, C, tiles, groups, factor, ELEMENTS: tl.constexpr):
    """Fill out, rows by columns, with factor * x, whose padding is dropped."""
    pair = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    place = _place(element // C, element % C, groups)
    x = tl.load(x_ptr + pair * tiles * groups * 512 + place, mask=element < R * C)
    tl.store(out_ptr + pair * R * C + element, x * factor, mask=element < R * C)


@triton.jit
def _sum_kernel(
    ds_ptr, out_ptr, apart, stride, count, M, N, octets, tiles, groups, factor,
    ELEMENTS: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Add up transposed gradients of scores, (M, 8 * octets), of `count` pairs per (image, head) of a bias.

    Its first pair is `apart` pairs behind that of the previous (image, head); its own pairs are `stride` apart.
    """
    pair = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    width = octets * 8  # the compiler knows the factor, and loads 8 elements at a time
    size = M * octets * 8
    inside = element < size
    ds_ptr += pair * apart * size + element
    total = tl.zeros((ELEMENTS,), tl.float32)
    for first in range(0, count, UNROLLED):
        for i in tl.static_range(UNROLLED):
            number = count - 1 - first - i  # the last pairs may still be in the L2 cache
            total += tl.load(ds_ptr + number * stride * size, mask=inside & (number >= 0), other=0.0).to(tl.float32)
    key, query = element // width, element % width
    place = pair * tiles * groups * 512 + _place(query, key, groups)
    tl.store(out_ptr + place, total * factor, mask=inside & (query < N))


def stored(bias_BHRC: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return a bias of any strides in the order and the units of the kernels, float32 or bfloat16; see padded_bias."""
    images, heads, R, C = bias_BHRC.shape
    bias = interpretable(bias_BHRC)
    out = interpretable(bias.new_empty(stored_bias_shape((images, heads), R, C), dtype=dtype))
    unshifted = _UNSHIFTED if dtype == torch.bfloat16 else 0.0
    triton_call(
        bias, out, *bias.stride(), heads, R, C, *out.shape[2:4], lowest_score(scale), _ABSORBING, unshifted, 1 / scale,
        kernel=_store_kernel, grid=(cdiv(out.shape[2] * 64, _ROWS), images * heads),
        ROWS=_ROWS, COLUMNS=min(256, next_power_of_2(C)), num_warps=4,
    )  # fmt: skip
    return out.to(dtype)


def transposed(groups: Tensor) -> Tensor:
    """Return a stored bias, keys by queries."""
    images, heads, tiles, count, size = groups.shape
    x = interpretable(groups)
    out = x.new_empty(images, heads, count // 8, tiles * 8, size)
    triton_call(
        x, out, *out.shape[2:4],
        kernel=_transpose_kernel, grid=(cdiv(tiles * count * size, _ELEMENTS), images * heads), ELEMENTS=_ELEMENTS,
    )  # fmt: skip
    return out.to(groups.dtype)


def in_rows(groups: Tensor, R: int, C: int, factor: float) -> Tensor:
    """Return factor * a stored array as rows by columns, (images, heads, R, C)."""
    images, heads, tiles, count, _ = groups.shape
    x = interpretable(groups)
    out = x.new_empty(images, heads, R, C)
    triton_call(
        x, out, R, C, tiles, count, factor,
        kernel=_rows_kernel, grid=(cdiv(R * C, _ELEMENTS), images * heads), ELEMENTS=_ELEMENTS,
    )  # fmt: skip
    return out.to(groups.dtype)


def summed(ds_BHMN: Tensor, shape: tuple[int, int], N: int, factor: float) -> Tensor:
    """Return factor * the sum of the transposed gradients of scores over the images and heads that share a bias.

    The result is in the stored order; its padding is zero. Each sum is in float32 and in a fixed order.

    Args:
        ds_BHMN: contiguous, of at most MOST_DS elements; its rows exceed N and are multiples of 8.
        shape: images and heads of the bias, each 1 or that of ds.
    """
    B, H, M, width = ds_BHMN.shape
    ds = interpretable(ds_BHMN)
    out = ds.new_zeros(stored_bias_shape(shape, N, M), dtype=torch.float32)
    pairs = shape[0] * shape[1]
    count = B * H // pairs
    # The pairs that share a bias are H apart if it has all heads, else consecutive.
    apart, stride = (1, H) if shape == (1, H) else (count, 1)
    triton_call(
        ds, out, apart, stride, count, M, N, width // 8, *out.shape[2:4], factor,
        kernel=_sum_kernel, grid=(cdiv(M * width, _ELEMENTS), pairs), ELEMENTS=_ELEMENTS, UNROLLED=_UNROLLED,
        num_warps=4,
    )  # fmt: skip
    return out
