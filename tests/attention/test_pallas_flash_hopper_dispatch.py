"""Calls of `pallas_flash` on Hopper up to the operators: layouts, and traces with symbolic sizes."""

import pytest
import torch

pytest.importorskip("triton")
from hopper import needs_new_jax

from vitkernels.testing.attention_reference import rotary_table, unpacked

pytestmark = needs_new_jax


@pytest.fixture
def dispatch():
    from vitkernels.attention.pallas_flash.hopper import dispatch

    return dispatch


def test_in_rows__copies_only_other_layouts(dispatch):
    q = unpacked(torch.randn(2, 37, 3, 5, 64))[0]
    rows = dispatch._in_rows(q)
    assert rows.transpose(1, 2).is_contiguous() and torch.equal(rows, q)
    assert dispatch._in_rows(rows) is rows


# The extras of a call for B images, H heads, N tokens and head dim D.
EXTRAS = {
    "plain": lambda B, H, N, D: {},
    "bias": lambda B, H, N, D: {"bias": torch.zeros(1, H, N, N)},
    "bias in bfloat16": lambda B, H, N, D: {"bias": torch.zeros(1, H, N, N, dtype=torch.bfloat16)},
    "mask": lambda B, H, N, D: {"mask": torch.ones(B, 1, N, N, dtype=torch.bool)},
    "mask of keys": lambda B, H, N, D: {"mask": torch.ones(B, 1, 1, N, dtype=torch.bool)},
    "segments": lambda B, H, N, D: {"segment_ids": torch.zeros(B, N, dtype=torch.int32)},
    "rope": lambda B, H, N, D: {"rope": rotary_table("cpu", N, D, True), "rope_half": True},
    "causal": lambda B, H, N, D: {"is_causal": True},
}


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("extra", EXTRAS)
def test_trace_with_symbolic_sizes(extra, is_packed, dispatch):
    """torch.compile has symbols for sizes after calls that differ in them, also for the head dim and so the scale."""
    torch._dynamo.reset()
    traced = []

    def backend(graph, inputs):
        traced.extend(graph.graph.nodes)
        return lambda *_: (torch.zeros(()),)

    def attend(qkv, rope=None, rope_half=False, **given):
        absent = {"bias": None, "mask": None, "segment_ids": None, "is_causal": False, "dropout_p": 0.0}
        given = absent | {"scale": qkv.shape[-1] ** -0.5} | given
        if is_packed:
            return dispatch.attend_packed(qkv, rope, rope_half, **given)
        return dispatch.attend(*unpacked(qkv), rope, rope_half, **given)

    attend = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    for B, N, H, D in ((2, 197, 3, 88), (3, 300, 2, 64)):
        attend(torch.zeros(B, N, 3, H, D, dtype=torch.bfloat16), **EXTRAS[extra](B, H, N, D))
    assert any(isinstance(node.meta.get("example_value"), torch.SymInt) for node in traced)
    assert any("pallas_flash_hopper" in str(node.target) for node in traced)


def test_packed_segments__compile_once_for_all_batch_sizes(dispatch):
    """How many chunks make a segment long depends on the number of heads of all images."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return lambda *_: (torch.zeros(()),)

    def attend(qkv, segment_ids):
        others = {"bias": None, "mask": None, "is_causal": False, "scale": 0.125, "dropout_p": 0.0}
        return dispatch.attend_packed(qkv, None, False, segment_ids=segment_ids, **others)

    attend = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    for B in (2, 20, 50):
        attend(torch.zeros(B, 300, 3, 3, 64, dtype=torch.bfloat16), torch.zeros(B, 300, dtype=torch.int64))
    assert len(graphs) == 1
