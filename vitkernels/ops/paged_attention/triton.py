"""The Triton backend, for NVIDIA GPUs and, interpreted, for any CPU."""

import torch
from torch import Tensor

from vitkernels.bridge.operator import interpretable, operator
from vitkernels.ops.paged_attention.triton_launch import attend

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@operator(
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor context_lens, Tensor block_tables, "
    "float? soft_cap) -> Tensor"
)
def _paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    soft_cap: float | None,
) -> Tensor:
    arrays = map(interpretable, (query, key_cache, value_cache))
    return attend(*arrays, context_lens, block_tables, soft_cap).to(query.dtype)


@torch.library.register_fake("vitkernels::paged_attention")
def _(query, key_cache, value_cache, context_lens, block_tables, soft_cap):
    return query.new_empty(query.shape)


def unsupported(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, context_lens: Tensor, block_tables: Tensor, *options
) -> str | None:
    if query.device.type not in ("cuda", "cpu"):
        return f"Triton runs on CUDA tensors, and interpreted on CPU tensors; got {query.device.type}"
    if query.dtype not in _DTYPES:
        return f"its kernels take bfloat16, float16 and float32, got {query.dtype}; use backend='reference'"
    if query.shape[2] > 256:
        return f"its tiles hold head dims up to 256, got {query.shape[2]}"
    if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        return "it reads caches whose last dimension is contiguous, and copies none: lay them out with .contiguous()"
    return None


def run(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    pages_per_compute_block: int,
    megacore_mode: str | None,
    attn_logits_soft_cap: float | None,
) -> Tensor:
    return _paged_attention(query, key_cache, value_cache, context_lens, block_tables, attn_logits_soft_cap)
