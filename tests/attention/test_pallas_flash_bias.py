"""The bias of `pallas_flash` on Hopper outside the attention kernels: its stored order and units, and its gradient."""

import math

import pytest
import torch

pytest.importorskip("triton")
from hopper import error, needs_new_jax
from torch.utils.checkpoint import checkpoint

pytestmark = needs_new_jax
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LOWEST = torch.finfo(torch.float32).min


def in_order(stored):
    """Return a stored array as rows by columns; a group is (warp, row of 8, pair of columns, half of rows, column)."""
    images, heads, tiles, groups, _ = stored.shape
    x = stored.view(images, heads, tiles, groups, 4, 8, 4, 2, 2)
    return x.permute(0, 1, 2, 4, 7, 5, 3, 6, 8).reshape(images, heads, tiles * 64, groups * 8)


def rows_of(*biases, scale=0.125):
    """Return the stored rows of a bias with the given rows, each of 70 keys."""
    from vitkernels.attention.pallas_flash.hopper.bias import padded_bias

    return in_order(padded_bias(torch.stack(biases), None, len(biases), 70, scale))[0, 0, : len(biases), :70]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("N, M, masked", [(70, 130, False), (70, 130, True), (768, 768, False)])
def test_padded_bias(device, N, M, masked):
    """Strides vary: a table of relative positions is often a permuted view. 768 tokens need no padding."""
    from vitkernels.attention.pallas_flash.hopper.bias import padded_bias

    mask = torch.rand(2, 1, N, M, device=device) < 0.5 if masked else None
    table, wide = torch.randn(N, M, 3, device=device), torch.randn(2, 1, M, N, device=device, dtype=torch.float16)
    for bias in (table.permute(2, 0, 1), wide.mT, wide[:1, :, :, :1].mT):
        total = bias.float().expand(*torch.broadcast_shapes(bias.shape, (1, 1, N, M)))
        total = total if mask is None else total.masked_fill(~mask, -torch.inf)
        expected = (total - total.amax(-1, keepdim=True)) / 0.1
        found = in_order(padded_bias(bias, mask, N, M, 0.1))
        # A float32 difference of numbers up to 5 and a quotient are each rounded by 2⁻²⁴.
        torch.testing.assert_close(found[:, :, :N, :M], expected, rtol=1e-6, atol=1e-5)
        assert (found[:, :, N:] == -torch.inf).all() and (found[..., M:] == -torch.inf).all()


def test_padded_bias__that_absorbs_scores():
    """Keys that SDPA averages get one power of two, far from every score; the others are lower; -inf stays."""
    low, mixed, usual = torch.full((70,), LOWEST), torch.full((70,), LOWEST), torch.zeros(70)
    mixed[1::2], mixed[4], usual[1::2], usual[3] = -torch.inf, 2 * LOWEST / 3, LOWEST, -torch.inf
    absent, some, huge = torch.full((70,), -torch.inf), torch.full((70,), -1e9), torch.full((70,), -LOWEST / 2)
    some[::2] = -1e9 - 64  # the next float32 number
    found = rows_of(low, mixed, usual, absent, some, huge, torch.full((70,), -5e8))
    assert len(found[0].unique()) == 1 and math.frexp(found[0, 0].item())[0] == -0.5
    assert -1e30 < found[0, 0] * 0.125 < -1e27
    averaged, lost = found[0, 0], 4 * found[0, 0]
    assert found[1, 4] == averaged and (found[1, 1::2] == -torch.inf).all() and (found[1, 6::2] == lost).all()
    assert (found[2, ::2] == 0).all() and found[2, 3] == -torch.inf and (found[2, 5::2] == lost).all()
    assert (found[3] == -torch.inf).all()
    assert (found[4, 1::2] == averaged).all() and (found[4, ::2] == lost).all()
    assert (found[5] == averaged).all() and (found[6] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_padded_bias__in_bfloat16(device):
    """A bias in bfloat16 keeps its values if the scale is a power of two. Rows of 1024 and more are shifted."""
    from vitkernels.attention.pallas_flash.hopper.bias import padded_bias

    bias = (3 * torch.randn(6, 70, device=device)).bfloat16()
    bias[1] += 2000  # numbers that are 8 apart
    bias[2] -= 2000
    bias[0, 7] = 1000
    bias[3, ::2], bias[4, 5] = torch.finfo(torch.bfloat16).min, -torch.inf
    bias[5] = torch.finfo(torch.bfloat16).min
    stored = padded_bias(bias, None, 6, 70, 0.125)
    found = in_order(stored)[0, 0, :6, :70]
    assert stored.dtype == torch.bfloat16
    shift = torch.zeros(6, 1, dtype=torch.bfloat16, device=device)
    shift[1:3] = bias[1:3].amax(1, keepdim=True)
    is_usual = bias > -1e9
    expected = (bias.float() - shift.float()) * 8
    assert torch.equal(found.float()[:5][is_usual[:5]], expected[:5][is_usual[:5]])
    assert found[4, 5] == -torch.inf and (found[3, ::2] < -1e27).all() and found.isfinite().sum() == 6 * 70 - 1
    assert len(found[5].unique()) == 1 and math.frexp(found[5, 0].item())[0] == -0.5
    wide = padded_bias(bias, None, 6, 70, 0.1)
    torch.testing.assert_close(
        in_order(wide)[0, 0, :3, :70], in_order(padded_bias(bias.float(), None, 6, 70, 0.1))[0, 0, :3, :70]
    )
    assert wide.dtype == torch.float32 == padded_bias(bias.half(), None, 6, 70, 0.125).dtype
    # The maximum of a row may be hidden. Differences to it would be rounded.
    assert padded_bias(bias, None, 6, 70, 0.125, hides_keys=True).dtype == torch.float32


@pytest.mark.parametrize("scale", [0.125, 0.1])
def test_padded_bias__of_a_mask_alone(scale):
    """0 and -inf are exact in bfloat16 at every scale."""
    from vitkernels.attention.pallas_flash.hopper.bias import padded_bias

    mask = torch.rand(2, 3, 40, 70) < 0.5
    stored = padded_bias(None, mask, 40, 70, scale)
    found = in_order(stored)[:, :, :40, :70]
    assert stored.dtype == torch.bfloat16
    assert torch.equal(found == 0, mask) and torch.equal(found == -torch.inf, ~mask)


def test_padded_bias__has_a_gradient_in_its_shape():
    from vitkernels.attention.pallas_flash.hopper.bias import padded_bias

    bias = torch.randn(3, 1, 70, dtype=torch.float16, requires_grad=True)
    stored = padded_bias(bias, None, 40, 70, 0.25)
    gradient = torch.randn(stored.shape)
    (found,) = torch.autograd.grad(stored, bias, gradient)
    expected = in_order(gradient)[0, :, :40, :70].sum(1, keepdim=True) / 0.25
    assert found.dtype == torch.float16
    # 40 values of up to 16 are rounded to float16, and their sum to it.
    torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=0.05)


def test_padded_bias__passes_opcheck():
    from vitkernels.attention.pallas_flash.hopper import bias as module

    checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    bias = torch.randn(1, 2, 9, 17, requires_grad=True)
    torch.library.opcheck(module._stored.traced, (bias, 0.125, True), test_utils=checks)
    stored = module._stored(bias.detach(), 0.1, False)
    torch.library.opcheck(module._in_rows.traced, (stored, 9, 17, 0.1, torch.bfloat16), test_utils=checks[:2])


@pytest.mark.parametrize("device", DEVICES)
def test_transposed__and_in_rows(device):
    from vitkernels.attention.pallas_flash.hopper.bias_groups import in_rows, transposed

    stored = torch.randn(2, 3, 4, 24, 512, device=device)
    assert torch.equal(in_order(transposed(stored)), in_order(stored).mT)
    assert torch.equal(in_rows(stored, 200, 130, 0.5), in_order(stored)[:, :, :200, :130] / 2)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(in_rows(stored, 200, 130, 0.5, dtype), (in_order(stored)[:, :, :200, :130] / 2).to(dtype))
    wide = torch.randn(1, 2, 4, 40, 512, device=device)
    for R, C in ((130, 300), (9, 5)):  # several blocks of columns, or less than a group
        assert torch.equal(in_rows(wide, R, C, 0.5), in_order(wide)[:, :, :R, :C] / 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shape, M, dtype",
    [
        ((1, 3), 130, torch.bfloat16),
        ((1, 3), 130, torch.float16),
        ((11, 1), 130, torch.bfloat16),
        ((1, 1), 130, torch.bfloat16),
        ((11, 3), 130, torch.bfloat16),
        ((11, 1), 600, torch.float16),
    ],
)
def test_summed(device, shape, M, dtype):
    """Rows are wider than the queries, and the rest is dropped. With 600 keys, a program loads one pair at a time."""
    from vitkernels.attention.pallas_flash.hopper.bias_groups import summed

    ds = torch.randn(11, 3, M, 72, device=device).to(dtype)
    expected = ds.double().mT[:, :, :70]
    for axis in (0, 1):
        expected = expected.sum(axis, keepdim=True) if shape[axis] == 1 else expected
    groups = summed(ds, shape, 70, 0.5, torch.float32)
    assert torch.equal(summed(ds, shape, 70, 0.5, torch.bfloat16), groups.bfloat16())
    found = in_order(groups)
    # At most 33 float32 additions of values up to 30.
    torch.testing.assert_close(found[:, :, :70, :M].double(), expected / 2, rtol=0, atol=1e-4)
    assert not found[:, :, 70:].any() and not found[..., M:].any()


@pytest.mark.parametrize("scale", [0.0, -0.2, 0.3, 1e-20, -1e20, 2.0**-24])
def test_folded_scale(scale):
    from vitkernels.attention.contract import folded_scale

    factor, rest = folded_scale(scale)
    assert factor * rest == scale and 2.0**-24 <= rest <= 2.0**24
    assert factor == 0 or math.frexp(abs(factor))[0] == 0.5  # exact for any q
    assert (factor == 1) == (scale in (0.3, 2.0**-24))


class Interpreted:
    """Run a kernel in the interpreter of Mosaic GPU on CPU tensors; called as bridge.mosaic_gpu.Kernel is."""

    def __init__(self, function, shapes):
        self.function, self.inputs = function, len(shapes)

    def start(self, device):
        """Compile nothing."""

    def __call__(self, *tensors):
        import jax.numpy as jnp

        inputs = tensors[: self.inputs]
        results = self.function(*(jnp.asarray(x.float().numpy(), str(x.dtype).removeprefix("torch.")) for x in inputs))
        results = results if isinstance(results, tuple | list) else [results]
        for tensor, result in zip(tensors[self.inputs :], results, strict=True):
            tensor.copy_(torch.tensor(result.astype("float32").tolist()))


@pytest.fixture
def interpreted(monkeypatch):
    """Return operators whose kernels are interpreted."""
    from vitkernels.attention.pallas_flash.hopper import kernels, operators

    build = kernels.AttentionKernels._build
    with_interpreter = lambda self, *args, **options: build(self, *args, interpret=True, **options)  # noqa: E731
    monkeypatch.setattr(kernels.AttentionKernels, "_build", with_interpreter)
    monkeypatch.setattr(kernels, "Kernel", Interpreted)
    kernels.kernels_for.cache_clear()
    yield operators
    kernels.kernels_for.cache_clear()


class StartedKernel:
    def __init__(self, function, shapes):
        self.is_started = False

    def start(self, device):
        self.is_started = True


@pytest.mark.parametrize(
    "N, most_ds, started",
    [
        (70, None, {"short_forward", "short_backward_with_ds"}),
        (70, 0, {"short_forward", "dq", "dkdv", "bias_gradient"}),
        (300, None, {"forward", "dq", "dkdv", "bias_gradient"}),
    ],
)
def test_start__compiles_what_the_backward_pass_runs(monkeypatch, N, most_ds, started):
    from vitkernels.attention.pallas_flash.hopper import kernels

    if most_ds is not None:
        monkeypatch.setattr(kernels, "MOST_DS", most_ds)
    monkeypatch.setattr(kernels, "Kernel", StartedKernel)
    device = torch.device("cuda", 0)
    call = kernels.AttentionKernels(2, 3, N, N, 64, torch.bfloat16, False, 0.1, False, device, None, (1, 3))
    call.start(gradient=True, bias_gradient=True)
    assert {name for name, kernel in vars(call).items() if getattr(kernel, "is_started", False)} == started


@pytest.mark.parametrize(
    "N, shape, most_ds", [(140, (1, 2, 140, 140), None), (70, (2, 1, 1, 70), None), (66, (66, 66), 0)]
)
def test_attend__interpreted(interpreted, monkeypatch, N, shape, most_ds):
    """The gradient of a bias by dS, and, if dS would take too much memory, by products of its own."""
    from vitkernels.attention.pallas_flash.hopper import kernels
    from vitkernels.attention.pallas_flash.hopper.bias import padded_bias
    from vitkernels.testing.attention_reference import TOLERANCE, reference

    if most_ds is not None:
        monkeypatch.setattr(kernels, "MOST_DS", most_ds)
    q, k, v, do = (torch.randn(2, N, 2, 64).bfloat16().transpose(1, 2) for _ in range(4))
    bias = torch.randn(shape)
    if shape[-2] > 1:
        bias[..., 3, :], bias[..., 4, :], bias[..., 5, :] = LOWEST, -torch.inf, -LOWEST / 2
    leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
    prepared = padded_bias(leaves[3], None, N, N, 0.125)
    out = interpreted.attend(*leaves[:3], prepared, *[None] * 5, False, 0.125)[0]
    found = out, *torch.autograd.grad(out, leaves, do)
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact = reference(*exact_leaves[:3], bias=exact_leaves[3], scale=0.125)
    for x, y in zip(found, (exact, *torch.autograd.grad(exact, exact_leaves, do.double())), strict=True):
        assert error(x, y) < TOLERANCE[torch.bfloat16]


def test_activation_checkpointing__interpreted(interpreted):
    """torch.utils.checkpoint lets a backward pass read only once what the forward pass saved."""
    q, k, v, do = (torch.randn(1, 20, 1, 64).bfloat16().transpose(1, 2) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    call = lambda *qkv: interpreted.attend(*qkv, *[None] * 6, False, 0.125)[0]  # noqa: E731
    again = checkpoint(call, *leaves, use_reentrant=False)
    for x, y in zip(
        torch.autograd.grad(again, leaves, do), torch.autograd.grad(call(*leaves), leaves, do), strict=True
    ):
        assert torch.equal(x, y)
