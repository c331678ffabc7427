"""The Triton backend for NVIDIA GPUs, interpreted on the CPU."""

from torch import Tensor

from vitkernels.bridge.operator import interpretable, operator
from vitkernels.ops.paged_attention.decode_batch import DecodeBatch
from vitkernels.ops.paged_attention.triton_launch import attend
from vitkernels.ops.refusals import unless_dtypes, unless_triton_device


@operator(
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor context_lens, Tensor block_tables, "
    "float? soft_cap) -> Tensor"
)
def _paged_attention(query, key_cache, value_cache, context_lens, block_tables, soft_cap):
    arrays = map(interpretable, (query, key_cache, value_cache))
    return attend(*arrays, context_lens, block_tables, soft_cap).to(query.dtype)


@_paged_attention.register_fake
def _(query, *others):
    return query.new_empty(query.shape)


def unsupported(batch: DecodeBatch) -> str | None:
    reason = unless_triton_device("query", batch.query) or unless_dtypes((batch.query.dtype,))
    if reason is not None:
        return reason
    if batch.query.shape[2] > 256:
        return f"supports head dims up to 256, got {batch.query.shape[2]}"
    if batch.key_cache.stride(3) != 1 or batch.value_cache.stride(3) != 1:
        return "reads caches that are contiguous along the head dim and copies none; pass .contiguous() caches"
    return None


def run(batch: DecodeBatch) -> Tensor:
    return _paged_attention(*batch[:5], batch.soft_cap)
