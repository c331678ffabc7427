"""The Pallas backend, for TPU; interpreted on the CPU."""

import torch
from torch import Tensor

from vitkernels.bridge import pallas_op
from vitkernels.ops.paged_attention import pallas_tpu_kernel

_attend = pallas_op(pallas_tpu_kernel.attend, name="paged_attention_tpu")

_DTYPES = (torch.bfloat16, torch.float32)


def unsupported(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, context_lens: Tensor, block_tables: Tensor, *options
) -> str | None:
    if query.device.type not in ("cpu", "xla"):
        return f"its kernel is for TPU (device xla) and, interpreted, for cpu; got {query.device.type}"
    if query.dtype not in _DTYPES:
        return f"it computes in bfloat16 and float32, not {query.dtype}"
    D, S = query.shape[2], key_cache.shape[2]
    if D % 8 or D > 256:
        return f"it takes head dims up to 256 in steps of 8, not {D}"
    if S % 8:
        return f"its tiles take pages of 8, 16, 24 ... tokens, not {S}"
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        return "it reads contiguous caches, and copies none: lay them out with .contiguous()"
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
    P, S = key_cache.shape[1:3]
    capacity = block_tables.shape[1] * S
    return _attend(
        query.contiguous(),
        key_cache,
        value_cache,
        # What is out of range stays so in 32 bits.
        context_lens.clamp(-1, capacity + 1).to(torch.int32).contiguous(),
        block_tables.clamp(-1, P).to(torch.int32).contiguous(),
        pages_per_compute_block=pages_per_compute_block,
        megacore_mode=megacore_mode,
        soft_cap=attn_logits_soft_cap,
    )
