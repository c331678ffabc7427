"""triton_flash's tiles of packed segments: the table, its fallbacks, and results that no other segment can change."""

import pytest
import torch

pytest.importorskip("triton")

from vitkernels import attention
from vitkernels.attention.triton_flash.segments import segment_tiles
from vitkernels.attention.triton_flash.tiling import SEGMENT_ROWS, TileConfig
from vitkernels.testing import attention_reference
from vitkernels.testing.attention_harness import AttentionHarness, check_reruns

UNEQUAL = (1, 49, 64, 65, 197, 300)
# Of each batch entry: (id, tokens) of the runs, one after another.
PACKED = {
    "unequal": [list(enumerate(UNEQUAL)), list(enumerate((338, 338)))],
    "padding": [[(0, 40), (1, 65), (2, 9), (-1, 16)], [(1, 129), (0, 1)]],
    "out of order": [[(5, 64), (900, 33), (-7, 33)]],
    "one segment": [[(7, 130)], [(-2, 130)]],
}
FALLBACK = {
    "recurring": [[(0, 70), (1, 20), (0, 40)], [(3, 65), (4, 65)]],
    "each token": [[(i, 1) for i in range(100)], [(3, 100)]],
    "pairs": [[(i, 2) for i in range(50)]],
    "one bin": [[(0, 70), (1024, 20)]],
    "equal in 32 bits": [[(1, 70), (2**32 + 1, 20)]],
}


def ids_of(entries, device="cpu", dtype=torch.int64):
    rows = [torch.cat([torch.full((tokens,), i, dtype=dtype) for i, tokens in runs]) for runs in entries]
    return torch.stack(rows).to(device)


class TestSegments(AttentionHarness):
    backend = "triton_flash"

    @pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def device(self, request):
        return request.param

    @pytest.fixture
    def dtype(self, device):
        """Return a dtype whose calls use the table: on CUDA not float32."""
        return torch.float32 if device == "cpu" else torch.float16

    @pytest.mark.parametrize("entries", (PACKED | FALLBACK).values(), ids=PACKED | FALLBACK)
    def test_packed(self, device, dtype, entries):
        ids = ids_of(entries, device)
        self.check_packed(attention_reference.draw_packed(device, *ids.shape, 1, 32, dtype), segment_ids=ids)

    @pytest.mark.parametrize(
        "entries, D, of_ids",
        [("padding", 16, torch.uint8), ("padding", 160, torch.int16), ("recurring", 40, torch.int8)],
    )
    def test_heads_and_head_dims(self, device, dtype, entries, D, of_ids):
        ids = ids_of((PACKED | FALLBACK)[entries], device, of_ids)
        B, N = ids.shape
        self.check(attention_reference.draw(device, B, 2, N, D, dtype, None), segment_ids=ids)

    @pytest.mark.parametrize("entries, half", [("padding", True), ("padding", False), ("recurring", True)])
    def test_rope(self, device, dtype, entries, half):
        ids = ids_of((PACKED | FALLBACK)[entries], device)
        B, N = ids.shape
        rope = torch.randn(N - 3, 64, device=device)
        leaves = attention_reference.draw(device, B, 1, N, 32, dtype, None)
        self.check(leaves, segment_ids=ids, rope=rope, rope_half=half)

    def test_combined(self, device, dtype):
        """Masks, biases, causality and negative scales use the kernels that compare ids in every tile."""
        ids = ids_of(PACKED["padding"], device)
        B, N = ids.shape
        leaves = attention_reference.draw(device, B, 1, N, 16, dtype, None)
        mask = torch.rand(B, 1, 1, N, device=device) < 0.7
        self.check(leaves, segment_ids=ids, mask=mask)
        self.check(leaves, segment_ids=ids, is_causal=True)
        self.check(leaves, segment_ids=ids, bias=torch.randn(N, N, device=device, requires_grad=True))
        self.check(leaves, segment_ids=ids, scale=-0.2)

    @pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # of the interpreter's maxima
    def test_segments__do_not_read_each_other(self, device, dtype):
        ids = ids_of(PACKED["unequal"][:1], device)
        qkv = attention_reference.draw_packed(device, *ids.shape, 1, 32, dtype)
        spoiled = qkv.detach().clone()
        spoiled[ids == 3] = float("nan")
        spoiled.requires_grad_()
        do = torch.randn(*ids.shape, 32, device=device, dtype=dtype)

        def run(qkv):
            out = self.attend.qkvpacked(qkv, segment_ids=ids)
            return out, *torch.autograd.grad(out, qkv, do)

        for wanted, got in zip(run(qkv), run(spoiled), strict=True):
            assert wanted.isfinite().all() and torch.equal(got[ids != 3], wanted[ids != 3])
            assert got[ids == 3].isnan().all()

    def test_reruns__are_bit_equal(self, device, dtype):
        ids = ids_of(FALLBACK["recurring"], device)
        qkv = attention_reference.draw_packed(device, *ids.shape, 1, 32, dtype)
        check_reruns(lambda: self.attend.qkvpacked(qkv, segment_ids=ids), [qkv])

    @pytest.mark.parametrize("entries", (PACKED | FALLBACK).values(), ids=PACKED | FALLBACK)
    def test_table__covers_each_row_once(self, device, entries):
        ids = ids_of(entries, device)
        for of_entry, table in zip(ids.tolist(), segment_tiles(ids).tolist(), strict=True):
            covered = []
            for first, end, start, compares in table:
                assert 0 <= start <= first <= end <= len(of_entry)
                if first < end:
                    covered += range(first, min(first + SEGMENT_ROWS, end))
                if first < end and not compares:
                    assert {i for i, x in enumerate(of_entry) if x == of_entry[first]} == set(range(start, end))
            assert covered == list(range(len(of_entry)))
        assert segment_tiles(ids)[0, :, 3].any() == (entries in FALLBACK.values())

    def test_table__of_strided_ids(self, device):
        ids = ids_of(PACKED["padding"], device)
        assert torch.equal(segment_tiles(ids.T.contiguous().T), segment_tiles(ids))
        assert segment_tiles(ids[:0]).shape == (0, 5, 4)

    def test_operators__pass_opcheck(self, device, dtype):
        ids = ids_of(PACKED["padding"], device)
        qkv = attention_reference.draw_packed(device, *ids.shape, 1, 32, dtype)
        self.attend.qkvpacked(qkv, segment_ids=ids)  # registers them
        ops = torch.ops.vitkernels
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(ops.triton_flash_segment_tiles, (ids,), test_utils=checks)
        extras = None, None, ids, False, 0.2, [], segment_tiles(ids)
        torch.library.opcheck(ops.triton_flash_packed, (qkv, *extras), test_utils=checks)
        q, k, v = qkv.detach().permute(2, 0, 3, 1, 4).unbind(0)
        torch.library.opcheck(ops.triton_flash, (q, k, v, *extras), test_utils=checks)

    def test_compiled__makes_one_table_for_all_layers(self, device, dtype):
        """Without a table, the operator compares ids, and returns the same."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        ids = ids_of(PACKED["padding"], device)
        qkv = attention_reference.draw_packed(device, *ids.shape, 1, 32, dtype)
        graphs = []

        def model(qkv):
            first = self.attend.qkvpacked(qkv, segment_ids=ids)
            return first + self.attend.qkvpacked(qkv * 2, segment_ids=ids)

        def keep(graph, inputs):
            graphs.append(graph)
            return make_boxed_func(graph)

        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
        out = torch.compile(model, fullgraph=True, backend=backend)(qkv)
        torch.testing.assert_close(out, model(qkv), rtol=1e-3, atol=1e-3)
        (got,), (wanted,) = torch.autograd.grad(out.sum(), qkv), torch.autograd.grad(model(qkv).sum(), qkv)
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
        assert str([graph.code for graph in graphs]).count("triton_flash_segment_tiles.default(") == 1
        without, _ = torch.ops.vitkernels.triton_flash_packed(qkv, None, None, ids, False, 32**-0.5, [], None)
        # Other tiles round the weights to float16 relative to other maxima: by a unit or two in the last place.
        tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float16 else {}
        with_table = attention.get("triton_flash").qkvpacked(qkv, segment_ids=ids)
        torch.testing.assert_close(without, with_table, **tolerance)


def test_smaller__keeps_the_rows_of_the_table():
    tiles, found = TileConfig(64, 32, 4, 2, fixed="n"), []
    while tiles := tiles.smaller():
        found.append((tiles.n, tiles.m, tiles.num_stages))
    assert found == [(64, 32, 1), (64, 16, 1)]
