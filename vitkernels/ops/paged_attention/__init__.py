"""paged_attention: attention of one new token per sequence to keys and values in the pages of a cache.

Shape suffixes: B sequences, H query heads, K key and value heads, D head dim, P pages of the cache, S tokens per page,
T pages per sequence in the table.
"""

import torch
from torch import Tensor

from vitkernels.errors import UsageError
from vitkernels.ops.checks import check_same_device
from vitkernels.ops.paged_attention.decode_batch import DecodeBatch
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
    """Return softmax(query keysᵀ) values for one query token per sequence, like torch.ops.xla.paged_attention.

    As in torch_xla, scores are NOT scaled: multiply the query by D ** -0.5 first if the model scales.

    Args:
        query: (B, H, D), one token per sequence.
        key_cache, value_cache: (K, P, S, D) in query's dtype. Each group of H // K consecutive query heads shares a key
            head.
        context_lens: (B,) int32 or int64, the tokens of each sequence, 0 to T * S. No tokens give zeros.
        block_tables: (B, T) int32 or int64. Token n of sequence b is token n % S of page block_tables[b, n // S].
            Entries past a sequence's end are ignored, and so are tokens of its last page past its end.
        pages_per_compute_block: pages that the TPU kernel loads and computes at a time, at least 1. It affects only the
            speed of that kernel.
        megacore_mode: the dimension that a TPU chip with two cores (v4, v5p) divides between them: "kv_head" (K must be
            even), "batch" (B must be even) or None. It never changes the result, and has no benefit on other devices.
        attn_logits_soft_cap: if given, scores s become cap * tanh(s / cap).
        backend: "auto" or a name from BACKENDS.names().

    Returns:
        (B, H, D) in query's dtype. Sums and softmax are float32 (float64 for float64, which only the reference takes).

    Raises:
        UsageError (a ValueError): invalid shapes, dtypes, devices or options, tensors that require a gradient, or a
            named backend that cannot take the call. For CPU tensors outside torch.compile, also a page or length out of
            range. Elsewhere, checking values would synchronize with the device: a sequence with such a page or length
            gives NaN, and memory outside the cache is never read.

    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    arXiv 2309.06180; shapes and meaning from PyTorch/XLA's "Custom kernels via Pallas".
    """
    _check_tensors(query, key_cache, value_cache, context_lens, block_tables)
    _check_options(query, key_cache, pages_per_compute_block, megacore_mode, attn_logits_soft_cap)
    if query.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_values(context_lens, block_tables, *key_cache.shape[1:3])
    if query.numel() == 0:
        return torch.empty_like(query)
    options = pages_per_compute_block, megacore_mode, attn_logits_soft_cap
    batch = DecodeBatch(query, key_cache, value_cache, context_lens, block_tables, *options)
    with torch.no_grad():
        return BACKENDS.pick(backend, query.device, batch).run(batch)


def _check_tensors(query, key_cache, value_cache, context_lens, block_tables) -> None:
    tensors = {
        "query": (query, 3, "(sequences, query heads, head dim)"),
        "key_cache": (key_cache, 4, "(key heads, pages, tokens per page, head dim)"),
        "value_cache": (value_cache, 4, "(key heads, pages, tokens per page, head dim)"),
        "context_lens": (context_lens, 1, "(sequences,)"),
        "block_tables": (block_tables, 2, "(sequences, pages per sequence)"),
    }
    for name, (x, ndim, layout) in tensors.items():
        if x.ndim != ndim:
            raise UsageError(
                f"{name} must have shape {layout}, got {tuple(x.shape)}",
                code="ops.paged_attention.shape", argument=name, shape=tuple(x.shape),
            )  # fmt: skip
    check_same_device("paged_attention", "query", query, **{name: x for name, (x, _, _) in tensors.items()})
    _check_caches(query, key_cache, value_cache)
    if block_tables.shape[1] == 0:
        raise UsageError(
            "block_tables must have at least one column", code="ops.paged_attention.shape", argument="block_tables"
        )
    for name, x in (("context_lens", context_lens), ("block_tables", block_tables)):
        if len(x) != len(query):
            raise UsageError(
                f"{name} must have one row for each of the {len(query)} sequences of query, got {tuple(x.shape)}",
                code="ops.paged_attention.shape", argument=name, shape=tuple(x.shape), sequences=len(query),
            )  # fmt: skip
        if x.dtype not in (torch.int32, torch.int64):
            raise UsageError(
                f"{name} must be int32 or int64, got {x.dtype}",
                code="ops.paged_attention.dtype", argument=name, dtype=x.dtype,
            )  # fmt: skip
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key_cache, value_cache)):
        raise UsageError(
            "paged_attention is for inference and has no gradient; call it under torch.no_grad()",
            code="ops.paged_attention.gradient",
        )


def _check_caches(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    H, D = query.shape[1:]
    K, P, S, _ = key_cache.shape
    if key_cache.shape != value_cache.shape or key_cache.shape[3] != D:
        raise UsageError(
            "key_cache and value_cache must have the same shape, with query's head dim last; "
            f"got {tuple(key_cache.shape)} and {tuple(value_cache.shape)} for query {tuple(query.shape)}",
            code="ops.paged_attention.shape", argument="key_cache", shape=tuple(key_cache.shape),
        )  # fmt: skip
    if not query.dtype == key_cache.dtype == value_cache.dtype or not query.dtype.is_floating_point:
        raise UsageError(
            "query and caches must have the same floating-point dtype; "
            f"got {query.dtype}, {key_cache.dtype} and {value_cache.dtype}",
            code="ops.paged_attention.dtype", argument="query", dtype=query.dtype,
        )  # fmt: skip
    if K == 0 or H % K:
        raise UsageError(
            f"query heads must be a multiple of key heads, got {H} and {K}",
            code="ops.paged_attention.heads", query_heads=H, key_heads=K,
        )  # fmt: skip
    if 0 in (P, S):
        raise UsageError(
            f"the caches must have at least one page of one token, got {P} pages of {S} tokens",
            code="ops.paged_attention.shape", argument="key_cache", shape=tuple(key_cache.shape),
        )  # fmt: skip


def _check_options(query, key_cache, pages_per_compute_block, megacore_mode, attn_logits_soft_cap) -> None:
    if pages_per_compute_block < 1:
        raise UsageError(
            f"pages_per_compute_block must be at least 1, got {pages_per_compute_block}",
            code="ops.paged_attention.pages_per_compute_block", pages_per_compute_block=pages_per_compute_block,
        )  # fmt: skip
    if megacore_mode not in MEGACORE_MODES:
        raise UsageError(
            f"megacore_mode must be 'kv_head', 'batch' or None, got {megacore_mode!r}",
            code="ops.paged_attention.megacore_mode", megacore_mode=megacore_mode,
        )  # fmt: skip
    divided = {"kv_head": len(key_cache), "batch": len(query), None: 0}[megacore_mode]
    if divided % 2:
        raise UsageError(
            f"megacore_mode={megacore_mode!r} divides a dimension of {divided} in two, which must be even; use None",
            code="ops.paged_attention.megacore_mode", megacore_mode=megacore_mode, size=divided,
        )  # fmt: skip
    if attn_logits_soft_cap is not None and not attn_logits_soft_cap > 0:
        raise UsageError(
            f"attn_logits_soft_cap must be positive or None, got {attn_logits_soft_cap}",
            code="ops.paged_attention.attn_logits_soft_cap", attn_logits_soft_cap=attn_logits_soft_cap,
        )  # fmt: skip


def _check_values(context_lens: Tensor, block_tables: Tensor, P: int, S: int) -> None:
    T = block_tables.shape[1]
    wrong_B = (context_lens < 0) | (context_lens > T * S)
    if wrong_B.any():
        b = int(wrong_B.nonzero()[0])
        length = int(context_lens[b])
        raise UsageError(
            f"context_lens[{b}] is {length}, but block_tables {tuple(block_tables.shape)} holds {T} pages of {S} "
            f"tokens per sequence; lengths must be 0 to {T * S}",
            code="ops.paged_attention.context_len", sequence=b, length=length, limit=T * S,
        )  # fmt: skip
    used_BT = torch.arange(0, T * S, S) < context_lens[:, None]
    wrong_BT = used_BT & ((block_tables < 0) | (block_tables >= P))
    if wrong_BT.any():
        b, t = wrong_BT.nonzero()[0].tolist()
        page, length = int(block_tables[b, t]), int(context_lens[b])
        raise UsageError(
            f"block_tables[{b}, {t}] is {page}, but the cache has pages 0 to {P - 1}; "
            f"sequence {b} of {length} tokens uses its first {-(-length // S)} entries",
            code="ops.paged_attention.page", sequence=b, entry=t, page=page, pages=P,
        )  # fmt: skip
