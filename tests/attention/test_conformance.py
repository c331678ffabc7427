"""The one conformance suite: every backend against a float64 reference, on every layout, length and extra."""

import re
from contextlib import contextmanager

import pytest
import torch
from shapes import (
    HEAD_DIMS,
    INTERPRETED,
    INTERPRETED_LENGTH,
    INTERPRETED_MANY,
    LENGTHS,
    MANY,
    ODD_HEAD_DIMS,
    TOLERANCE,
    batch_and_heads,
)
from torch.autograd import forward_ad

from vitkernels import attention
from vitkernels.attention import Problem
from vitkernels.errors import UsageError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

pytestmark = [
    pytest.mark.parametrize("name", attention.names()),
    pytest.mark.parametrize("device", DEVICES),
    # PyTorch says so of SDPA's backward kernels, for poisoned memory comes with deterministic algorithms.
    pytest.mark.filterwarnings("ignore:.* defaults to a non-deterministic algorithm:UserWarning"),
]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """New tensors are full of NaN, so that an element which nobody writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def reference(q, k, v, bias=None, mask=None, segment_ids=None, is_causal=False, scale=None):
    """The contract in float64, written out once more: independent of every backend."""
    q, k, v = q.double(), k.double(), v.double()
    N, M = q.shape[2], k.shape[2]
    s = torch.einsum("bhnd,bhmd->bhnm", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    keep = torch.ones_like(s, dtype=torch.bool)
    if bias is not None:
        s = s + bias.double()
        keep = keep & (bias > float("-inf"))
    if mask is not None:
        keep = keep & mask
    if segment_ids is not None:
        keep = keep & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    if is_causal:
        keep = keep & torch.ones(N, M, dtype=torch.bool, device=q.device).tril()
    s = s.masked_fill(~keep, -1e30)
    p = torch.exp(s - s.detach().amax(-1, keepdim=True)).masked_fill(~keep, 0.0)
    total = p.sum(-1, keepdim=True)
    return torch.einsum("bhnm,bhmd->bhnd", p / torch.where(total == 0, 1.0, total), v)


def error(x, exact):
    """Relative, except where the exact result is nearly nothing: one token alone has no gradient for q and k."""
    return ((x.double() - exact).norm() / exact.norm().clamp_min(1.0)).item()


def draw(device, B, H, N, D, dtype=torch.float32, M=None):
    shape = lambda tokens: (B, H, tokens, D)  # noqa: E731
    tokens = (N, M or N, M or N)
    return [torch.randn(shape(n), device=device).to(dtype).requires_grad_() for n in tokens]


def taken(name, *args, **keywords):
    """The backend; skips where it refuses, once the call itself has refused with the same reason."""
    backend = attention.get(name)
    reason = backend.unsupported(*args, **keywords)
    if reason is not None:
        with pytest.raises(UsageError) as raised:
            backend(*args, **keywords)
        assert reason in str(raised.value)
        pytest.skip(reason)
    return backend


@contextmanager
def unchanged(*given):
    """A kernel that writes into its inputs changes what the reference is then calculated from, and agrees with it."""
    given = [x for x in given if isinstance(x, torch.Tensor)]
    before = [x.detach().clone() for x in given]
    yield
    assert all(map(torch.equal, given, before)), "the call changed its inputs"


def check(name, leaves, tolerance=None, **extras):
    """Forward, dq, dk, dv and dbias of separate q, k, v; the same bits again for triton_flash."""
    backend = taken(name, *leaves, **extras)
    inputs = [*leaves, *(x for x in [extras.get("bias")] if x is not None and x.requires_grad)]
    with unchanged(*leaves, *extras.values()):
        out = backend(*leaves, **extras)
        do = torch.randn_like(out)
        with unchanged(out, do):
            grads = torch.autograd.grad(out, inputs, do)

    copies = [x.detach().double().requires_grad_() for x in inputs]
    if len(copies) == 4:
        extras = extras | {"bias": copies[3]}
    exact = reference(*copies[:3], **extras)
    exact_grads = torch.autograd.grad(exact, copies, do.double())
    tolerance = tolerance or TOLERANCE[out.dtype]
    assert out.dtype == leaves[0].dtype and out.shape == leaves[0].shape
    for what, x, y in zip(("out", "dq", "dk", "dv", "dbias"), (out, *grads), (exact, *exact_grads), strict=False):
        assert error(x, y) < tolerance, what


def check_packed(name, qkv, **extras):
    backend = taken(name, *qkv.permute(2, 0, 3, 1, 4).unbind(0), **extras)
    with unchanged(qkv, *extras.values()):
        out = backend.qkvpacked(qkv, **extras)
        do = torch.randn_like(out)
        with unchanged(out, do):
            (dqkv,) = torch.autograd.grad(out, qkv, do)
    copy = qkv.detach().double().requires_grad_()
    exact = reference(*copy.permute(2, 0, 3, 1, 4).unbind(0), **extras).transpose(1, 2).flatten(2)
    (exact_grad,) = torch.autograd.grad(exact, copy, do.double())
    assert out.shape == exact.shape and out.dtype == qkv.dtype
    assert error(out, exact) < TOLERANCE[qkv.dtype]
    assert error(dqkv, exact_grad) < TOLERANCE[qkv.dtype]


def skip_long(name, device, N):
    if device == "cpu" and (N > INTERPRETED_LENGTH if name in INTERPRETED else N > 1025):
        pytest.skip("takes too long on a CPU; runs where a GPU is")


@pytest.mark.parametrize("N", LENGTHS)
def test_lengths(name, device, N):
    skip_long(name, device, N)
    check(name, draw(device, *batch_and_heads(N), N, 64))


@pytest.mark.parametrize("N", LENGTHS)
def test_lengths_packed(name, device, N):
    skip_long(name, device, N)
    B, H = batch_and_heads(N)
    check_packed(name, torch.randn(B, N, 3, H, 64, device=device, requires_grad=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [64, 80, 88])
@pytest.mark.parametrize("N", LENGTHS)
def test_half_precision_packed(name, device, N, D, dtype):
    skip_long(name, device, N)
    B, H = batch_and_heads(N)
    check_packed(name, torch.randn(B, N, 3, H, D, device=device).to(dtype).requires_grad_())


@pytest.mark.parametrize("B, H", MANY)
def test_many_batches_and_heads(name, device, B, H):
    if device == "cpu" and name in INTERPRETED and B * H > INTERPRETED_MANY:
        pytest.skip("takes too long on a CPU; runs where a GPU is")
    check(name, draw(device, B, H, 17, 32))
    check_packed(name, torch.randn(B, 17, 3, H, 32, device=device, requires_grad=True))


@pytest.mark.parametrize("D", [*HEAD_DIMS, *ODD_HEAD_DIMS])
def test_head_dims(name, device, D):
    check_packed(name, torch.randn(1, 37, 3, 2, D, device=device, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(name, device, dtype):
    check(name, draw(device, 1, 2, 70, 64, dtype))
    check_packed(name, torch.randn(1, 70, 3, 2, 64, device=device).to(dtype).requires_grad_())


def test_float64_is_exact_or_refused(name, device):
    check(name, draw(device, 1, 2, 20, 32, torch.float64), tolerance=1e-12)  # 2⁻⁵³, a few thousand times


@pytest.mark.parametrize("N, M", [(50, 70), (129, 17), (1, 33)])
def test_cross_lengths(name, device, N, M):
    check(name, draw(device, 2, 2, N, 64, M=M))
    check(name, draw(device, 2, 2, N, 64, M=M), is_causal=True)


@pytest.mark.parametrize("shape", [(2, 2, 50, 50), (2, 50, 50), (1, 1, 50, 50), (2, 1, 1, 50), (1, 2, 50, 1), (50,)])
def test_bias_with_gradient(name, device, shape):
    bias = torch.randn(shape, device=device, requires_grad=True)
    leaves = draw(device, 2, 2, 50, 64)
    if shape == (1, 2, 50, 1):  # shifts whole rows of scores: its gradient is 0 but for rounding, so none is asked for
        bias = bias.detach()
    check(name, leaves, bias=bias)


def test_bias_of_minus_infinity_masks(name, device):
    bias = torch.randn(1, 2, 50, 50, device=device)
    bias[..., 40:] = float("-inf")
    bias[:, 1, 7] = float("-inf")
    check(name, draw(device, 2, 2, 50, 64), bias=bias)


@pytest.mark.parametrize("shape", [(2, 2, 70, 70), (1, 1, 70, 70), (2, 1, 1, 70), (2, 1, 70, 1), (70,)])
def test_masks(name, device, shape):
    mask = torch.rand(shape, device=device) < 0.5
    check(name, draw(device, 2, 2, 70, 64), mask=mask)


def test_a_query_without_keys_gives_zeros(name, device):
    leaves = draw(device, 1, 2, 50, 64)
    mask = torch.ones(50, 50, dtype=torch.bool, device=device)
    mask[3] = False
    mask[-1] = False
    backend = taken(name, *leaves, mask=mask)
    out = backend(*leaves, mask=mask)
    dq, dk, dv = torch.autograd.grad(out, leaves, torch.randn_like(out))
    for x in (out, dq):
        assert torch.count_nonzero(x[:, :, [3, 49]]) == 0
    for x in (out, dq, dk, dv):
        assert x.isfinite().all()


def test_segments(name, device):
    check(name, draw(device, 2, 2, 70, 64), segment_ids=torch.randint(0, 3, (2, 70), device=device))


def test_causal(name, device):
    check(name, draw(device, 1, 2, 130, 64), is_causal=True)


def test_everything_at_once(name, device):
    extras = {
        "bias": torch.randn(2, 1, 50, 50, device=device, requires_grad=True),
        "mask": torch.rand(1, 2, 50, 50, device=device) < 0.7,
        "segment_ids": torch.arange(50, device=device).expand(2, 50) // 20,
        "is_causal": True,
        "scale": 0.3,
    }
    check(name, draw(device, 2, 2, 50, 40), **extras)


@pytest.mark.parametrize("scale", [1.0, 0.02, -0.3, 0.0])
def test_scale(name, device, scale):
    check(name, draw(device, 1, 2, 40, 32), scale=scale)


def test_large_scores(name, device):
    q, k, v = draw(device, 1, 2, 70, 64)
    # A tenth of a float32 unit in scores of about 500 is 3e-6 in a weight, and each weight has its own.
    check(name, [(q.detach() * 8).requires_grad_(), (k.detach() * 8).requires_grad_(), v], tolerance=2e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_beyond_float16(name, device, dtype):
    """Each query has its own key, by a score of 131072: float16 ends at 65504. All weights are 0 or 1, exactly."""
    q, k = (n * torch.eye(64, device=device).expand(1, 2, 64, 64) for n in (2.0**15, 2.0**5))
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, torch.randn(1, 2, 64, 64, device=device))]
    out = taken(name, *leaves)(*leaves)
    assert torch.equal(out, leaves[2])
    do = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, leaves, do)
    assert torch.equal(dv, do) and dq.isfinite().all() and dk.isfinite().all()


def test_odd_strides(name, device):
    """Tokens outermost, a head dim that is not innermost, an expanded gradient: right, if not fast."""
    q, k, v = (torch.randn(50, 2, 2, 64, device=device).permute(1, 2, 0, 3).requires_grad_() for _ in range(3))
    check(name, [q, k, v])
    q, k, v = (torch.randn(2, 2, 32, 50, device=device).mT.requires_grad_() for _ in range(3))
    check(name, [q, k, v])
    backend = taken(name, q, k, v)
    (dv,) = torch.autograd.grad(backend(q, k, v).sum(), v)
    copies = [x.detach().double().requires_grad_() for x in (q, k, v)]
    assert error(dv, torch.autograd.grad(reference(*copies).sum(), copies[2])[0]) < TOLERANCE[torch.float32]


def test_extras_of_any_strides(name, device):
    """Numbers apart from each other, with ones between that must not be read, and one number for many."""

    def apart(x, between):
        return torch.stack([x, torch.full_like(x, between)], -1)[..., 0]

    bias = apart(torch.randn(2, 2, 50, 50, device=device), float("nan")).requires_grad_()
    ids = torch.randint(0, 3, (2, 50), device=device)
    mask = apart(torch.rand(2, 2, 50, 50, device=device) < 0.7, True)
    check(name, draw(device, 2, 2, 50, 64), bias=bias, mask=mask, segment_ids=apart(ids, 7))
    bias = torch.randn(50, device=device).expand(2, 2, 50, 50).requires_grad_()
    check(name, draw(device, 2, 2, 50, 64), bias=bias, mask=mask[:, :1].expand(2, 2, 50, 50))


def test_a_result_stays_as_it_was_when_the_next_is_calculated(name, device):
    """Also what its backward pass needs."""
    first, second = (torch.randn(2, 17, 3, 2, 32, device=device, requires_grad=True) for _ in range(2))
    split = lambda qkv: qkv.permute(2, 0, 3, 1, 4).unbind(0)  # noqa: E731
    backend = taken(name, *split(first))
    for call, shape in ((backend.qkvpacked, (2, 17, 64)), (lambda qkv: backend(*split(qkv)), (2, 2, 17, 32))):
        do = torch.randn(shape, device=device)
        alone = call(first)
        (gradient,) = torch.autograd.grad(alone, first, do)
        was = alone.detach().clone(), gradient.clone()
        again, other = call(first), call(second)
        torch.autograd.grad(other, second, do)
        (gradient_again,) = torch.autograd.grad(again, first, do)
        for x in ((alone, gradient), (again, gradient_again)):  # the same bits: the same call
            assert torch.equal(x[0], was[0]) and torch.equal(x[1], was[1])


@pytest.mark.parametrize("way", ["a second derivative", "make_dual", "jvp", "grad"])
def test_other_derivatives_are_right_or_refused(name, device, way):
    """Kernels have none, and PyTorch takes some of them for zero without a word."""
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

    taken(name, x, x, x)
    try:
        found = of(attention.get(name), x)
    except UsageError:
        return
    except RuntimeError as refusal:  # PyTorch's own, as of SDPA's kernels, or of one marked once_differentiable
        assert re.search("derivative|differentia|forward (mode )?AD|functorch|not require grad", str(refusal))
        return
    assert found is not None and error(found, of(reference, x.double())) < 10 * TOLERANCE[torch.float32]  # summed twice


def test_packed_with_extras(name, device):
    qkv = torch.randn(2, 50, 3, 2, 64, device=device, requires_grad=True)
    check_packed(name, qkv, mask=torch.rand(2, 1, 50, 50, device=device) < 0.7, is_causal=True)


def test_dropout_is_right_or_refused(name, device):
    """With an identity for v the result is the weights themselves: each is dropped, or divided by 1 - p."""
    p, B, H, N, M = 0.25, 2, 2, 64, 32  # p is not 1 - p; as many keys as head dims
    q, k, _ = draw(device, B, H, N, M, M=M)
    v = torch.eye(M, device=device).repeat(B, H, 1, 1).requires_grad_()
    backend = taken(name, q, k, v, dropout_p=p)
    out, other = (backend(q, k, v, dropout_p=p) for _ in range(2))
    do = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), do)

    kept = out != 0
    copies = [x.detach().double().requires_grad_() for x in (q, k, v)]
    weights = reference(*copies[:2], copies[2].detach()) * kept / (1 - p)
    exact = weights @ copies[2]
    exact_grads = torch.autograd.grad(exact, copies, do.double())
    for what, x, y in zip(("out", "dq", "dk", "dv"), (out, *grads), (exact, *exact_grads), strict=True):
        assert error(x, y) < TOLERANCE[torch.float32], what
    # Five standard deviations of a mean of so many draws: one run in a million is beyond.
    assert abs((~kept).double().mean() - p) < 5 * (p * (1 - p) / kept.numel()) ** 0.5
    drawn = torch.stack([kept, other != 0]).flatten(0, 2)
    assert len(drawn.unique(dim=0)) == len(drawn)  # each call, image and head has its own


@pytest.mark.parametrize("alone", range(4), ids=["q", "k", "v", "bias"])
def test_one_gradient_alone_is_the_one_among_all(name, device, alone):
    given = draw(device, 2, 2, 50, 64, M=70)
    if alone == 3:
        given.append(torch.randn(2, 1, 50, 70, device=device, requires_grad=True))
    backend = taken(name, *given)
    do = torch.randn_like(given[0])
    among_all = torch.autograd.grad(backend(*given), given, do)[alone]
    given = [x.detach().requires_grad_(i == alone) for i, x in enumerate(given)]
    (found,) = torch.autograd.grad(backend(*given), given[alone], do)
    assert error(found, among_all.double()) < TOLERANCE[torch.float32]


def test_autocast(name, device):
    qkv = torch.randn(2, 50, 3, 2, 64, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        taken(name, *qkv.permute(2, 0, 3, 1, 4).unbind(0))
        out = attention.get(name).qkvpacked(qkv)
        assert out.dtype == torch.bfloat16
    (dqkv,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert dqkv.dtype == torch.float32
    exact = reference(*qkv.permute(2, 0, 3, 1, 4).unbind(0)).transpose(1, 2).flatten(2)
    assert error(out, exact) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("empty", ["batch", "heads", "queries", "keys"])
def test_empty_calls_give_zeros_or_are_refused(name, device, empty):
    B, H, N, M = (0 if empty == one else 2 for one in ("batch", "heads", "queries", "keys"))
    q, k = (torch.ones(B, H, tokens, 32, device=device, requires_grad=True) for tokens in (N, M))
    out = taken(name, q, k, k)(q, k, k)
    assert out.shape == q.shape and not out.any()
    out.sum().backward()
    assert not q.grad.any() and not k.grad.any()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": torch.ones(1, 2, 4, 32).numpy()}, "k must be a torch tensor, got ndarray"),
        ({"q": None}, "q must be a torch tensor, got NoneType"),
        ({"mask": [True]}, "mask must be a torch tensor, got list"),
        ({"is_causal": torch.tensor(True)}, r"is_causal must be True or False, got tensor\(True\)"),
        ({"scale": torch.tensor(1.0, requires_grad=True)}, r"pass scale=1.0, and q \* scale for q"),
        ({x: torch.ones(1, 2, 4, 0) for x in "qkv"}, "head dim of at least 1"),
        ({x: torch.ones(1, 2, 4, 32, dtype=torch.float8_e4m3fn) for x in "qkv"}, "floating dtype of 16 bits or more"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_what_cannot_be_taken_is_named(name, device, change, message):
    def moved(x):
        return x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    call = {x: torch.ones(1, 2, 4, 32, device=device) for x in "qkv"}
    call |= {x: moved(value) for x, value in change.items()}
    with pytest.raises(UsageError, match=message):
        attention.get(name)(call.pop("q"), call.pop("k"), call.pop("v"), **call)


def test_packed_must_be_one_tensor(name, device):
    with pytest.raises(UsageError, match="qkv must be a torch tensor, got list"):
        attention.get(name).qkvpacked([1.0])
    scale = torch.tensor(1.0, device=device, requires_grad=True)
    qkv = torch.ones(1, 4, 3, 2, 32, device=device)
    with pytest.raises(UsageError, match=r"pass scale=1.0, and q \* scale for q"):
        attention.get(name).qkvpacked(qkv, scale=scale)
    with torch.no_grad():
        taken(name, *qkv.permute(2, 0, 3, 1, 4).unbind(0)).qkvpacked(qkv, scale=scale)


def test_a_problem_says_the_same_as_the_call(name, device):
    leaves = draw(device, 1, 2, 20, 32)
    problem = Problem.of(*leaves)
    assert attention.get(name).unsupported(problem) == attention.get(name).unsupported(*leaves)
