"""Operators run as plain functions unless a tracer is active; they support first derivatives only.

Second derivatives through kernels raise, because autograd would silently use zero.
"""

import pytest
import torch
from expecting import error
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from vitkernels import attention
from vitkernels.bridge.operator import operator
from vitkernels.ops import cross_entropy, generalized_box_iou, layer_norm_residual, linear_gelu, mlp
from vitkernels.quant import train_in_8_bits

pytest.importorskip("triton", reason="no Triton on this platform")

# Boxes past the end of a block divide by zero. Triton's interpreter computes with NumPy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning")

flash = attention.get("triton_flash")
WEIGHT, BIAS = torch.ones(16, 16), torch.zeros(16)
# Functions of x, (2, 16), that run a kernel.
CALLS = {
    "layer_norm_residual": lambda x: layer_norm_residual(x, x, WEIGHT[0], BIAS, backend="triton")[1],
    "layer_norm": lambda x: layer_norm_residual(x, None, WEIGHT[0], BIAS, backend="triton")[1],
    "linear_gelu": lambda x: linear_gelu(x, WEIGHT, BIAS, backend="passes"),
    "mlp": lambda x: mlp(x, WEIGHT, BIAS, WEIGHT, BIAS, backend="passes"),
    "cross_entropy": lambda x: cross_entropy(x, torch.tensor([3, 5]), backend="triton"),
    "generalized_box_iou": lambda x: generalized_box_iou(x.view(8, 4), x.view(8, 4) + 1, backend="triton"),
    "triton_flash": lambda x: flash(*[x.view(1, 1, 1, 32)] * 3),
    "triton_flash_packed": lambda x: flash.qkvpacked(x.view(1, 1, 1, 1, 32).expand(1, 1, 3, 1, 32)),
    "triton_flash_rotary": lambda x: flash.qkvpacked(
        x.view(1, 1, 1, 1, 32).expand(1, 1, 3, 1, 32), rope=torch.ones(1, 64)
    ),
    "eight_bit_linear": train_in_8_bits(nn.Sequential(nn.Linear(16, 16)), "int8"),
    "eight_bit_mlp": train_in_8_bits(
        nn.Sequential(nn.ModuleDict({"fc1": nn.Linear(16, 16), "act": nn.GELU(), "fc2": nn.Linear(16, 16)})), "int8"
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_create_graph__raises_for_every_kernel(name):
    x = torch.rand(2, 16).requires_grad_()
    (dx,) = torch.autograd.grad(CALLS[name](x).sum(), x)
    assert dx.shape == x.shape
    with error("bridge.second_derivative"):
        torch.autograd.grad(CALLS[name](x).sum(), x, create_graph=True)


def dual(f, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


# Ways to differentiate f at x, other than the backward pass.
DERIVATIVES = {
    "make_dual": dual,
    "make_dual of what requires a gradient": lambda f, x: dual(f, x.clone().requires_grad_()),
    "make_dual, then vmap": lambda f, x: dual(lambda x: torch.func.vmap(f)(x[None]), x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jvp of vmap": lambda f, x: torch.func.jvp(torch.func.vmap(f), (x[None],), (x[None],)),
    "compiled jvp": lambda f, x: torch.compile(lambda x: torch.func.jvp(f, (x,), (x,)), backend="eager")(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "grad of vmap": lambda f, x: torch.func.grad(lambda x: torch.func.vmap(f)(x[None]).sum())(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x[None]),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
}


@pytest.mark.parametrize("way", ["make_dual", "jvp", "grad"])
@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("eight_bit")])
def test_other_derivatives__raise_for_every_kernel(name, way):
    """PyTorch would treat tangents as zero."""
    with error("bridge.derivative"):
        DERIVATIVES[way](CALLS[name], torch.rand(2, 16))


@pytest.mark.parametrize("way", DERIVATIVES)
def test_other_derivatives__raise_for_every_transform(way):
    with error("bridge.derivative", operation="vitkernels::shifted_square"):
        DERIVATIVES[way](lambda x: shifted_square(x, None, 0.5)[0], torch.rand(3))


def test_other_derivatives__message():
    with error("bridge.derivative") as caught:
        dual(lambda x: shifted_square(x, None, 0.5)[0], torch.rand(3))
    assert "backend='reference' for an op, 'native' for attention" in str(caught.value)


def test_other_derivatives__allowed_for_untracked_arguments():
    x, constant = torch.rand(3), torch.rand(3)
    squared = lambda x, constant: x * shifted_square(constant, None, 0.5)[0]  # noqa: E731
    wanted = (constant + 0.5).square()
    assert torch.equal(torch.func.jvp(lambda x: squared(x, constant), (x,), (torch.ones(3),))[1], wanted)
    assert torch.equal(torch.func.grad(lambda x, constant: squared(x, constant).sum())(x, constant), wanted)
    assert torch.equal(dual(lambda x: squared(x, constant), x), wanted)


class Seen(TorchDispatchMode):
    """Record the operators dispatched under this mode."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


class Shadow(torch.Tensor):
    """A tensor subclass without behavior."""


@operator("shifted_square(Tensor x, Tensor? shift, float by) -> (Tensor, Tensor)")
def shifted_square(x, shift, by):
    CALLS_OF_FUNCTION.append(type(x))
    shifted = x + by if shift is None else x + shift + by
    return shifted.square(), shifted


@shifted_square.register_fake
def _(x, shift, by):
    return torch.empty_like(x), torch.empty_like(x)


def _save(ctx, inputs, output):
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, dsquare, _):
    (shifted,) = ctx.saved_tensors
    dx = 2 * shifted * dsquare
    return dx, dx if ctx.needs_input_grad[1] else None, None


shifted_square.register_autograd(_differentiate, setup_context=_save)
CALLS_OF_FUNCTION = []
OPERATOR = "vitkernels.shifted_square.default"


@pytest.mark.parametrize("how", ["eager", "dispatched"])
@pytest.mark.parametrize("with_shift", [True, False])
def test_gradients__equal_eager_and_dispatched(how, with_shift):
    call = shifted_square if how == "eager" else shifted_square.traced
    x, shift = torch.randn(2, 5, dtype=torch.float64).requires_grad_()
    out, shifted = call(x, shift if with_shift else None, 0.5)
    assert out.requires_grad and not shifted.requires_grad
    wanted = (x + shift if with_shift else x) + 0.5
    assert torch.equal(out, wanted.square()) and torch.equal(shifted, wanted)
    leaves = (x, shift) if with_shift else (x,)
    got, expected = (torch.autograd.grad(y.sum(), leaves, retain_graph=True) for y in (out, wanted.square()))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert not call(x.detach(), None, 0.5)[0].requires_grad
    with torch.no_grad():
        assert not call(x, None, 0.5)[0].requires_grad


def test_eager_call__bypasses_the_dispatcher(monkeypatch):
    monkeypatch.setattr(shifted_square, "traced", None)
    x = torch.randn(3, requires_grad=True)
    shifted_square(x, None, 0.5)[0].sum().backward()
    assert x.grad is not None


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
def test_tracers__see_the_operator():
    x = torch.randn(3, requires_grad=True)
    with Seen() as seen:
        shifted_square(x, None, 0.5)
    assert OPERATOR in seen.names
    for early in (False, True):
        graph = make_fx(lambda x: shifted_square(x, None, 0.5)[0], pre_dispatch=early)(x.detach())
        assert any(str(node.target) == OPERATOR for node in graph.graph.nodes), early
    trace = torch.jit.trace(lambda x: shifted_square(x, None, 0.5)[0], x.detach())
    assert "vitkernels::shifted_square" in str(trace.graph)


def test_fake_and_meta_tensors__do_not_run_the_function():
    CALLS_OF_FUNCTION.clear()
    with FakeTensorMode():
        assert shifted_square(torch.empty(7), None, 0.5)[0].shape == (7,)
    assert shifted_square(torch.empty(7, device="meta"), None, 0.5)[0].is_meta
    assert not CALLS_OF_FUNCTION


def test_subclasses_and_vmap__go_through_the_dispatcher(monkeypatch):
    calls, traced = [], shifted_square.traced
    monkeypatch.setattr(shifted_square, "traced", lambda *args: calls.append(args) or traced(*args))
    x = torch.randn(4, dtype=torch.float64)
    assert type(shifted_square(x.as_subclass(Shadow), None, 0.5)[0]) is Shadow
    assert torch.equal(torch.func.vmap(lambda x: shifted_square(x, None, 0.5)[0])(x[None]), (x[None] + 0.5).square())
    assert len(calls) == 2


def test_negated_views_and_dual_levels__go_through_the_dispatcher(monkeypatch):
    """A kernel sees neither a view's negative bit nor its tangent."""
    calls = []
    monkeypatch.setattr(shifted_square, "traced", lambda *args: calls.append(args))
    negated = torch.randn(3, dtype=torch.complex64).conj().imag
    shifted_square(negated, None, 0.5)
    with forward_ad.dual_level():
        shifted_square(torch.ones(3), None, 0.5)
    assert negated.is_neg() and len(calls) == 2


def test_operator_without_a_gradient_formula__warns_in_backward():
    """Gradients of the function's own PyTorch calls may be wrong, because kernels are not differentiated."""
    doubled = operator("doubled_without_gradient(Tensor x) -> Tensor")(lambda x: x.detach() + x)
    x = torch.ones(2, requires_grad=True)
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        doubled(x).sum().backward()
