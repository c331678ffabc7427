"""paged_attention: one new token per sequence against keys and values that lie scattered over pages of a cache.

Shape suffixes: B sequences, H query heads, K key and value heads, D head dim, P pages of the cache, S tokens per page,
T pages per sequence in the table.
"""

import torch
from torch import Tensor

from vitkernels.errors import UsageError
from vitkernels.registry.op import Op

BACKENDS = Op.in_folder(
    __name__,
    ("reference", "triton", "pallas_tpu"),
    auto={"cuda": ("triton",), "tpu": ("pallas_tpu",)},
)
MEGACORE_MODES = ("kv_head", "batch", None)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    pages_per_compute_block: int,
    megacore_mode: str | None = None,
    attn_logits_soft_cap: float | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """softmax(query keysᵀ) values for one query token per sequence, as torch.ops.xla.paged_attention, on any device.

    Scores are NOT scaled, as there: multiply the query by D ** -0.5 first where the model wants it.

    Args:
        query: (B, H, D), one token of each sequence.
        key_cache, value_cache: (K, P, S, D) in query's dtype; query heads h * H // K ... share key head h.
        context_lens: (B,) int32 or int64, tokens of each sequence, 0 to T * S. A sequence of none gives zeros.
        block_tables: (B, T) int32 or int64; token n of a sequence b is token n % S of page block_tables[b, n // S].
            Entries past a sequence's tokens are not looked at, nor are the tokens of its last page past its end.
        pages_per_compute_block: pages that the TPU kernel loads and computes at a time: its double buffer's size. Any
            number from 1; it changes the speed alone, and other backends have no use for it.
        megacore_mode: which dimension a TPU with two cores per chip (v4, v5p) divides between them: "kv_head" (K must
            be even), "batch" (B must be even) or None. A v5e or v6e chip has one core, which then takes both halves
            in turn: nothing is gained, and nothing changes in the result, there or on another device.
        attn_logits_soft_cap: scores s become cap * tanh(s / cap).
        backend: "auto" (the fastest that takes the call here) or one of BACKENDS.names().

    Returns:
        (B, H, D) in query's dtype. Sums and softmax are in float32 (float64 for float64, which only the reference has).

    Raises:
        UsageError (a ValueError): shapes, dtypes or devices that do not fit; tensors that require a gradient, for this
        is inference; a named backend that cannot take the call; and, for CPU tensors outside torch.compile, a page or a
        length out of range. On other devices nobody waits for the tables' values: there a sequence with such a page or
        length comes out as NaN, and memory outside the cache is never read.

    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    arXiv 2309.06180; shapes and meaning from PyTorch/XLA's "Custom kernels via Pallas".
    """
    _check_shapes(query, key_cache, value_cache, context_lens, block_tables)
    _check_options(query, key_cache, pages_per_compute_block, megacore_mode, attn_logits_soft_cap)
    if query.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_values(context_lens, block_tables, *key_cache.shape[1:3])
    if query.numel() == 0:
        return torch.empty_like(query)
    args = (query, key_cache, value_cache, context_lens, block_tables)
    options = (pages_per_compute_block, megacore_mode, attn_logits_soft_cap)
    with torch.no_grad():
        return BACKENDS.pick(backend, query.device, *args, *options).run(*args, *options)


def _check_shapes(query, key_cache, value_cache, context_lens, block_tables) -> None:
    tensors = {
        "query": (query, 3, "(sequences, query heads, head dim)"),
        "key_cache": (key_cache, 4, "(key heads, pages, tokens per page, head dim)"),
        "value_cache": (value_cache, 4, "(key heads, pages, tokens per page, head dim)"),
        "context_lens": (context_lens, 1, "(sequences,)"),
        "block_tables": (block_tables, 2, "(sequences, pages per sequence)"),
    }
    for name, (x, ndim, meaning) in tensors.items():
        if x.ndim != ndim:
            raise UsageError(f"{name} must be {meaning}, got {tuple(x.shape)}")
        if x.device != query.device:
            raise UsageError(f"{name} is on {x.device}, query on {query.device}; move them to one device")
    B, H, D = query.shape
    K, P, S, _ = key_cache.shape
    if key_cache.shape != value_cache.shape or key_cache.shape[3] != D:
        raise UsageError(
            "key_cache and value_cache must share one shape, with query's head dim last; "
            f"got {tuple(key_cache.shape)} and {tuple(value_cache.shape)} for query {tuple(query.shape)}"
        )
    if not query.dtype == key_cache.dtype == value_cache.dtype or not query.dtype.is_floating_point:
        raise UsageError(
            "query and caches must share one floating dtype; "
            f"got {query.dtype}, {key_cache.dtype} and {value_cache.dtype}"
        )
    if K == 0 or H % K:
        raise UsageError(f"query heads must be a multiple of key heads, to share them evenly; got {H} and {K}")
    if 0 in (P, S, block_tables.shape[1]):
        raise UsageError(f"the cache has {P} pages of {S} tokens, the table {block_tables.shape[1]} columns: none is 0")
    if len(context_lens) != B or len(block_tables) != B:
        raise UsageError(
            f"context_lens {tuple(context_lens.shape)} and block_tables {tuple(block_tables.shape)} must have a row "
            f"for each of the {B} sequences of query {tuple(query.shape)}"
        )
    for name, x in (("context_lens", context_lens), ("block_tables", block_tables)):
        if x.dtype not in (torch.int32, torch.int64):
            raise UsageError(f"{name} must be int32 or int64, got {x.dtype}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key_cache, value_cache)):
        raise UsageError("paged_attention is for inference and has no gradient; call it under torch.no_grad()")


def _check_options(query, key_cache, pages_per_compute_block, megacore_mode, attn_logits_soft_cap) -> None:
    if pages_per_compute_block < 1:
        raise UsageError(f"pages_per_compute_block must be at least 1, got {pages_per_compute_block}")
    if megacore_mode not in MEGACORE_MODES:
        raise UsageError(f"megacore_mode must be one of 'kv_head', 'batch' and None, got {megacore_mode!r}")
    divided = {"kv_head": len(key_cache), "batch": len(query), None: 0}[megacore_mode]
    if divided % 2:
        raise UsageError(f"megacore_mode {megacore_mode!r} halves a dimension of {divided}; it must be even, or None")
    if attn_logits_soft_cap is not None and not attn_logits_soft_cap > 0:
        raise UsageError(f"attn_logits_soft_cap must be positive or None, got {attn_logits_soft_cap}")


def _check_values(context_lens: Tensor, block_tables: Tensor, P: int, S: int) -> None:
    T = block_tables.shape[1]
    wrong_B = (context_lens < 0) | (context_lens > T * S)
    if wrong_B.any():
        b = int(wrong_B.nonzero()[0])
        raise UsageError(
            f"context_lens[{b}] is {int(context_lens[b])}; a sequence has 0 to {T * S} tokens here, "
            f"for block_tables {tuple(block_tables.shape)} gives it {T} pages of {S}"
        )
    used_BT = torch.arange(0, T * S, S) < context_lens[:, None]
    wrong_BT = used_BT & ((block_tables < 0) | (block_tables >= P))
    if wrong_BT.any():
        b, t = wrong_BT.nonzero()[0].tolist()
        raise UsageError(
            f"block_tables[{b}, {t}] is {int(block_tables[b, t])}, but the cache has pages 0 to {P - 1}; "
            f"sequence {b} of {int(context_lens[b])} tokens uses its first {-(-int(context_lens[b]) // S)} entries"
        )
