"""Paged attention on a GPU beside what a user would otherwise run: gathering the pages for SDPA, and flex_attention.

Shape suffixes: B sequences, H query heads, K key heads, D head dim, P pages, S tokens per page, T pages per sequence,
N = T * S tokens.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.ops import paged_attention


@dataclass(frozen=True)
class Case:
    """B sequences of `tokens` tokens each, or, `ragged`, of a random number of them up to that."""

    what: str
    sequences: int
    query_heads: int
    key_heads: int
    head_dim: int
    page_size: int
    tokens: int
    ragged: bool = False


CASES = (
    Case("decoding, few sequences", 8, 32, 8, 128, 16, 4096),
    Case("pages of 128, ragged", 64, 32, 8, 128, 128, 4096, ragged=True),
    Case("heads of their own, ragged", 32, 12, 12, 64, 128, 4096, ragged=True),
    # The tokens of a frame share their context: they stand as query heads, 196 to a key head.
    Case("a frame of a video ViT", 8, 12 * 196, 12, 64, 128, 8192),
    Case("decoding, many sequences", 64, 32, 8, 128, 16, 2048),
    Case("decoding, ragged", 64, 32, 8, 128, 16, 4096, ragged=True),
    Case("decoding, one long sequence", 1, 32, 8, 128, 128, 32768),
)


@dataclass(frozen=True)
class Tensors:
    """One call's, bfloat16, random; every page of the cache belongs to one sequence at most."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    context_lens: Tensor
    block_tables: Tensor

    @classmethod
    def of(cls, case: Case, device: str = "cuda") -> "Tensors":
        B, K, S, D = case.sequences, case.key_heads, case.page_size, case.head_dim
        T = -(-case.tokens // S)
        lens_B = torch.randint(1, case.tokens + 1, (B,)) if case.ragged else torch.full((B,), case.tokens)
        like = {"device": device, "dtype": torch.bfloat16}
        return cls(
            query=torch.randn(B, case.query_heads, D, **like) * D**-0.5,
            key_cache=torch.randn(K, B * T, S, D, **like),
            value_cache=torch.randn(K, B * T, S, D, **like),
            context_lens=lens_B.to(device, torch.int32),
            block_tables=torch.randperm(B * T).view(B, T).to(device, torch.int32),
        )

    def bytes(self) -> int:
        """The fewest to move: keys and values of each sequence's tokens, queries and results, once each."""
        K, _, _, D = self.key_cache.shape
        return 2 * (2 * K * D * int(self.context_lens.sum()) + 2 * self.query.numel())


def exact(t: Tensors) -> Tensor:
    """The reference's result, in float64, a sequence at a time."""
    out = []
    for b in range(len(t.query)):
        k, v = (cache[:, t.block_tables[b]].double() for cache in (t.key_cache, t.value_cache))
        order = torch.arange(t.block_tables.shape[1], device=t.query.device)[None]
        lens = t.context_lens[b : b + 1]
        out.append(paged_attention(t.query[b : b + 1].double(), k, v, lens, order, 1, backend="reference"))
    return torch.cat(out)


def contenders(tensors: Tensors, flex: bool = True) -> dict[str, Callable[[], Tensor]]:
    """Each as a function of nothing that returns (B, H, D). What depends on the tables alone is made beforehand."""
    found = {
        "triton": functools.partial(_ours, tensors),
        "gather + sdpa": functools.partial(_gathered, tensors, _mask(tensors)),
    }
    if flex and tensors.key_cache.shape[2] >= 128 and tensors.query.shape[1] // len(tensors.key_cache) <= 64:
        found["flex compiled"] = _flex(tensors)  # its blocks are of 128 keys
    return found | {"triton again": found["triton"]}


def _ours(t: Tensors) -> Tensor:
    return paged_attention(t.query, t.key_cache, t.value_cache, t.context_lens, t.block_tables, 1, backend="triton")


def _mask(t: Tensors) -> Tensor | None:
    N = t.block_tables.shape[1] * t.key_cache.shape[2]
    mask_BN = torch.arange(N, device=t.query.device) < t.context_lens[:, None]
    return None if mask_BN.all() else mask_BN[:, None, None]


def _gathered(t: Tensors, mask_B11N: Tensor | None) -> Tensor:
    B, H, D = t.query.shape
    K = len(t.key_cache)
    k_BKND, v_BKND = (
        cache[:, t.block_tables].transpose(0, 1).reshape(B, K, -1, D) for cache in (t.key_cache, t.value_cache)
    )
    q_BKGD = t.query.view(B, K, H // K, D)  # a key head's queries as its tokens: no copies of keys
    return F.scaled_dot_product_attention(q_BKGD, k_BKND, v_BKND, attn_mask=mask_B11N, scale=1.0).view(B, H, D)


def _flex(t: Tensors) -> Callable[[], Tensor]:
    """flex_attention over the cache as one long sequence; a block mask from the table tells it the pages."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    B, H, D = t.query.shape
    K, P, S, _ = t.key_cache.shape
    T = t.block_tables.shape[1]
    place_P = torch.empty(P, dtype=torch.int32, device=t.query.device)  # of a page in its sequence
    place_P[t.block_tables.long()] = torch.arange(T, dtype=torch.int32, device=t.query.device).expand(B, T)
    whole_B = t.context_lens // S

    def last_page(b, h, q, kv):
        return place_P[kv // S] * S + kv % S < t.context_lens[b]

    def indices(pages_BT: Tensor) -> Tensor:
        return F.pad(pages_BT, (0, P - T))[:, None, None].contiguous()

    last_B1 = whole_B.long().clamp_max(T - 1)[:, None]
    block_mask = BlockMask.from_kv_blocks(
        (t.context_lens % S > 0).int()[:, None, None],
        indices(t.block_tables.gather(1, last_B1).expand(B, T)),
        whole_B[:, None, None],
        indices(t.block_tables),
        BLOCK_SIZE=(128, S),
        mask_mod=last_page,
        seq_lengths=(1, P * S),
    )
    k, v = (cache.view(1, K, P * S, D) for cache in (t.key_cache, t.value_cache))
    compiled = torch.compile(flex_attention, dynamic=False)
    call = functools.partial(compiled, t.query[:, :, None], k, v, block_mask=block_mask, scale=1.0, enable_gqa=H != K)
    return lambda: call()[:, :, 0]
