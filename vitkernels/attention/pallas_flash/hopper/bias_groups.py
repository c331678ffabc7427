"""Conversions of a bias on Hopper (Triton): to and from the stored order, its transpose, and sums of its gradients.

The kernels read 64 × 8 values, a group, in the order in which the threads of a product hold them: (..., tiles of 64
rows, groups of 8 columns, 512), and within a group (warp, row of 8, pair of columns, half of 16 rows, column).

Shape suffixes: B batch, H heads, N query tokens, M key tokens, R and C rows and columns of a bias.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitkernels.attention.pallas_flash.hopper.schedule import MULTIPROCESSORS
from vitkernels.attention.pallas_flash.hopper.tiles import lowest_score, stored_bias_shape
from vitkernels.bridge.operator import interpretable
from vitkernels.bridge.triton import cdiv, next_power_of_2, triton_call

_ROWS = 16  # of a program: those of a warp in a tile
_COLUMNS = 256  # of a program, at most
_SUMMED = 1024  # elements that a program of _sum_kernel loads at a time: of one pair, or of up to 32
_LOADS = 6  # of so many elements, in flight at a time; with 8, fewer programs run at a time
_FEWEST_PROGRAMS = 3 * MULTIPROCESSORS
_ABSORBING = 2.0**29  # float32 numbers of this size are 32 or 64 apart, so scores below 32 are lost in a sum with them
# In bfloat16, rows whose maximum is smaller keep their values, because differences would be rounded. Above, differences
# of up to 512 are exact.
_UNSHIFTED = 1024.0


@triton.jit
def _place(row, column, groups):
    """Return where a tile's rows and columns are stored, relative to the (image, head) pair."""
    tile, group = row // 64, column // 8
    thread = row % 64 // 16 * 32 + row % 8 * 4 + column % 8 // 2
    return (tile * groups + group) * 512 + thread * 4 + row % 16 // 8 * 2 + column % 2


@triton.jit
def _in_groups(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return 16 rows of 8 n columns as (n, 128): a warp's quarter of each of n groups, in the stored order."""
    x = tl.reshape(x, (2, 8, COLUMNS // 8, 4, 2))
    return tl.reshape(tl.permute(x, (2, 1, 3, 0, 4)), (COLUMNS // 8, ROWS * 8))


@triton.jit
def _in_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the rows and columns from which _in_groups made x."""
    x = tl.reshape(x, (COLUMNS // 8, 8, 4, 2, 2))
    return tl.reshape(tl.permute(x, (3, 1, 0, 2, 4)), (ROWS, COLUMNS))


@triton.jit
def _warp_part(first_row, first_column, groups, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return where the values of _in_groups are stored, relative to the pair, and which of their groups exist."""
    group = first_column // 8 + tl.arange(0, COLUMNS // 8)[:, None]
    place = (first_row // 64 * groups + group) * 512 + first_row % 64 * 8 + tl.arange(0, ROWS * 8)[None, :]
    return place, group < groups


@triton.jit
def _store_kernel(
    bias_ptr, out_ptr, bias_b, bias_h, bias_r, bias_c, H, R, C, tiles, groups, low, absorbing, unshifted, factor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store ROWS rows of a bias; see padded_bias."""
    pair = tl.program_id(1)
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)[:, None]
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
        scores = tl.where(x == -float("inf"), x, scores).to(out_ptr.dtype.element_ty)
        place, exists = _warp_part(first_row, first, groups, ROWS, COLUMNS)
        tl.store(out_ptr + place, _in_groups(scores, ROWS, COLUMNS), mask=exists)


@triton.jit
def _transpose_kernel(x_ptr, out_ptr, tiles, groups):
    """Fill out, of tiles × groups, with the transpose of x, 64 × 64 values per program: 8 groups of each."""
    pair = tl.program_id(1).to(tl.int64) * tiles * groups * 512
    row, column = tl.program_id(0) // (groups // 8), tl.program_id(0) % (groups // 8)  # of the block in out
    element = tl.arange(0, 4096)
    x = tl.load(x_ptr + pair + (column * tiles + row) * 4096 + element)
    # The bits of x's row are its axes 2, 6, 3 and 4; those of its column are 0, 1, 5 and 7.
    x = tl.permute(tl.reshape(x, (4, 2, 4, 4, 2, 4, 2, 2)), (2, 6, 0, 5, 7, 3, 1, 4))
    tl.store(out_ptr + pair + (row * (groups // 8) + column) * 4096 + element, tl.reshape(x, (4096,)))


@triton.jit
def _rows_kernel(x_ptr, out_ptr, R, C, tiles, groups, factor, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Fill out, rows by columns, with factor * x, whose padding is dropped; ROWS × COLUMNS per program."""
    pair = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(C, COLUMNS)
    first_row, first_column = tl.program_id(0) // blocks * ROWS, tl.program_id(0) % blocks * COLUMNS
    place, exists = _warp_part(first_row, first_column, groups, ROWS, COLUMNS)
    x = tl.load(x_ptr + pair * tiles * groups * 512 + place, mask=exists)
    row = first_row + tl.arange(0, ROWS)[:, None]
    column = first_column + tl.arange(0, COLUMNS)[None, :]
    x = (_in_columns(x, ROWS, COLUMNS) * factor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pair * R * C + row * C + column, x, mask=(row < R) & (column < C))


@triton.jit
def _sum_kernel(
    ds_ptr, out_ptr, bias_stride, pair_stride, count, M, N, octets, tiles, groups, factor,
    PAIRS: tl.constexpr, ELEMENTS: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Add up transposed gradients of scores, (M, 8 * octets), of `count` pairs per (image, head) of a bias.

    Consecutive (image, head) of the bias start `bias_stride` pairs apart, and pairs that share one are `pair_stride`
    apart. PAIRS of them are added up side by side.
    """
    pair = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    width = octets * 8  # the compiler knows the factor, and loads 8 elements at a time
    size = M * octets * 8
    inside = (element < size)[None, :]
    ds_ptr += pair * bias_stride * size + element[None, :]
    total = tl.zeros((PAIRS, ELEMENTS), tl.float32)
    last = count - 1 - tl.arange(0, PAIRS)[:, None]
    for first in range(0, count, UNROLLED * PAIRS):
        for i in tl.static_range(UNROLLED):
            number = last - first - i * PAIRS  # the last pairs may still be in the L2 cache
            total += tl.load(ds_ptr + number * pair_stride * size, mask=inside & (number >= 0), other=0.0).to(
                tl.float32
            )
    key, query = element // width, element % width
    place = pair * tiles * groups * 512 + _place(query, key, groups)
    sums = (tl.sum(total, 0) * factor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, sums, mask=(element < size) & (query < N))


def stored(bias_BHRC: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return a bias of any strides in the order and the units of the kernels, float32 or bfloat16; see padded_bias."""
    images, heads, R, C = bias_BHRC.shape
    bias = interpretable(bias_BHRC)
    out = interpretable(bias.new_empty(stored_bias_shape((images, heads), R, C), dtype=dtype))
    unshifted = _UNSHIFTED if dtype == torch.bfloat16 else 0.0
    triton_call(
        bias, out, *bias.stride(), heads, R, C, *out.shape[2:4], lowest_score(scale), _ABSORBING, unshifted, 1 / scale,
        kernel=_store_kernel, grid=(cdiv(out.shape[2] * 64, _ROWS), images * heads),
        ROWS=_ROWS, COLUMNS=_columns(C), num_warps=4,
    )  # fmt: skip
    return out.to(dtype)


def transposed(groups: Tensor) -> Tensor:
    """Return a stored bias, keys by queries."""
    images, heads, tiles, count, size = groups.shape
    x = interpretable(groups)
    out = x.new_empty(images, heads, count // 8, tiles * 8, size)
    triton_call(
        x, out, *out.shape[2:4], kernel=_transpose_kernel, grid=(tiles * count // 8, images * heads), num_warps=4
    )
    return out.to(groups.dtype)


def in_rows(groups: Tensor, R: int, C: int, factor: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return factor * a stored array as rows by columns, (images, heads, R, C); by default, in its dtype."""
    images, heads, tiles, count, _ = groups.shape
    x, dtype, columns = interpretable(groups), dtype or groups.dtype, _columns(C)
    out = interpretable(x.new_empty(images, heads, R, C, dtype=dtype))
    triton_call(
        x, out, R, C, tiles, count, factor,
        kernel=_rows_kernel, grid=(cdiv(R, _ROWS) * cdiv(C, columns), images * heads),
        ROWS=_ROWS, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return out.to(dtype)


def _columns(count: int) -> int:
    """Return how many columns of a bias with `count` columns a program processes at a time."""
    return max(8, min(_COLUMNS, next_power_of_2(count)))


def summed(ds_BHMN: Tensor, shape: tuple[int, int], N: int, factor: float, dtype: torch.dtype) -> Tensor:
    """Return factor * the sum of the transposed gradients of scores over the images and heads that share a bias.

    The result is in the stored order; its padding is zero. Each sum is in float32 and in a fixed order; it is then
    rounded to dtype, as PyTorch would do in a pass of its own.

    Args:
        ds_BHMN: contiguous, of at most MOST_DS elements; its rows exceed N and are multiples of 8.
        shape: images and heads of the bias, each 1 or that of ds.
    """
    B, H, M, width = ds_BHMN.shape
    ds = interpretable(ds_BHMN)
    out = interpretable(ds.new_zeros(stored_bias_shape(shape, N, M), dtype=dtype))
    pairs = shape[0] * shape[1]
    count = B * H // pairs
    # The pairs that share a bias are H apart if it has all heads, else consecutive.
    bias_stride, pair_stride = (1, H) if shape == (1, H) else (count, 1)
    # With one pair at a time, programs may be so few that most of the GPU idles.
    programs = cdiv(M * width, _SUMMED) * pairs
    at_once = min(32, next_power_of_2(count), next_power_of_2(cdiv(_FEWEST_PROGRAMS, programs)))
    elements = _SUMMED // at_once
    triton_call(
        ds, out, bias_stride, pair_stride, count, M, N, width // 8, *out.shape[2:4], factor,
        kernel=_sum_kernel, grid=(cdiv(M * width, elements), pairs), PAIRS=at_once, ELEMENTS=elements, UNROLLED=_LOADS,
        num_warps=4,
    )  # fmt: skip
    return out.to(dtype)
