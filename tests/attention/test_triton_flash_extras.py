"""How triton_flash reads biases, masks and rotary embeddings: padded rows, copies with a row per key, skipped keys."""

import pytest
import torch

pytest.importorskip("triton")

from vitkernels import attention
from vitkernels.attention.triton_flash import launch
from vitkernels.attention.triton_flash.inputs import padded_keys
from vitkernels.attention.triton_flash.keys_first import LEAST_SHARED, keys_first
from vitkernels.testing import attention_reference
from vitkernels.testing.attention_harness import AttentionHarness, check_reruns

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


def test_padded_keys__keeps_rows_shared():
    """By entries, heads and queries, unless the bias needs a gradient, which has its own shape."""
    mask = (torch.rand(4, 1, 1, 70) < 0.5).expand(4, 2, 70, 70)
    assert padded_keys(mask, 70, (), False).shape == (4, 1, 1, 128)
    bias = torch.randn(1, 2, 70, 70, requires_grad=True)
    assert padded_keys(bias.expand(4, 2, 70, 70), 70, (), -torch.inf).shape == (4, 2, 70, 128)
    assert padded_keys(bias.detach().expand(4, 2, 70, 70), 70, (), -torch.inf).shape == (1, 2, 70, 128)


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


def call_operator(bias, scale=1.0, sizes=(), N=80):
    """Call the operator itself, without padded_keys, and its backward pass."""
    flash = attention.get("triton_flash")
    q, k, v = torch.randn(3, 1, 1, N, 16).unbind(0)
    flash(q, k, v)  # registers it
    out, _ = torch.ops.vitkernels.triton_flash(
        q.requires_grad_(), k, v, bias, None, None, False, scale, list(sizes), None
    )
    out.sum().backward()


# Of each pass: tiles of 32 keys divide 96 columns, and those of 64 do not.
@pytest.mark.parametrize(
    "columns, N, sizes",
    [
        (80, 80, (128, 64, 16, 16, 16, 16)),
        (96, 80, (16, 16, 128, 64, 16, 16)),
        (96, 80, (16, 16, 16, 16, 16, 64)),
        (40, 40, ()),
        (64, 80, (16,) * 6),
    ],
    ids=["forward", "dq", "dkdv", "single tile", "fewer columns than keys"],
)
def test_unpadded_rows__are_refused(columns, N, sizes):
    """A tile would reach beyond the rows."""
    with pytest.raises(ValueError, match="must come from padded_keys"):
        call_operator(torch.zeros(1, 1, N, columns), sizes=sizes, N=N)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_scales_that_callers_must_fold_into_q__are_refused(scale):
    with pytest.raises(ValueError, match="scale must be positive"):
        call_operator(None, scale)


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("extra", [None, "bias", "mask"])
def test_compiled__equals_eager(extra, rope):
    """Also the gradients, of which those of a bias have its own shape."""
    torch._dynamo.reset()
    keywords = {"rope": torch.randn(69, 64), "rope_half": True} if rope else {}
    bias = torch.randn(2, 70, 70, requires_grad=True)
    given = {"bias": bias} if extra == "bias" else {"mask": torch.arange(70) < 50} if extra else {}
    qkv = attention_reference.draw_packed("cpu", 2, 70, 2, 32)

    def model(qkv, **given):
        return attention.get("triton_flash").qkvpacked(qkv, **given, **keywords)

    found, wanted = torch.compile(model, fullgraph=True, backend="aot_eager")(qkv, **given), model(qkv, **given)
    assert torch.equal(found, wanted)
    leaves, do = (qkv, bias) if extra == "bias" else (qkv,), torch.randn_like(wanted)
    for x, y in zip(*(torch.autograd.grad(out, leaves, do) for out in (found, wanted)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("shape", [("tokens",), ("tokens", "tokens")])
def test_export__with_dynamic_tokens(shape):
    """Rows of whole tiles, too, which need no padding."""

    class Model(torch.nn.Module):
        def forward(self, qkv, mask):
            return attention.get("triton_flash").qkvpacked(qkv, mask=mask)

    def arguments(tokens):
        return torch.randn(1, tokens, 3, 1, 16), torch.rand([tokens for _ in shape]) < 0.7

    tokens = torch.export.Dim("tokens", min=17, max=200)
    dynamic = {"qkv": {1: tokens}, "mask": dict.fromkeys(range(len(shape)), tokens)}
    program = torch.export.export(Model(), arguments(70), dynamic_shapes=dynamic).module()
    for length in (70, 64, 90):
        given = arguments(length)
        assert torch.equal(program(*given), Model()(*given))


class TestExtras(AttentionHarness):
    backend = "triton_flash"

    @pytest.fixture(params=DEVICES)
    def device(self, request):
        return request.param

    @pytest.fixture
    def copies(self, monkeypatch):
        """Let two heads be enough for a copy with a row per key."""
        monkeypatch.setattr("vitkernels.attention.triton_flash.keys_first.LEAST_SHARED", 2)

    # Matrices of the last shape are not copied. Ragged and whole tiles of queries, of keys, and of both.
    @pytest.mark.parametrize(
        "shape, N, M",
        [((1, 2), 70, 70), ((1, 1), 70, 70), ((2, 1), 70, 70), ((2, 2), 70, 70), ((1, 2), 65, 128), ((1, 2), 128, 97)],
    )
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

    @pytest.mark.parametrize("entries", [1, 2, 3])
    @pytest.mark.parametrize("shape", [(1, 2, 70, 70), (70, 70), (1, 1, 1, 70), (3, 1, 70, 70), (3, 2, 70, 70)])
    def test_bias_gradient__of_some_entries_at_a_time(self, device, monkeypatch, shape, entries):
        """The operator also fills the padding of the gradient, where an anomaly detector would report NaN."""
        monkeypatch.setattr(launch, "MOST_SCORES", entries * 2 * 70 * 128)
        bias = torch.randn(shape, device=device, requires_grad=True)
        with torch.autograd.set_detect_anomaly(True):
            self.check(attention_reference.draw(device, 3, 2, 70, 16), bias=bias)

    @pytest.mark.parametrize("extra", ["causal", "mask", "segment_ids"])
    def test_bias_gradient__is_zero_in_skipped_tiles(self, device, extra):
        place = torch.arange(200, device=device)
        extras = {
            "causal": {"is_causal": True},
            "mask": {"mask": place < 60},
            "segment_ids": {"segment_ids": place.expand(2, 200) // 70},
        }
        bias = torch.randn(2, 200, 200, device=device, requires_grad=True)
        self.check(attention_reference.draw(device, 2, 2, 200, 16), bias=bias, **extras[extra])

    @pytest.mark.parametrize("entries", [1, 3])
    def test_bias_gradient__is_bit_equal_in_reruns(self, device, monkeypatch, entries):
        monkeypatch.setattr(launch, "MOST_SCORES", entries * 2 * 70 * 128)
        leaves = attention_reference.draw(device, 3, 2, 70, 32)
        bias = torch.randn(1, 2, 70, 70, device=device, requires_grad=True)
        check_reruns(lambda: self.attend(*leaves, bias=bias), (*leaves, bias))

    def test_mask_of_keys(self, device):
        """Each image has its own range, or none. The search for them reads 256 keys at a time."""
        ranges = [(0, 300), (150, 151), (299, 300), (255, 257), (7, 7)]
        B, N = len(ranges), 300
        mask = torch.zeros(B, 1, 1, N, dtype=torch.bool, device=device)
        for i, (first, end) in enumerate(ranges):
            mask[i, ..., first:end] = True
        self.check(attention_reference.draw(device, B, 1, N, 16), mask=mask)
        mask[0, ..., 30:200:2] = False
        ids = torch.arange(N, device=device).expand(B, N) // 200
        self.check(attention_reference.draw(device, B, 1, N, 16), mask=mask, segment_ids=ids)

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

    @pytest.mark.parametrize("keys", [1, 0])
    def test_bias_and_mask__for_no_keys(self, device, keys):
        """Their last dimension may be 1 or 0."""
        leaves = attention_reference.draw(device, 1, 1, 70, 16)
        leaves[1:] = [x.detach()[:, :, :0].requires_grad_() for x in leaves[1:]]
        for shape in ((keys,), (70, keys), (1, 1, 70, keys)):
            for name, x in (("bias", torch.zeros(shape)), ("mask", torch.ones(shape, dtype=torch.bool))):
                out = self.attend(*leaves, **{name: x.to(device)})
                assert not out.any() and not torch.autograd.grad(out.sum(), leaves[0])[0].any()

    # Scales that are folded into q: below 0, 0, and below float32's range.
    @pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-40])
    def test_scale(self, device, scale):
        for extras in ({}, {"mask": torch.arange(70, device=device) < 50}):
            self.check_packed(attention_reference.draw_packed(device, 1, 70, 2, 16), scale=scale, **extras)
        rope = attention_reference.rotary_table(device, 69, 16, False)
        self.check_packed(attention_reference.draw_packed(device, 1, 70, 2, 16), scale=scale, rope=rope)

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
