"""Time paged attention on a GPU against the alternatives: gathering the pages for SDPA, and flex_attention.

Shape suffixes: B sequences, H query heads, K key heads, D head dim, P pages, S tokens per page, T pages per sequence,
N = T * S tokens.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.benchmarks.timing import Timing
from vitkernels.ops import paged_attention
from vitkernels.tpu_estimate.paged_attention_case import PagedAttentionCase


@dataclass(frozen=True)
class PagedAttentionTensors:
    """Random bfloat16 tensors of one call; every page of the cache belongs to at most one sequence."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    context_lens: Tensor
    block_tables: Tensor

    @classmethod
    def random(cls, case: PagedAttentionCase, device: str = "cuda") -> "PagedAttentionTensors":
        B, K, S, D = case.sequences, case.key_heads, case.page_size, case.head_dim
        T = -(-case.tokens // S)
        lens_B = torch.randint(1, case.tokens + 1, (B,)) if case.ragged else torch.full((B,), case.tokens)
        like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        return cls(
            query=torch.randn(B, case.query_heads, D, **like) * D**-0.5,
            key_cache=torch.randn(K, B * T, S, D, **like),
            value_cache=torch.randn(K, B * T, S, D, **like),
            context_lens=lens_B.to(device, torch.int32),
            block_tables=torch.randperm(B * T).view(B, T).to(device, torch.int32),
        )

    def bytes(self) -> int:
        """Return the minimum bytes to move: each sequence's keys and values, queries and results, once each."""
        K, _, _, D = self.key_cache.shape
        return 2 * (2 * K * D * int(self.context_lens.sum()) + 2 * self.query.numel())


def exact(t: PagedAttentionTensors) -> Tensor:
    """Return the reference's result in float64, computed one sequence at a time."""
    out = []
    for b in range(len(t.query)):
        k, v = (cache[:, t.block_tables[b]].double() for cache in (t.key_cache, t.value_cache))
        order = torch.arange(t.block_tables.shape[1], device=t.query.device)[None]
        lens = t.context_lens[b : b + 1]
        out.append(paged_attention(t.query[b : b + 1].double(), k, v, lens, order, 1, backend="reference"))
    return torch.cat(out)


def contenders(tensors: PagedAttentionTensors, flex: bool = True) -> dict[str, Callable[[], Tensor]]:
    """Return the contenders by name, each a function without arguments that returns (B, H, D).

    Masks, which depend only on the block tables, are built in advance and not timed.
    """
    found: dict[str, Callable[[], Tensor]] = {
        "triton": functools.partial(_ours, tensors),
        "gather + sdpa": functools.partial(_gathered, tensors, _mask(tensors)),
    }
    if flex and tensors.key_cache.shape[2] >= 128 and tensors.query.shape[1] // len(tensors.key_cache) <= 64:
        found["flex compiled"] = _flex(tensors)  # its blocks have 128 keys
    return found | {"triton again": found["triton"]}


def _ours(t: PagedAttentionTensors) -> Tensor:
    return paged_attention(t.query, t.key_cache, t.value_cache, t.context_lens, t.block_tables, 1, backend="triton")


def _mask(t: PagedAttentionTensors) -> Tensor | None:
    N = t.block_tables.shape[1] * t.key_cache.shape[2]
    mask_BN = torch.arange(N, device=t.query.device) < t.context_lens[:, None]
    return None if mask_BN.all() else mask_BN[:, None, None]


def _gathered(t: PagedAttentionTensors, mask_B11N: Tensor | None) -> Tensor:
    B, H, D = t.query.shape
    K = len(t.key_cache)
    k_BKND, v_BKND = (
        cache[:, t.block_tables].transpose(0, 1).reshape(B, K, -1, D) for cache in (t.key_cache, t.value_cache)
    )
    q_BKGD = t.query.view(B, K, H // K, D)  # the queries of a key head become its tokens, so keys are not copied
    return F.scaled_dot_product_attention(q_BKGD, k_BKND, v_BKND, attn_mask=mask_B11N, scale=1.0).view(B, H, D)


def _flex(t: PagedAttentionTensors) -> Callable[[], Tensor]:
    """Return flex_attention over the cache as one long sequence, with a block mask made from the block tables."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    B, H, D = t.query.shape
    K, P, S, _ = t.key_cache.shape
    T = t.block_tables.shape[1]
    position_P = torch.empty(P, dtype=torch.int32, device=t.query.device)  # of each page in its sequence
    position_P[t.block_tables.long()] = torch.arange(T, dtype=torch.int32, device=t.query.device).expand(B, T)
    full_pages_B = t.context_lens // S

    def last_page(b, h, q, kv):
        return position_P[kv // S] * S + kv % S < t.context_lens[b]

    def indices(pages_BT: Tensor) -> Tensor:
        return F.pad(pages_BT, (0, P - T))[:, None, None].contiguous()

    last_B1 = full_pages_B.long().clamp_max(T - 1)[:, None]
    block_mask = BlockMask.from_kv_blocks(
        (t.context_lens % S > 0).int()[:, None, None],
        indices(t.block_tables.gather(1, last_B1).expand(B, T)),
        full_pages_B[:, None, None],
        indices(t.block_tables),
        BLOCK_SIZE=(128, S),
        mask_mod=last_page,
        seq_lengths=(1, P * S),
    )
    k, v = (cache.view(1, K, P * S, D) for cache in (t.key_cache, t.value_cache))
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    call = functools.partial(compiled, t.query[:, :, None], k, v, block_mask=block_mask, scale=1.0, enable_gqa=H != K)
    return lambda: call()[:, :, 0]


def measure(case: PagedAttentionCase, flex: bool = True) -> Iterator[dict]:
    """Time every contender of a case; yield rows with its error against the reference, or its failure as `problem`."""
    torch.manual_seed(0)
    tensors = PagedAttentionTensors.random(case)
    expected = exact(tensors)
    for name, call in contenders(tensors, flex).items():
        row = {"case": asdict(case), "contender": name, "min_bytes": tensors.bytes()}
        try:
            error = float((call().double() - expected).norm() / expected.norm())
            times = {"ms": asdict(Timing.of_calls(call, 50)), "graph_ms": asdict(Timing.on_device(call, 20))}
            row |= {"error": error, **times}
        except Exception as problem:  # a peer that does not support the case
            row["problem"] = f"{type(problem).__name__}: {str(problem)[:200]}"
        yield row
