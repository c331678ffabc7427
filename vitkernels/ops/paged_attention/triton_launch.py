"""Launch the paged-attention kernels: choose how many splits a sequence has, and the tiles.

Tiles are fixed choices from measurements on one H200, so no call pays for autotuning.
Shape suffixes: B sequences, H query heads, K key heads, D head dim, S tokens per page, T pages per sequence.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from vitkernels.bridge.triton import cdiv, next_power_of_2, triton_call
from vitkernels.ops.paged_attention.triton_kernel import combine_kernel, split_kernel


@dataclass(frozen=True)
class DecodeTiling:
    """Launch parameters of split_kernel.

    split: tokens of a split, a multiple of n.
    n: tokens of a tile.
    g: upper bound of the query heads of a tile.
    """

    split: int
    n: int
    g: int = 64
    num_warps: int = 4
    num_stages: int = 3


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    soft_cap: float | None,
    tiling: DecodeTiling | None = None,
) -> Tensor:
    """Return (B, H, D). Tensors may have any strides, except for the caches' last, which is 1. Nothing is checked."""
    B, H, D = query.shape
    K, P, S, _ = key_cache.shape
    capacity = block_tables.shape[1] * S
    tiling = tiling or choose_tiling(B * K, H // K, capacity, D, query.dtype, query.device)
    splits = cdiv(capacity, tiling.split)
    out_BHD = query.new_empty(B, H, D)
    if splits == 1:
        written, lse = out_BHD, None
    else:
        written = query.new_empty(B, H, splits, D, dtype=torch.float32)
        lse = query.new_empty(B, H, splits, dtype=torch.float32)
    caches = (key_cache, value_cache)
    strides = [stride for cache in caches for stride in cache.stride()[:3]]
    G = H // K
    tile_d, tile_g = max(16, next_power_of_2(D)), min(tiling.g, max(16, next_power_of_2(G)))
    triton_call(
        query, *caches, context_lens, block_tables, written, lse,
        *query.stride(), *strides, context_lens.stride(0), *block_tables.stride(),
        written.stride(0), written.stride(1), written.stride(2) if splits > 1 else 0,
        K, P, capacity, tiling.split, splits, soft_cap,
        kernel=split_kernel,
        grid=(B * K * splits * cdiv(G, tile_g),),
        G=G, TILE_G=tile_g, D=D, TILE_D=tile_d, S=S,
        TILE_N=tiling.n, SPLIT=splits > 1, ALIGNED=all(stride % 8 == 0 for stride in strides),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    if splits > 1:
        triton_call(
            written, lse, context_lens, out_BHD, context_lens.stride(0), H, capacity, tiling.split, splits,
            kernel=combine_kernel,
            grid=(B * H,),
            D=D, TILE_D=tile_d, TILE_C=16,
            num_warps=2,
        )  # fmt: skip
    return out_BHD


def choose_tiling(pairs: int, G: int, capacity: int, D: int, dtype: torch.dtype, device: torch.device) -> DecodeTiling:
    """Return the fastest tiling measured on an H200 for `pairs` of a sequence and a key head with G query heads each.

    Splits are as long as two programs per multiprocessor allow, within bounds, so that no long split of a ragged batch
    keeps the GPU waiting.
    """
    if dtype == torch.float32 or D > 128:
        tiling = DecodeTiling(0, 32)
    elif G > 16:  # the rows of a tensor core are full: compute-bound
        tiling = DecodeTiling(0, 64)
    else:
        tiling = DecodeTiling(0, 128, num_stages=2)
    split = capacity * pairs // (2 * _multiprocessors(device))
    shortest, longest = 256, 2048 if G > 16 else 1024
    return replace(tiling, split=-(-min(max(split, shortest), longest) // tiling.n) * tiling.n)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
