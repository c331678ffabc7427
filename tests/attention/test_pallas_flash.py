"""pallas_flash's numerics, interpreted on the CPU, against float64, with few heads and images at many lengths.

The interpreter fills the part of a block beyond the array's end with NaN, so a kernel that does not mask its padding
fails here.
"""

import pytest
import torch
from expecting import error

pytest.importorskip("jax")

from vitkernels import attention
from vitkernels.attention import pallas_flash
from vitkernels.attention.pallas_flash.tpu import block_plans, dispatch
from vitkernels.bridge import lazy_target, pallas_op
from vitkernels.testing import attention_reference

FLASH, NATIVE = attention.get("pallas_flash"), attention.get("native")

# Largest error over largest value. float32: sums of up to 4096 products with rounding errors of 6e-8 grow as a random
# walk, 64 × 6e-8, with a factor 2 for the softmax between two products. bfloat16: inputs are exact, probabilities and
# outputs round to 8 bits (2e-3 each), and dq and dk multiply two rounded factors.
TOLERANCE = {torch.float32: 8e-6, torch.bfloat16: 1e-2}


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-6)).item()


def check(*, B=1, H=2, N, M=None, D=64, dtype=torch.float32, packed=False, bias=None, **keywords):
    """Compare the output and every gradient with the native backend in float64."""
    torch.manual_seed(N + D)
    M = N if M is None else M
    shapes = [(B, N, 3, H, D)] if packed else [(B, H, N, D), (B, H, M, D), (B, H, M, D)]
    ours = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in ours]
    flash, native = (FLASH.qkvpacked, NATIVE.qkvpacked) if packed else (FLASH, NATIVE)
    keywords_ours, keywords_exact = dict(keywords), dict(keywords)
    if bias is not None:
        keywords_ours["bias"] = bias.clone().requires_grad_()
        keywords_exact["bias"] = bias.detach().double().requires_grad_()
    out, expected = flash(*ours, **keywords_ours), native(*exact, **keywords_exact)
    assert out.dtype == dtype and out.shape == expected.shape
    assert relative_error(out, expected) < TOLERANCE[dtype]
    g = torch.randn_like(out)
    wanted = ([*ours, keywords_ours["bias"]], [*exact, keywords_exact["bias"]]) if bias is not None else (ours, exact)
    gradients = torch.autograd.grad(out, wanted[0], g), torch.autograd.grad(expected, wanted[1], g.double())
    scale = max(x.abs().max() for x in gradients[1])  # near-zero gradients are compared at the scale of the others
    for ours_g, exact_g in zip(*gradients, strict=True):
        assert ours_g.isfinite().all()
        assert (ours_g.double() - exact_g).abs().max() < TOLERANCE[dtype] * max(exact_g.abs().max(), 0.5 * scale)


@pytest.mark.parametrize("N", [1, 49, 196, 197, 256, 257])
def test_packed__lengths(N):
    check(N=N, packed=True)


@pytest.mark.slow
@pytest.mark.parametrize("N", [577, 640, 729])
def test_packed__longer_rows(N):
    check(N=N, packed=True, dtype=torch.bfloat16)


@pytest.mark.parametrize("N", [1025, 1300])
def test_online_softmax__lengths(N):
    check(N=N, packed=True, D=128, H=1)


def test_online_softmax__4096_tokens():
    check(N=4096, D=64, H=2, packed=True, dtype=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("D", range(32, 129, 8))
def test_separate__head_dims(D):
    check(N=24, D=D, dtype=torch.bfloat16)


@pytest.mark.parametrize(("D", "H"), [(64, 3), (80, 8), (32, 4)])
def test_packed__heads_that_share_lane_tiles(D, H):
    check(N=40, D=D, H=H, packed=True)


@pytest.mark.slow
@pytest.mark.parametrize(("D", "H"), [(72, 4), (88, 3), (120, 3)])  # the last lane tile is partial
@pytest.mark.parametrize("form", ["single_pass", "online_softmax"])
def test_packed__heads_that_straddle_lane_tiles(D, H, form, monkeypatch):
    only(form, monkeypatch)
    check(N=40, D=D, H=H, packed=True, dtype=torch.bfloat16)


@pytest.mark.parametrize(("N", "M"), [(1, 50), (50, 1), (100, 300), (300, 100)])
def test_separate__cross_attention(N, M):
    check(N=N, M=M)


BIAS_SHAPES = [(1, 2, 40, 40), (1, 40, 1)]
MORE_BIAS_SHAPES = [(2, 2, 40, 40), (2, 1, 1, 40), (40, 40), (1, 1, 1, 40)]


@pytest.mark.parametrize("shape", [*BIAS_SHAPES, *(pytest.param(x, marks=pytest.mark.slow) for x in MORE_BIAS_SHAPES)])
@pytest.mark.parametrize("form", ["single_pass", "online_softmax"])
def test_bias__output_and_gradient(shape, form, monkeypatch):
    only(form, monkeypatch)
    check(B=2, N=40, bias=torch.randn(shape))


@pytest.mark.parametrize("form", ["single_pass", "online_softmax"])
def test_masks__combined_and_rows_without_keys(form, monkeypatch):
    only(form, monkeypatch)
    mask = torch.rand(2, 1, 50, 50) > 0.4
    mask[0, :, 7] = False
    ids = torch.tensor([[0] * 20 + [1] * 30, [5] * 50])
    check(B=2, N=50, mask=mask, segment_ids=ids, is_causal=True, scale=-0.3, bias=torch.randn(2, 1, 50), packed=True)
    q = torch.randn(2, 2, 50, 64)
    out = FLASH(q, q, q, mask=mask)
    assert out[0, :, 7].eq(0).all() and out.isfinite().all()


@pytest.mark.parametrize("form", ["single_pass", "online_softmax"])
def test_bias__of_minus_infinity_masks(form, monkeypatch):
    only(form, monkeypatch)
    bias = torch.randn(1, 1, 30, 30)
    bias[..., 20:] = -torch.inf
    bias[:, :, 3] = -torch.inf
    q, k, v = torch.randn(3, 1, 2, 30, 64)
    out = FLASH(q, k, v, bias=bias)
    torch.testing.assert_close(out, NATIVE(q, k, v, bias=bias), atol=1e-5, rtol=1e-5)
    assert out[:, :, 3].eq(0).all()


@pytest.mark.slow
def test_online_softmax__over_several_blocks(monkeypatch):
    only("online_softmax", monkeypatch)
    monkeypatch.setattr(block_plans, "_ONLINE_SCORES", 2 * 128 * 128)
    check(N=130, M=200, bias=torch.randn(1, 2, 130, 200))
    check(N=200, packed=True, is_causal=True, segment_ids=torch.arange(200)[None] // 70)
    check(B=2, N=150, bias=torch.randn(1, 1, 150, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_online_softmax__bias_of_any_finite_size(dtype, monkeypatch):
    only("online_softmax", monkeypatch)
    monkeypatch.setattr(block_plans, "_ONLINE_SCORES", 2 * 128 * 128)
    lowest = torch.finfo(torch.float32).min
    bias = torch.zeros(1, 1, 140, 140)
    bias[..., 130:], bias[..., 130:, :], bias[..., :9, :], bias[..., 9, :] = lowest, lowest, lowest / 2, -lowest / 2
    leaves = attention_reference.draw("cpu", 1, 1, 140, 32, dtype)
    out = FLASH(*leaves, bias=bias.requires_grad_())
    do = torch.randn_like(out)
    copies = [x.detach().double().requires_grad_() for x in (*leaves, bias)]
    exact = attention_reference.reference(*copies[:3], bias=copies[3])
    found, wanted = torch.autograd.grad(out, (*leaves, bias), do), torch.autograd.grad(exact, copies, do.double())
    for x, y in zip((out, *found), (exact, *wanted), strict=True):
        assert attention_reference.relative_error(x, y) < attention_reference.TOLERANCE[dtype]


def only(form: str, monkeypatch) -> None:
    """Run every problem in one form, with a new torch op, because ops cache their traces."""
    monkeypatch.setattr(block_plans, "fits_single_pass", lambda problem: form == "single_pass")
    op = pallas_op(dispatch.attend, vjp=dispatch.attend_vjp, name=f"pallas_flash_{form}")
    monkeypatch.setattr(pallas_flash, "_flash", op)


def test_large_scores__do_not_overflow():
    q, k, v = 60 * torch.randn(3, 1, 2, 30, 64)
    torch.testing.assert_close(FLASH(q, k, v), NATIVE(q, k, v), atol=1e-2, rtol=1e-3)


def test_reruns__are_bit_equal():
    qkv = torch.randn(2, 50, 3, 2, 64, requires_grad=True)
    runs = []
    for _ in range(2):
        out = FLASH.qkvpacked(qkv)
        runs.append((out, *torch.autograd.grad(out.square().sum(), qkv)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_compile_and_fake_tensors__are_supported():
    qkv = torch.randn(1, 40, 3, 2, 64, requires_grad=True)
    compiled = torch.compile(lambda x: FLASH.qkvpacked(x).square().sum(), fullgraph=True, backend="aot_eager")
    ours, eager = (torch.autograd.grad(f(qkv), qkv)[0] for f in (compiled, lambda x: FLASH.qkvpacked(x).square().sum()))
    torch.testing.assert_close(ours, eager)
    with torch._subclasses.FakeTensorMode():
        assert FLASH.qkvpacked(torch.empty(2, 197, 3, 12, 64)).shape == (2, 197, 768)


def test_unsupported__raises_with_the_reason():
    q = torch.randn(1, 1, 8, 64)
    calls = ([q] * 3, {"dropout_p": 0.1}), ([q.half()] * 3, {}), ([torch.randn(1, 1, 8, 20)] * 3, {})
    for (arguments, keywords), reason in zip(calls, ("dropout_p=0.1", "float16", "not 20"), strict=True):
        assert reason in FLASH.unsupported(*arguments, **keywords)
        with error("registry.unsupported", backend="pallas_flash"):
            FLASH(*arguments, **keywords)
    problem = attention.Problem(1, 1, 8, 8, 64, torch.bfloat16, "cuda")
    assert "CUDA" in FLASH.unsupported(problem)


@pytest.mark.parametrize(("N", "D"), [(256, 64), (256, 128)])
def test_accuracy__at_least_that_of_jax_flash_attention(N, D):
    """Compare at multiples of a full block, where JAX's TPU kernel is correct."""
    from jax.experimental.pallas.ops.tpu import flash_attention as theirs

    def run(q, k, v):
        return theirs.flash_attention(q, k, v, sm_scale=D**-0.5)

    peer = pallas_op(run, name="jax_flash_attention")
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = torch.randn(3, 1, 2, N, D).to(dtype)
        exact = NATIVE(q.double(), k.double(), v.double())
        ours, peers = relative_error(FLASH(q, k, v), exact), relative_error(peer(q, k, v), exact)
        assert ours < max(1.2 * peers, 1e-6), (ours, peers)  # one rounding difference in the largest element


@pytest.mark.parametrize("on_tpu", [True, False])
def test_auto__prefers_pallas_flash_on_tpu_but_never_interpreted(monkeypatch, on_tpu):
    problem = attention.Problem(1, 12, 197, 197, 64, torch.bfloat16, "xla")
    monkeypatch.setattr(lazy_target, "_override", ("TPU", "v5e") if on_tpu else ("CPU", None))
    assert attention.choose(problem)[0] == ("pallas_flash" if on_tpu else "sdpa")


@pytest.mark.parametrize(("tokens", "head_dim"), [(50, 64), (197, 64), (257, 64), (257, 88), (320, 48), (4096, 64)])
def test_auto__prefers_pallas_flash_on_hopper(monkeypatch, tokens, head_dim):
    for name in ("pallas_flash", "triton_flash"):
        monkeypatch.setattr(type(attention.get(name)), "refusal", lambda self, problem: None)
    problem = attention.Problem(1, 12, tokens, tokens, head_dim, torch.bfloat16, "cuda")
    assert attention.choose(problem) == ("pallas_flash", {})


def test_dynamic_shapes__compile_per_shape():
    """torch.compile(dynamic=True) passes symbolic head counts and scales, which JAX cannot trace."""
    flash = attention.get("pallas_flash").qkvpacked
    compiled = torch.compile(lambda qkv: flash(qkv * 1.5), dynamic=True, fullgraph=True, backend="aot_eager")
    for tokens in (20, 30):
        qkv = torch.randn(2, tokens, 3, 2, 32, requires_grad=True)
        out, expected = compiled(qkv), flash(qkv * 1.5)
        assert torch.equal(out, expected)
        do = torch.randn_like(out)
        assert torch.equal(*(torch.autograd.grad(y, qkv, do)[0] for y in (out, expected)))
