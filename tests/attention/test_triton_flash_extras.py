"""How triton_flash reads biases, masks and rotary embeddings: padded rows, copies with a row per key, skipped keys."""

import pytest
import torch

pytest.importorskip("triton")

from vitkernels import attention
from vitkernels.attention.triton_flash.inputs import padded_keys
from vitkernels.attention.triton_flash.keys_first import LEAST_SHARED, keys_first
from vitkernels.testing import attention_reference
from vitkernels.testing.attention_harness import AttentionHarness

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("shape", [(70,), (1,), (5, 70), (5, 1), (3, 1, 5, 70), (2, 3, 1, 1)])
def test_padded_keys__hides_the_added_keys(shape):
    bias, mask = torch.randn(shape), torch.rand(shape) < 0.5
    for x, fill in ((bias, -torch.inf), (mask, False)):
        padded = padded_keys(x, 70, (), fill)
        assert padded.shape == (*(1,) * (4 - x.ndim), *shape[:-1], 128) and padded.stride(3) == 1
        assert torch.equal(padded[..., :70], x.expand(*shape[:-1], 70).view(padded[..., :70].shape))
        assert (padded[..., 70:] == fill).all()


def test_padded_keys__copies_only_if_it_must():
    whole = torch.randn(2, 5, 128)
    assert padded_keys(whole, 128, (), -torch.inf).data_ptr() == whole.data_ptr()
    assert padded_keys(whole.mT.contiguous().mT, 128, (), -torch.inf).is_contiguous()
    assert padded_keys(torch.randn(5, 64), 64, (32, 128, 0, 0, 64, 16), -torch.inf).shape == (1, 1, 5, 128)
    assert padded_keys(None, 70, (), -torch.inf) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
@pytest.mark.parametrize("B, H, given", [(LEAST_SHARED, 2, (1, 2)), (2, LEAST_SHARED, (2, 1)), (4, 2, (1, 1))])
def test_keys_first__is_the_transposed_matrix(device, dtype, B, H, given):
    x = torch.randint(0, 100, (*given, 70, 192), device=device).to(dtype)
    found = keys_first(x.expand(B, H, 70, 192), 130)
    assert found.shape == (B, H, 128, 130) and found.stride()[2:] == (1, 128)
    assert torch.equal(found[:, :, :70], x[..., :130].expand(B, H, 70, 130)) and not found[:, :, 70:].any()


def test_keys_first__leaves_matrices_that_few_heads_share():
    x = torch.randn(2, 3, 70, 128)
    for expanded in (x, x[:1].expand(2, 3, 70, 128), x[:, :1].expand(2, 3, 70, 128)):
        assert keys_first(expanded, 70) is expanded


@pytest.mark.parametrize("tiles", [{}, {"dkdv": "128x64"}])
def test_unpadded_rows__are_refused(tiles):
    """The operator itself, without padded_keys: a tile would reach beyond the rows."""
    attention.get("triton_flash")(*torch.randn(3, 1, 1, 80, 16))  # registers it
    sizes = [0, 0, 0, 0, 128, 64] if tiles else []
    with pytest.raises(ValueError, match="must come from padded_keys"):
        torch.ops.vitkernels.triton_flash(
            *torch.randn(3, 1, 1, 80, 16), torch.zeros(1, 1, 80, 80), None, None, False, 1.0, sizes, None
        )


class TestExtras(AttentionHarness):
    backend = "triton_flash"

    @pytest.fixture(params=DEVICES)
    def device(self, request):
        return request.param

    @pytest.fixture
    def copies(self, monkeypatch):
        """Let two heads be enough for a copy with a row per key."""
        monkeypatch.setattr("vitkernels.attention.triton_flash.keys_first.LEAST_SHARED", 2)

    # All but the last are copied. Ragged and whole tiles of queries, of keys, and of both.
    @pytest.mark.parametrize("shape", [(1, 2), (1, 1), (2, 1), (2, 2)])
    @pytest.mark.parametrize("N, M", [(70, 70), (65, 128), (128, 97)])
    def test_matrices(self, device, copies, shape, N, M):
        leaves = attention_reference.draw(device, 2, 2, N, 16, torch.float32, M)
        bias = torch.randn(*shape, N, M, device=device, requires_grad=True)
        mask = torch.rand(*shape, N, M, device=device) < 0.7
        mask[..., 3, :] = False
        self.check(leaves, bias=bias)
        self.check(leaves, bias=bias.detach(), mask=mask)
        self.check(leaves, mask=mask, is_causal=N >= M, scale=-0.3)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_matrices__in_half_precision(self, device, copies, dtype):
        leaves = attention_reference.draw(device, 2, 2, 100, 64, dtype)
        bias = torch.randn(2, 100, 100, device=device).to(dtype).requires_grad_()
        self.check(leaves, bias=bias, mask=torch.rand(100, 100, device=device) < 0.7)

    # The search for kept keys reads 256 keys at a time.
    @pytest.mark.parametrize("kept", [(0, 300), (150, 151), (299, 300), (255, 257), (7, 7)])
    def test_mask_of_keys(self, device, kept):
        """Each image has its own range, or none."""
        mask = torch.ones(2, 1, 1, 300, dtype=torch.bool, device=device)
        mask[1] = False
        mask[1, ..., kept[0] : kept[1]] = True
        self.check(attention_reference.draw(device, 2, 1, 300, 16), mask=mask)
        mask[1, ..., kept[0] + 1 : kept[1] - 1 : 2] = False
        ids = torch.arange(300, device=device).expand(2, 300) // 200
        self.check(attention_reference.draw(device, 2, 1, 300, 16), mask=mask, segment_ids=ids)

    def test_mask_of_keys__skips_nan(self, device):
        """Tiles of hidden keys are not read."""
        mask = torch.arange(200, device=device) < 60
        q, k, v = (x.detach() for x in attention_reference.draw(device, 1, 1, 200, 32))
        k[:, :, 128:] = v[:, :, 128:] = float("nan")
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = self.attend(*leaves, mask=mask)
        found = out, *torch.autograd.grad(out.sum(), leaves)
        alone = [x.detach()[:, :, :60] if i else x.detach() for i, x in enumerate(leaves)]
        exact = attention_reference.reference(*(x.double() for x in alone))
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)  # float32: sums of 60 products
        assert all(torch.isfinite(x).all() for x in found)
        assert not found[2][:, :, 60:].any() and not found[3][:, :, 60:].any()

    @pytest.mark.parametrize("tiles", ["128x128", "16x128", "128x16"])
    def test_requested_tiles(self, device, copies, tiles, monkeypatch):
        chosen = self.attend.configured(tiles=dict.fromkeys(("forward", "dq", "dkdv"), tiles))
        monkeypatch.setattr(self, "backend", chosen, raising=False)
        bias = torch.randn(1, 2, 150, 140, device=device, requires_grad=True)
        self.check(attention_reference.draw(device, 2, 2, 150, 16, torch.float32, 140), bias=bias)

    @pytest.mark.parametrize("N, D", [(50, 64), (37, 40), (70, 80)])
    @pytest.mark.parametrize("rope_half", [False, True])
    def test_rope(self, device, N, D, rope_half):
        """With lengths of the kernels for short sequences, and with everything else that a call can have."""
        rope = attention_reference.rotary_table(device, N - 1, D, rope_half)
        bias = torch.randn(2, N, N, device=device, requires_grad=True)
        extras = {"bias": bias, "mask": torch.arange(N, device=device) < 0.8 * N, "rope": rope, "rope_half": rope_half}
        self.check(attention_reference.draw(device, 2, 2, N, D, torch.float16), **extras)
        self.check_packed(attention_reference.draw_packed(device, 2, N, 2, D, torch.float16), **extras)
        ids = torch.arange(N, device=device).expand(2, N) // 30
        rotation = {"rope": rope, "rope_half": rope_half, "segment_ids": ids}
        self.check_packed(attention_reference.draw_packed(device, 2, N, 2, D, torch.float16), **rotation)


def test_rope__saves_only_rotated_qkv():
    """The projection's output is free after the forward pass, so that memory is as without rope."""
    qkv = attention_reference.draw_packed("cpu", 1, 37, 2, 32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        attention.get("triton_flash").qkvpacked(qkv, rope=torch.randn(36, 64))
    packed = [x for x in saved if x is not None and x.shape == qkv.shape]
    assert len(packed) == 1 and packed[0].data_ptr() != qkv.data_ptr()
