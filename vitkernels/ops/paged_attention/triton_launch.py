"""Launches the paged-attention kernels: how many parts a sequence is cut into, and which tiles.

Tiles are chosen here once and for all, from measurements on one H200: the first call searches nothing.
Shape suffixes: B sequences, H query heads, K key heads, D head dim, S tokens per page, T pages per sequence.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from vitkernels.bridge.triton import cdiv, next_power_of_2, triton_call
from vitkernels.ops.paged_attention.triton_kernel import combine_kernel, part_kernel


@dataclass(frozen=True)
class Tiles:
    """Tokens of a part and of a tile; most query heads of a tile; warps per program; loads under way."""

    part: int
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
    tiles: Tiles | None = None,
) -> Tensor:
    """(B, H, D). Tensors of any strides, but for the caches' last dimension, which is contiguous. Checks nothing."""
    B, H, D = query.shape
    K, P, S, _ = key_cache.shape
    capacity = block_tables.shape[1] * S
    tiles = tiles or choose_tiles(B * K, H // K, capacity, D, query.dtype, query.device)
    parts = cdiv(capacity, tiles.part)
    out_BHD = query.new_empty(B, H, D)
    if parts == 1:
        written, lse = out_BHD, None
    else:
        written = query.new_empty(B, H, parts, D, dtype=torch.float32)
        lse = query.new_empty(B, H, parts, dtype=torch.float32)
    caches = (key_cache, value_cache)
    strides = [stride for cache in caches for stride in cache.stride()[:3]]
    G = H // K
    tile_d, tile_g = max(16, next_power_of_2(D)), min(tiles.g, max(16, next_power_of_2(G)))
    triton_call(
        query, *caches, context_lens, block_tables, written, lse,
        *query.stride(), *strides, context_lens.stride(0), *block_tables.stride(),
        written.stride(0), written.stride(1), written.stride(2) if parts > 1 else 0,
        K, P, capacity, tiles.part, parts, soft_cap,
        kernel=part_kernel,
        grid=(B * K * parts * cdiv(G, tile_g),),
        G=G, TILE_G=tile_g, D=D, TILE_D=tile_d, S=S,
        TILE_N=tiles.n, SPLIT=parts > 1, ALIGNED=all(stride % 8 == 0 for stride in strides),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if parts > 1:
        triton_call(
            written, lse, context_lens, out_BHD, context_lens.stride(0), H, capacity, tiles.part, parts,
            kernel=combine_kernel,
            grid=(B * H,),
            D=D, TILE_D=tile_d, TILE_C=16,
            num_warps=2,
        )  # fmt: skip
    return out_BHD


def choose_tiles(pairs: int, G: int, capacity: int, D: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """For that many pairs of a sequence and a key head, each with G query heads: the fastest seen on an H200.

    Parts: two programs for each multiprocessor where the longest sequences allow, and none so long that one of a
    ragged batch keeps the GPU waiting.
    """
    if dtype == torch.float32 or D > 128:
        tiles = Tiles(0, 32)
    elif G > 16:  # a tensor core's rows are full: arithmetic counts
        tiles = Tiles(0, 64)
    else:
        tiles = Tiles(0, 128, num_stages=2)
    part = capacity * pairs // (2 * _multiprocessors(device))
    shortest, longest = 256, 2048 if G > 16 else 1024
    return replace(tiles, part=-(-min(max(part, shortest), longest) // tiles.n) * tiles.n)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
