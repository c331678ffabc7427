"""The conformance suite of attention backends: every layout, length and extra against a float64 reference."""

import re

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from vitkernels.attention import Problem
from vitkernels.errors import UsageError
from vitkernels.testing.attention_harness import AttentionHarness
from vitkernels.testing.attention_reference import (
    HEAD_DIMS,
    LENGTHS,
    MANY,
    ODD_HEAD_DIMS,
    TOLERANCE,
    batch_and_heads,
    draw,
    draw_packed,
    reference,
    relative_error,
    rotary_table,
    unpacked,
)


class AttentionConformance(AttentionHarness):
    """Check that one attention backend satisfies the contract of `vitkernels.attention.AttentionBackend`.

    In a test file, subclass it with a name that begins with "Test", and set:
        backend: a registered name, or the backend itself.
        slow_on_cpu: True for kernels that are interpreted on a CPU; long sequences then run only on a GPU.
    Each test runs on the CPU and, if PyTorch finds one, on an NVIDIA GPU. If the backend refuses a problem, the test
    checks that the call raises with the same reason, and is then skipped.
    """

    # ------------------------------------------------------------------ shapes and dtypes
    @pytest.mark.parametrize("N", LENGTHS)
    def test_lengths(self, device, N):
        self.skip_long(device, N)
        self.check(draw(device, *batch_and_heads(N), N, 64))

    @pytest.mark.parametrize("N", LENGTHS)
    def test_lengths_packed(self, device, N):
        self.skip_long(device, N)
        B, H = batch_and_heads(N)
        self.check_packed(draw_packed(device, B, N, H, 64))

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="takes too long without an NVIDIA GPU")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("D", [64, 80, 88])
    @pytest.mark.parametrize("N", LENGTHS)
    def test_half_precision_packed(self, device, N, D, dtype):
        self.skip_long(device, N)
        B, H = batch_and_heads(N)
        self.check_packed(draw_packed(device, B, N, H, D, dtype))

    @pytest.mark.parametrize("B, H", MANY)
    def test_many_batches_and_heads(self, device, B, H):
        if device == "cpu" and self.slow_on_cpu and B * H > 12:
            pytest.skip("takes too long on a CPU; runs on a GPU")
        self.check(draw(device, B, H, 17, 32))
        self.check_packed(draw_packed(device, B, 17, H, 32))

    @pytest.mark.parametrize("D", [*HEAD_DIMS, *ODD_HEAD_DIMS])
    def test_head_dims(self, device, D):
        self.check_packed(draw_packed(device, 1, 37, 2, D))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_dtypes(self, device, dtype):
        self.check(draw(device, 1, 2, 70, 64, dtype))
        self.check_packed(draw_packed(device, 1, 70, 2, 64, dtype))

    def test_float64__exact_or_refused(self, device):
        self.check(draw(device, 1, 2, 20, 32, torch.float64), tolerance=1e-12)  # a few thousand times 2⁻⁵³

    @pytest.mark.parametrize("N, M", [(50, 70), (129, 17), (1, 33)])
    def test_cross_lengths(self, device, N, M):
        self.check(draw(device, 2, 2, N, 64, M=M))
        self.check(draw(device, 2, 2, N, 64, M=M), is_causal=True)

    # ------------------------------------------------------------------ extras
    @pytest.mark.parametrize(
        "shape", [(2, 2, 50, 50), (2, 50, 50), (1, 1, 50, 50), (2, 1, 1, 50), (1, 2, 50, 1), (50,)]
    )
    def test_bias__with_gradient(self, device, shape):
        bias = torch.randn(shape, device=device, requires_grad=True)
        leaves = draw(device, 2, 2, 50, 64)
        if shape == (
            1,
            2,
            50,
            1,
        ):  # shifts all scores of a query, so its gradient is only rounding
            bias = bias.detach()
        self.check(leaves, bias=bias)

    def test_bias__minus_infinity_masks(self, device):
        bias = torch.randn(1, 2, 50, 50, device=device)
        bias[..., 40:] = float("-inf")
        bias[:, 1, 7] = float("-inf")
        self.check(draw(device, 2, 2, 50, 64), bias=bias)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("of_bias", [torch.float32, torch.bfloat16])
    def test_bias__of_any_finite_size(self, device, dtype, of_bias):
        """Padding masks add float32's or bfloat16's lowest value; where all keys have it, their average results."""
        lowest = torch.finfo(of_bias).min
        bias = torch.zeros(2, 1, 40, 40, device=device, dtype=of_bias)
        bias[0, ..., 33:] = lowest  # padded keys
        bias[0, :, 33:] = lowest  # padded queries: equal scores, since the bias absorbs all others
        bias[1, :, :20] = lowest / 1.3
        bias[1, :, 3, 5:] = float("-inf")
        bias[1, :, 4, :8] = -1e38
        bias[1, :, 5] = -1e38
        bias[1, :, 6] = -lowest / 2
        rounded = max(TOLERANCE[dtype], TOLERANCE[of_bias])  # the gradient has the bias's dtype
        self.check(draw(device, 2, 1, 40, 32, dtype), tolerance=rounded, bias=bias.requires_grad_())

    @pytest.mark.parametrize("shape", [(2, 2, 70, 70), (1, 1, 70, 70), (2, 1, 1, 70), (2, 1, 70, 1), (70,)])
    def test_masks(self, device, shape):
        mask = torch.rand(shape, device=device) < 0.5
        self.check(draw(device, 2, 2, 70, 64), mask=mask)

    def test_query_without_keys__gives_zeros(self, device):
        leaves = draw(device, 1, 2, 50, 64)
        mask = torch.ones(50, 50, dtype=torch.bool, device=device)
        mask[3] = False
        mask[-1] = False
        backend = self.taken(*leaves, mask=mask)
        out = backend(*leaves, mask=mask)
        dq, dk, dv = torch.autograd.grad(out, leaves, torch.randn_like(out))
        for x in (out, dq):
            assert torch.count_nonzero(x[:, :, [3, 49]]) == 0
        for x in (out, dq, dk, dv):
            assert x.isfinite().all()

    def test_segments(self, device):
        self.check(draw(device, 2, 2, 70, 64), segment_ids=torch.randint(0, 3, (2, 70), device=device))

    @pytest.mark.parametrize("lengths", [(40, 70, 1, 19), (128, 128), (130,)])
    def test_segments__packed_one_after_another(self, device, lengths):
        ids = torch.repeat_interleave(torch.arange(len(lengths)) * 3 - 1, torch.tensor(lengths)).to(device)
        leaves = draw(device, 1, 1, sum(lengths), 32)
        self.check(leaves, segment_ids=ids[None])
        self.check(leaves, segment_ids=ids.flip(0)[None], is_causal=True)

    def test_causal(self, device):
        self.check(draw(device, 1, 2, 130, 64), is_causal=True)

    def test_causal__ignores_keys_beyond_the_last_query(self, device):
        q, k, v = draw(device, 1, 2, 50, 64, M=70)
        bias, mask = torch.randn(1, 2, 50, 70, device=device), torch.rand(50, 70, device=device) < 0.9
        backend = self.taken(q, k, v, bias=bias, mask=mask, is_causal=True)
        do = torch.randn_like(q)

        def results(hidden):
            leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
            with torch.no_grad():
                leaves[1][:, :, 50:], leaves[2][:, :, 50:] = hidden, hidden
            out = backend(*leaves, bias=bias, mask=mask, is_causal=True)
            return out, *torch.autograd.grad(out, leaves, do)

        for x, y in zip(results(float("nan")), results(0.0), strict=True):
            assert torch.equal(x, y)

    # ------------------------------------------------------------------ rotary position embeddings
    @pytest.mark.parametrize("rope_half", [False, True])
    @pytest.mark.parametrize("D, leading, rows", [(32, (), 37), (64, (2, 1), 36), (80, (1, 2), 33), (96, (2, 2), 32)])
    def test_rope(self, device, D, leading, rows, rope_half):
        """The first tokens are not rotated. Sines and cosines differ within a pair, so that none can be confused."""
        if device == "cpu" and self.slow_on_cpu and device not in self.attend.rotates_on:
            pytest.skip("q and k come rotated; runs on a GPU")
        rope = torch.randn(*leading, rows, 2 * D, device=device)
        # Random rotations double the scores.
        self.check_packed(draw_packed(device, 2, 37, 2, D), rope=rope, rope_half=rope_half, scale=0.5 * D**-0.5)

    @pytest.mark.parametrize("rope_half", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_rope__in_half_precision(self, device, dtype, rope_half):
        """Packed calls, with sines and cosines in float32 and in the dtype of q, and a separate call."""
        if device == "cpu" and self.slow_on_cpu and device not in self.attend.rotates_on:
            pytest.skip("q and k come rotated; runs on a GPU")
        rope = rotary_table(device, 45, 64, rope_half)
        for table in (rope, rope.to(dtype)):
            self.check_packed(draw_packed(device, 2, 50, 2, 64, dtype), rope=table, rope_half=rope_half)
        self.check(draw(device, 2, 2, 50, 64, dtype), rope=rope, rope_half=rope_half)

    @pytest.mark.parametrize("rope_half", [False, True])
    def test_rope__with_everything_else(self, device, rope_half):
        extras = {
            "bias": torch.randn(2, 1, 50, 50, device=device, requires_grad=True),
            "mask": torch.rand(1, 2, 50, 50, device=device) < 0.7,
            "segment_ids": torch.arange(50, device=device).expand(2, 50) // 20,
            "is_causal": True,
            "rope": rotary_table(device, 45, 64, rope_half),
            "rope_half": rope_half,
        }
        self.check(draw(device, 2, 2, 50, 64), **extras)
        half = {"rope": extras["rope"], "rope_half": rope_half}
        self.check(draw(device, 1, 2, 50, 64, torch.bfloat16), **half)

    def test_rope__gradient(self, device):
        """Mixed rotary embeddings are learned."""
        rope = rotary_table(device, 20, 32, False).requires_grad_()
        qkv = draw_packed(device, 2, 21, 2, 32)
        out = self.taken(*unpacked(qkv), rope=rope).qkvpacked(qkv, rope=rope)
        do = torch.randn_like(out)
        grads = torch.autograd.grad(out, (qkv, rope), do)
        copies = [x.detach().double().requires_grad_() for x in (qkv, rope)]
        exact = reference(*unpacked(copies[0]), rope=copies[1]).transpose(1, 2).flatten(2)
        for x, y in zip(grads, torch.autograd.grad(exact, copies, do.double()), strict=True):
            assert relative_error(x, y) < TOLERANCE[torch.float32]

    def test_everything_at_once(self, device):
        extras = {
            "bias": torch.randn(2, 1, 50, 50, device=device, requires_grad=True),
            "mask": torch.rand(1, 2, 50, 50, device=device) < 0.7,
            "segment_ids": torch.arange(50, device=device).expand(2, 50) // 20,
            "is_causal": True,
            "scale": 0.3,
        }
        self.check(draw(device, 2, 2, 50, 40), **extras)

    @pytest.mark.parametrize("scale", [1.0, 0.02, -0.3, 0.0])
    def test_scale(self, device, scale):
        self.check(draw(device, 1, 2, 40, 32), scale=scale)

    def test_large_scores(self, device):
        q, k, v = draw(device, 1, 2, 70, 64)
        # A tenth of a float32 ulp in scores of about 500 changes a weight by 3e-6, each weight differently.
        self.check([(q.detach() * 8).requires_grad_(), (k.detach() * 8).requires_grad_(), v], tolerance=2e-4)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_scores__beyond_float16(self, device, dtype):
        """Each query has one key, with a score of 131072, beyond float16's 65504. All weights are exactly 0 or 1."""
        q, k = (n * torch.eye(64, device=device).expand(1, 2, 64, 64) for n in (2.0**15, 2.0**5))
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, torch.randn(1, 2, 64, 64, device=device))]
        out = self.taken(*leaves)(*leaves)
        assert torch.equal(out, leaves[2])
        do = torch.randn_like(out)
        dq, dk, dv = torch.autograd.grad(out, leaves, do)
        assert torch.equal(dv, do) and dq.isfinite().all() and dk.isfinite().all()

    # ------------------------------------------------------------------ memory
    def test_strides__of_q_k_v(self, device):
        """Tokens outermost, a head dim that is not innermost, an expanded gradient."""
        q, k, v = (torch.randn(50, 2, 2, 64, device=device).permute(1, 2, 0, 3).requires_grad_() for _ in range(3))
        self.check([q, k, v])
        q, k, v = (torch.randn(2, 2, 32, 50, device=device).mT.requires_grad_() for _ in range(3))
        self.check([q, k, v])
        backend = self.taken(q, k, v)
        (dv,) = torch.autograd.grad(backend(q, k, v).sum(), v)
        copies = [x.detach().double().requires_grad_() for x in (q, k, v)]
        assert (
            relative_error(dv, torch.autograd.grad(reference(*copies).sum(), copies[2])[0]) < TOLERANCE[torch.float32]
        )

    def test_strides__of_extras(self, device):
        """Elements with gaps between them, which must not be read; stride 0; and heads as the innermost dimension."""

        def apart(x, between):
            return torch.stack([x, torch.full_like(x, between)], -1)[..., 0]

        bias = apart(torch.randn(2, 2, 50, 50, device=device), float("nan")).requires_grad_()
        ids = torch.randint(0, 3, (2, 50), device=device)
        mask = apart(torch.rand(2, 2, 50, 50, device=device) < 0.7, True)
        self.check(draw(device, 2, 2, 50, 64), bias=bias, mask=mask, segment_ids=apart(ids, 7))
        bias = torch.randn(50, device=device).expand(2, 2, 50, 50).requires_grad_()
        self.check(draw(device, 2, 2, 50, 64), bias=bias, mask=mask[:, :1].expand(2, 2, 50, 50))
        bias = torch.randn(50, 50, 2, device=device).permute(2, 0, 1).requires_grad_()
        self.check(draw(device, 2, 2, 50, 64), bias=bias, mask=mask[:, :1])

    def test_result__survives_the_next_call(self, device):
        """A call overwrites neither an earlier result nor what its backward pass saved."""
        first, second = (torch.randn(2, 17, 3, 2, 32, device=device, requires_grad=True) for _ in range(2))
        backend = self.taken(*unpacked(first))
        for call, shape in ((backend.qkvpacked, (2, 17, 64)), (lambda qkv: backend(*unpacked(qkv)), (2, 2, 17, 32))):
            do = torch.randn(shape, device=device)
            alone = call(first)
            (gradient,) = torch.autograd.grad(alone, first, do)
            was = alone.detach().clone(), gradient.clone()
            again, other = call(first), call(second)
            torch.autograd.grad(other, second, do)
            (gradient_again,) = torch.autograd.grad(again, first, do)
            for x in ((alone, gradient), (again, gradient_again)):  # the same call gives the same bits
                assert torch.equal(x[0], was[0]) and torch.equal(x[1], was[1])

    # ------------------------------------------------------------------ derivatives, dropout, autocast
    @pytest.mark.parametrize("way", ["a second derivative", "make_dual", "jvp", "grad"])
    def test_other_derivatives__correct_or_refused(self, device, way):
        """Kernels define only a backward pass, and PyTorch silently treats some other derivatives as zero."""
        x = torch.randn(2, 2, 9, 32, device=device)

        def of(attend, x):
            f = lambda x: attend(x, x, x)  # noqa: E731
            ones = torch.ones_like(x)
            if way == "make_dual":
                with forward_ad.dual_level():
                    return forward_ad.unpack_dual(f(forward_ad.make_dual(x, ones))).tangent
            if way == "jvp":
                return torch.func.jvp(f, (x,), (ones,))[1]
            if way == "grad":
                return torch.func.grad(lambda x: f(x).square().sum())(x)
            x = x.clone().requires_grad_()
            (dx,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
            return torch.autograd.grad(dx.square().sum(), x)[0]

        self.taken(x, x, x)
        try:
            found = of(self.attend, x)
        except UsageError:
            return
        except RuntimeError as refusal:  # raised by PyTorch for SDPA's kernels or a once_differentiable function
            assert re.search("derivative|differentia|forward (mode )?AD|functorch|not require grad", str(refusal))
            return
        assert found is not None
        assert relative_error(found, of(reference, x.double())) < 10 * TOLERANCE[torch.float32]  # summed twice

    def test_packed__with_extras(self, device):
        qkv = torch.randn(2, 50, 3, 2, 64, device=device, requires_grad=True)
        self.check_packed(qkv, mask=torch.rand(2, 1, 50, 50, device=device) < 0.7, is_causal=True)

    def test_dropout__correct_or_refused(self, device):
        """With the identity as v, the result is the weights themselves, each dropped or divided by 1 - p."""
        p, B, H, N, M = 0.25, 2, 2, 64, 32  # p differs from 1 - p; as many keys as head dims
        q, k, _ = draw(device, B, H, N, M, M=M)
        v = torch.eye(M, device=device).repeat(B, H, 1, 1).requires_grad_()
        backend = self.taken(q, k, v, dropout_p=p)
        out, other = (backend(q, k, v, dropout_p=p) for _ in range(2))
        do = torch.randn_like(out)
        grads = torch.autograd.grad(out, (q, k, v), do)

        kept = out != 0
        copies = [x.detach().double().requires_grad_() for x in (q, k, v)]
        weights = reference(*copies[:2], copies[2].detach()) * kept / (1 - p)
        exact = weights @ copies[2]
        exact_grads = torch.autograd.grad(exact, copies, do.double())
        for what, x, y in zip(("out", "dq", "dk", "dv"), (out, *grads), (exact, *exact_grads), strict=True):
            assert relative_error(x, y) < TOLERANCE[torch.float32], what
        # Five standard deviations of the mean of these draws: exceeded in one run in a million.
        assert abs((~kept).double().mean() - p) < 5 * (p * (1 - p) / kept.numel()) ** 0.5
        drawn = torch.stack([kept, other != 0]).flatten(0, 2)
        assert len(drawn.unique(dim=0)) == len(drawn)  # each call, image and head draws a separate mask

    @pytest.mark.parametrize("alone", range(4), ids=["q", "k", "v", "bias"])
    def test_single_gradient__equals_that_of_a_full_backward(self, device, alone):
        given = draw(device, 2, 2, 50, 64, M=70)
        if alone == 3:
            given.append(torch.randn(2, 1, 50, 70, device=device, requires_grad=True))
        backend = self.taken(*given)
        do = torch.randn_like(given[0])
        among_all = torch.autograd.grad(backend(*given), given, do)[alone]
        given = [x.detach().requires_grad_(i == alone) for i, x in enumerate(given)]
        (found,) = torch.autograd.grad(backend(*given), given[alone], do)
        assert relative_error(found, among_all.double()) < TOLERANCE[torch.float32]

    @pytest.mark.parametrize("extra", ["nothing", "bias", "rope"])
    def test_activation_checkpointing__same_gradients(self, device, extra):
        """torch.utils.checkpoint lets a backward pass read only once what the forward pass saved."""
        qkv = draw_packed(device, 2, 21, 2, 32)
        given = {"bias": torch.randn(2, 21, 21, device=device), "rope": rotary_table(device, 20, 32, False)}
        keywords = {name: x for name, x in given.items() if name == extra}
        backend = self.taken(*unpacked(qkv), **keywords)
        for call in (backend.qkvpacked, lambda qkv, **keywords: backend(*unpacked(qkv), **keywords)):
            out = call(qkv, **keywords)
            do = torch.randn_like(out)
            again = checkpoint(call, qkv, use_reentrant=False, **keywords)
            assert torch.equal(torch.autograd.grad(again, qkv, do)[0], torch.autograd.grad(out, qkv, do)[0])

    def test_autocast(self, device):
        qkv = torch.randn(2, 50, 3, 2, 64, device=device, requires_grad=True)
        with torch.autocast(device, torch.bfloat16):
            self.taken(*unpacked(qkv))
            out = self.attend.qkvpacked(qkv)
            assert out.dtype == torch.bfloat16
        (dqkv,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
        assert dqkv.dtype == torch.float32
        exact = reference(*unpacked(qkv)).transpose(1, 2).flatten(2)
        assert relative_error(out, exact) < TOLERANCE[torch.bfloat16]

    # ------------------------------------------------------------------ refusals
    @pytest.mark.parametrize("empty", ["batch", "heads", "queries", "keys"])
    def test_empty_calls__zeros_or_refused(self, device, empty):
        B, H, N, M = (0 if empty == one else 2 for one in ("batch", "heads", "queries", "keys"))
        q, k = (torch.ones(B, H, tokens, 32, device=device, requires_grad=True) for tokens in (N, M))
        out = self.taken(q, k, k)(q, k, k)
        assert out.shape == q.shape and not out.any()
        out.sum().backward()
        assert not q.grad.any() and not k.grad.any()

    @pytest.mark.parametrize(
        "change, code, fields",
        [
            ({"k": torch.ones(1, 2, 4, 32).numpy()}, "attention.type", {"name": "k"}),
            ({"q": None}, "attention.type", {"name": "q"}),
            ({"mask": [True]}, "attention.type", {"name": "mask"}),
            ({"is_causal": torch.tensor(True)}, "attention.is_causal", {}),
            ({"scale": torch.tensor(1.0, requires_grad=True)}, "attention.scale_gradient", {}),
            ({"scale": torch.ones(2)}, "attention.scale", {}),
            ({"dropout_p": None}, "attention.dropout_p", {}),
            ({"mask": 0.1}, "attention.type", {"name": "mask"}),
            ({"rope": torch.ones(5, 64)}, "attention.rope", {"shape": (5, 64)}),
            ({"rope": torch.ones(4, 32)}, "attention.rope", {"shape": (4, 32)}),
            ({"rope": torch.ones(4, 64, dtype=torch.long)}, "attention.rope", {"dtype": torch.long}),
            ({x: torch.ones(1, 2, 4, 0) for x in "qkv"}, "attention.shape", {"q": (1, 2, 4, 0)}),
            ({x: torch.ones(1, 2, 4, 32, dtype=torch.float8_e4m3fn) for x in "qkv"}, "attention.dtype", {"name": "q"}),
        ],
        ids=[
            "array",
            "no q",
            "mask",
            "is_causal",
            "scale",
            "several scales",
            "dropout_p",
            "number as mask",
            "long rope",
            "narrow rope",
            "int rope",
            "no head dim",
            "8 bits",
        ],
    )
    def test_invalid_arguments__are_named(self, device, change, code, fields):
        def moved(x):
            return x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

        call = {x: torch.ones(1, 2, 4, 32, device=device) for x in "qkv"}
        call |= {x: moved(value) for x, value in change.items()}
        with pytest.raises(UsageError) as raised:
            self.attend(call.pop("q"), call.pop("k"), call.pop("v"), **call)
        assert raised.value.code == code, str(raised.value)
        assert fields.items() <= raised.value.fields.items()

    def test_packed__must_be_one_tensor(self, device):
        with pytest.raises(UsageError) as raised:
            self.attend.qkvpacked([1.0])
        assert raised.value.code == "attention.type" and raised.value.fields["name"] == "qkv"
        scale = torch.tensor(1.0, device=device, requires_grad=True)
        qkv = torch.ones(1, 4, 3, 2, 32, device=device)
        with pytest.raises(UsageError) as raised:
            self.attend.qkvpacked(qkv, scale=scale)
        assert raised.value.code == "attention.scale_gradient"
        with torch.no_grad():
            self.taken(*unpacked(qkv)).qkvpacked(qkv, scale=scale)

    def test_unsupported__same_for_problem_and_call(self, device):
        leaves = draw(device, 1, 2, 20, 32)
        problem = Problem.of(*leaves)
        assert self.attend.unsupported(problem) == self.attend.unsupported(*leaves)
