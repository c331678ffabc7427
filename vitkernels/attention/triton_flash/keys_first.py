"""A bias or mask with a row per key, for the dkdv kernel, whose tiles of scores have a row per key, too (Triton).

The dkdv kernel would have to transpose tiles of `padded_keys` in shared memory. Without the copy, it took 7 to 15 %
longer at 577 x 577.

Shape suffixes: B batch, H heads, N query tokens, M key tokens.
"""

import triton
import triton.language as tl
from torch import Tensor

from vitkernels.bridge.triton import cdiv, triton_call

LEAST_SHARED = 8  # heads that must read a matrix for its copy to pay
_PADDING = 128  # the most queries in a tile
_TILE = 64


@triton.jit
def _transpose_kernel(x_ptr, out_ptr, x_b, x_h, x_n, H, N, M, columns, TILE: tl.constexpr):
    """Fill out (batch, heads, M, columns), contiguous, with x transposed; 0 from column N on."""
    tiles_n, tiles_m = tl.cdiv(columns, TILE), tl.cdiv(M, TILE)
    n = tl.program_id(0) % tiles_n * TILE + tl.arange(0, TILE)
    m = tl.program_id(0) // tiles_n % tiles_m * TILE + tl.arange(0, TILE)
    head = tl.cast(tl.program_id(0) // (tiles_n * tiles_m), tl.int64)
    rows = x_ptr + head // H * x_b + head % H * x_h + n[:, None] * x_n
    x = tl.load(rows + m[None, :], mask=(n[:, None] < N) & (m[None, :] < M), other=0)
    at = out_ptr + (head * M + m[:, None]) * columns + n[None, :]
    tl.store(at, tl.trans(x), mask=(m[:, None] < M) & (n[None, :] < columns))


def keys_first(x_BHNM: Tensor, keys: int) -> Tensor:
    """Return a bias or mask with the memory layout (batch, heads, keys, queries), if enough heads share its matrices.

    x is expanded, has rows that differ, and comes from `padded_keys`. The result is a view (B, H, queries, keys), with
    queries padded to a multiple of 128 by rows of 0.
    """
    B, H, N, _ = x_BHNM.shape
    x = x_BHNM[: 1 if x_BHNM.stride(0) == 0 else B, : 1 if x_BHNM.stride(1) == 0 else H]
    b, h = x.shape[:2]
    if b * h * LEAST_SHARED > B * H:
        return x_BHNM
    columns = cdiv(N, _PADDING) * _PADDING
    out = x.new_empty(b, h, keys, columns)
    programs = b * h * cdiv(keys, _TILE) * (columns // _TILE)
    triton_call(x, out, *x.stride()[:3], h, N, keys, columns, kernel=_transpose_kernel, grid=(programs,), TILE=_TILE)
    return out.transpose(2, 3).expand(B, H, columns, keys)
