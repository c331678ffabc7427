"""Estimates of paged attention depend on the context lengths of the call."""

import numpy as np
import pytest
from expecting import error

pytest.importorskip("jax")

from vitkernels.tpu_estimate import compiler
from vitkernels.tpu_estimate.paged_attention import estimate
from vitkernels.tpu_estimate.paged_attention_case import PagedAttentionCase
from vitkernels.tpu_estimate.prefetched import with_scalars

CASE = PagedAttentionCase("small", sequences=2, query_heads=4, key_heads=2, head_dim=128, page_size=16, tokens=128)
PAGE_BYTES = 2 * 2 * 16 * 128 * 2  # keys and values, two heads, bfloat16


@pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
def test_estimate__reads_only_pages_in_use():
    program = estimate("pallas_tpu", CASE, 2, np.array([128, 17]))
    (kernel,) = (operation.schedule for operation in program.operations if operation.kind == "tpu_custom_call")
    assert kernel.trustworthy, kernel.unknown
    pages = 128 // 16 + 2
    assert pages * PAGE_BYTES <= kernel.read < (pages + 1) * PAGE_BYTES  # and the queries


def test_with_scalars__stores_arrays_and_replaces_registers():
    text = (
        " 0 : { %s7_s1 = smov [#allocation5] ;; %s8_s2 = inlined_call_operand.<no memory space> "
        "[shape: s32[1], index: 1, kind: input, shape index: {}] /* operand 1 */ }\n"
        " 0x1 : { %9 = dma.vmem_to_smem /*vmem=*/%s3_s3, /*size_in_granules=*/16, /*smem=*/%s7_s1, "
        "/*dst_syncflagno=*/[#allocation8] }\n"
    )
    found = with_scalars(text, [np.array([4, 6]), np.array([9])])
    assert "sst [smem:[#allocation5 + $0x0]] 4" in found and "sst [smem:[#allocation5 + $0x1]] 6" in found
    assert "%s8_s2 = smov 9 " in found
    with error("tpu_estimate.scalars", arrays=2, copies=1):
        with_scalars(text, [np.array([4, 6]), np.array([9, 9])])
