"""Choose kernels, tiles and grids, and launch them.

Tiles are the fastest measured on one H200 (notes/fused_ops.md).

Shape suffixes: M rows (tokens), K the inner dimension of a product, N its columns.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from vitkernels.bridge.triton import cdiv, triton_call
from vitkernels.ops.linear.gradients import sums_over_rows
from vitkernels.ops.linear_gelu.triton_kernels import (
    gelu_backward_kernel,
    gelu_kernel,
    gelu_linear_backward_kernel,
    linear_gelu_kernel,
)


def forward(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool, keep: bool, form: str
) -> tuple[Tensor, Tensor]:
    """Return gelu(x weightᵀ + bias), and to save for backward the pre-activation, or with `keep` GELU's slope."""
    M, N = len(x_MK), len(weight_NK)
    if form == "pallas_hopper":
        from vitkernels.ops.linear_gelu import pallas_hopper_launch  # needs a newer JAX than the rest of the package

        return pallas_hopper_launch.forward(x_MK, weight_NK, bias_N, tanh, keep)
    if form == "passes" or not M:
        with torch.autocast(x_MK.device.type, enabled=False):  # interpreted, float32 already stands in for bfloat16
            pre_MN = F.linear(x_MK, weight_NK, None if bias_N is None else bias_N.to(x_MK.dtype))
        return gelu_pass(pre_MN, tanh, pre_MN if keep else None), pre_MN
    act_MN, saved_MN = (x_MK.new_empty(M, N) for _ in range(2))
    bias_N = x_MK.new_zeros(N) if bias_N is None else bias_N
    _product(linear_gelu_kernel, bias_N, x_MK, weight_NK, True, (saved_MN, act_MN), tanh, keep)
    return act_MN, saved_MN


def backward(
    dy_MK: Tensor, weight_KN: Tensor, saved_MN: Tensor, tanh: bool, kept: bool, form: str
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return dpre = (dy weight) gelu'(pre), gelu(pre) recomputed (None if kept), and dpre's sums over rows.

    saved_MN: pre, or gelu'(pre) if gelu(pre) was kept.
    """
    M, N = saved_MN.shape
    if form == "pallas_hopper":
        from vitkernels.ops.linear_gelu import pallas_hopper_launch

        dpre_MN, sums_TN = pallas_hopper_launch.backward(dy_MK, weight_KN, saved_MN, tanh, kept)
        return dpre_MN, None if kept else gelu_pass(saved_MN, tanh), sums_over_rows(sums_TN[:, None])[0]
    act_MN = None if kept else torch.empty_like(saved_MN)
    if form == "passes" or not M:
        dact_MN = dy_MK @ weight_KN
        return backward_pass(dact_MN, saved_MN, tanh, kept, dpre_MN=dact_MN, act_MN=act_MN)
    dpre_MN = torch.empty_like(saved_MN)
    sums_TN = saved_MN.new_empty(cdiv(M, _tiles(saved_MN)[0]), N, dtype=torch.float32)
    tiles_MN = saved_MN, dpre_MN, act_MN
    _product(gelu_linear_backward_kernel, sums_TN, dy_MK, weight_KN, False, tiles_MN, tanh, kept)
    return dpre_MN, act_MN, sums_over_rows(sums_TN[:, None])[0]


def _tiles(x: Tensor) -> tuple[int, int, int]:
    """Return rows, columns and depth of a product's tiles, which are small on the CPU, where they are interpreted."""
    return (128, 128, 64) if x.is_cuda else (32, 64, 16)


def _product(
    kernel, plain: Tensor, a_MK: Tensor, b: Tensor, b_is_NK: bool, tiles_MN: tuple, tanh: bool, keep: bool
) -> None:
    """Launch a product kernel on tensor descriptors of its matrices, which load and store entire tiles.

    plain: the argument that the kernel takes as a pointer, the bias or the sums over rows.
    """
    M, K = a_MK.shape
    N = tiles_MN[0].shape[1]
    tile_m, tile_n, tile_k = _tiles(a_MK)
    descriptors = (
        TensorDescriptor.from_tensor(a_MK, [tile_m, tile_k]),
        TensorDescriptor.from_tensor(b, [tile_n, tile_k] if b_is_NK else [tile_k, tile_n]),
        *(None if x is None else TensorDescriptor.from_tensor(x, [tile_m, tile_n // 4]) for x in tiles_MN),
    )
    grid = (cdiv(M, tile_m) * cdiv(N, tile_n),)
    constants = {"TILE_M": tile_m, "TILE_N": tile_n, "TILE_K": tile_k, "TANH": tanh, "KEEP": keep, "PRECISION": "ieee"}
    if a_MK.is_cuda:  # triton_call's fast launcher does not support descriptors
        with torch.cuda.device(a_MK.device):
            kernel[grid](plain, *descriptors, M, N, K, **constants, num_warps=4, num_stages=3)
    else:
        triton_call(plain, *descriptors, M, N, K, kernel=kernel, grid=grid, **constants)


def gelu_pass(pre_MN: Tensor, tanh: bool, slopes_MN: Tensor | None = None) -> Tensor:
    """Return gelu(pre). If slopes_MN is given, which may be pre_MN, fill it with gelu'(pre)."""
    act_MN = torch.empty_like(pre_MN)
    size, block = pre_MN.numel(), 2048
    if size:
        triton_call(
            pre_MN, act_MN, slopes_MN, size, kernel=gelu_kernel, grid=(cdiv(size, block),), BLOCK=block, TANH=tanh
        )  # fmt: skip
    return act_MN


def backward_pass(
    dact_MN: Tensor,
    saved_MN: Tensor,
    tanh: bool,
    kept: bool = False,
    *,
    dpre_MN: Tensor | None = None,
    act_MN: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return dpre = dact gelu'(pre), act_MN and dpre's sums over rows.

    saved_MN: pre, or gelu'(pre) if gelu(pre) was kept.
    dpre_MN: the output buffer of dpre, by default a new one. It may be dact_MN, which is read before it is overwritten.
    act_MN: a buffer to fill with gelu(pre), or None.
    """
    M, N = saved_MN.shape
    dpre_MN = torch.empty_like(saved_MN) if dpre_MN is None else dpre_MN
    rows, columns, steps = 16, 128, 8
    sums_PN = saved_MN.new_empty(cdiv(M, rows * steps), N, dtype=torch.float32)
    if saved_MN.numel():
        triton_call(
            dact_MN, saved_MN, dpre_MN, act_MN, sums_PN, M, N,
            kernel=gelu_backward_kernel, grid=(cdiv(N, columns), len(sums_PN)),
            ROWS=rows, COLUMNS=columns, STEPS=steps, TANH=tanh, KEEP=kept,
        )  # fmt: skip
    return dpre_MN, act_MN, sums_over_rows(sums_PN[:, None])[0]
