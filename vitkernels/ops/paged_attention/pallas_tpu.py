"""The Pallas backend for TPU, interpreted on the CPU."""

import torch
from torch import Tensor

from vitkernels.bridge import pallas_op
from vitkernels.ops.paged_attention.decode_batch import DecodeBatch
from vitkernels.ops.paged_attention.tpu.attend import attend
from vitkernels.ops.refusals import unless_dtypes, unless_tpu_device

_attend = pallas_op(attend, name="paged_attention_tpu")

_DTYPES = (torch.float32, torch.bfloat16)


def unsupported(batch: DecodeBatch) -> str | None:
    reason = unless_tpu_device("query", batch.query) or unless_dtypes((batch.query.dtype,), _DTYPES)
    if reason is not None:
        return reason
    D, S = batch.query.shape[2], batch.key_cache.shape[2]
    if D % 8 or D > 256:
        return f"supports head dims up to 256 in steps of 8, got {D}"
    if S % 8:
        return f"supports pages of a multiple of 8 tokens, got {S}"
    if not (batch.key_cache.is_contiguous() and batch.value_cache.is_contiguous()):
        return "reads contiguous caches and copies none; pass .contiguous() caches"
    return None


def run(batch: DecodeBatch) -> Tensor:
    P, S = batch.key_cache.shape[1:3]
    capacity = batch.block_tables.shape[1] * S
    return _attend(
        batch.query.contiguous(),
        batch.key_cache,
        batch.value_cache,
        # Clamped, so that values out of range stay out of range in 32 bits.
        batch.context_lens.clamp(-1, capacity + 1).to(torch.int32).contiguous(),
        batch.block_tables.clamp(-1, P).to(torch.int32).contiguous(),
        pages_per_compute_block=batch.pages_per_compute_block,
        megacore_mode=batch.megacore_mode,
        soft_cap=batch.soft_cap,
    )
