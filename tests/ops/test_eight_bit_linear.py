"""Conformance suite of eight_bit_linear, and of norm_linear and norm_mlp in 8 bits, against float64."""

import pytest
import torch
from expecting import error
from test_norm_products import draw, exact, results
from torch.nn import functional as F

pytest.importorskip("jax")

from vitkernels.models import create_model, set_ops
from vitkernels.ops import eight_bit_linear, norm_linear, norm_mlp, tpu_rows
from vitkernels.ops.eight_bit_linear import BACKENDS
from vitkernels.quant import train_in_8_bits

# A value uniform over 127 levels is rounded with a relative error of 1/127/√12/rms, about 0.7 % for a normal row's
# rms of a third of its largest value. Both factors add theirs; an MLP chains two products and GELU.
LINEAR, CHAINED = 0.02, 0.03
SHAPES = [(3, 5, 32, 64), (2, 19, 96, 48)]  # images, tokens, inputs, outputs


def relative_error(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def outputs_and_gradients(call, tensors, dy):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


@pytest.mark.parametrize("backend", BACKENDS.names())
@pytest.mark.parametrize(("shape", "autocast"), [(SHAPES[0], False), (SHAPES[1], True)], ids=str)
def test_eight_bit_linear__matches_float64(backend, shape, autocast):
    torch.manual_seed(sum(shape))
    B, N, K, features = shape
    tensors = torch.randn(B, N, K), torch.randn(features, K), torch.randn(features)
    dy = torch.randn(B, N, features)

    def call(*leaves):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return eight_bit_linear(*leaves, backend=backend)

    found = outputs_and_gradients(call, tensors, dy)
    assert found[0].dtype == (torch.bfloat16 if autocast else torch.float32)
    wanted = outputs_and_gradients(F.linear, [t.double() for t in tensors], dy)
    for name, ours, theirs in zip(("y", "x", "weight", "bias"), found, wanted, strict=True):
        assert relative_error(ours, theirs) < LINEAR, name
    assert relative_error(found[0], wanted[0]) > 1e-3  # in 8 bits


@pytest.mark.parametrize("backend", BACKENDS.names())
def test_eight_bit_linear__rounds_each_row_with_its_own_scale(backend):
    torch.manual_seed(0)
    size = torch.tensor([1e-6, 1.0, 1e6, 0.0])[:, None]
    x, weight = torch.randn(4, 32) * size, torch.randn(16, 32)
    found, wanted = eight_bit_linear(x, weight, backend=backend), x.double() @ weight.double().T
    for row in range(3):
        assert relative_error(found[row], wanted[row]) < LINEAR, row
    assert not found[3].any()


def test_eight_bit_linear__weight_gradient_sums_over_several_blocks(monkeypatch):
    from vitkernels.ops.eight_bit_linear import pallas_tpu_kernel

    monkeypatch.setattr(pallas_tpu_kernel, "_ROWS", 32)
    assert tpu_rows.RowBlocks.of(2, 71, 1000, most=32).grid == (2, 3)
    torch.manual_seed(0)
    tensors, dy = (torch.randn(2, 71, 16), torch.randn(48, 16)), torch.randn(2, 71, 48)
    found = outputs_and_gradients(lambda x, w: eight_bit_linear(x, w, backend="pallas_tpu"), tensors, dy)
    wanted = outputs_and_gradients(F.linear, [t.double() for t in tensors], dy)
    assert relative_error(found[2], wanted[2]) < LINEAR


@pytest.mark.parametrize("backend", BACKENDS.names())
@pytest.mark.parametrize("op", [norm_linear, norm_mlp], ids=["linear", "mlp"])
def test_norm_products_in_8_bits__match_float64(backend, op):
    torch.manual_seed(0)
    given = draw(op, (2, 19, 96), hidden=64, out=torch.bfloat16) | {"sample_scale_B": torch.tensor([0.0, 4 / 3])}
    for name, rows in (("weight_FC", 64), ("bias_F", 64), ("weight2_OF", 96)):
        given |= {name: given[name][:rows]} if name in given else {}

    def call(**leaves):
        with torch.autocast("cpu", torch.bfloat16):
            return op(**leaves, eight_bit=torch.int8, backend=backend)

    dtotal, dy = torch.randn(2, 19, 96), torch.randn(2, 19, 64 if op is norm_linear else 96).bfloat16()
    found = results(call, given, dtotal, dy)
    wanted = results(lambda **leaves: exact(op, **leaves), {k: v.double() for k, v in given.items()}, dtotal, dy)
    for name, tensor in wanted.items():
        assert relative_error(found[name], tensor) < (LINEAR if op is norm_linear else CHAINED), name


@pytest.mark.slow
def test_fused_block_in_8_bits__matches_its_modules():
    """Kernels that join a LayerNorm and an 8-bit product compute what the modules compute one after the other."""

    def gradients(backend):
        torch.manual_seed(0)
        model = create_model("vit_digits", "sdpa", num_classes=10, depth=1)
        train_in_8_bits(model, "int8", lambda name, _: name != "head")
        set_ops(model, {"layer_norm_residual": backend})
        torch.manual_seed(1)
        out = model(torch.randn(2, 1, 16, 16))
        (out * torch.linspace(-1, 1, 10)).sum().backward()
        return {"out": out.detach()} | {name: p.grad for name, p in model.named_parameters()}

    found, wanted = gradients("pallas_tpu"), gradients("reference")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if not name.endswith("qkv.bias"):  # the keys' gradient is a rounding error
            # Both round every factor, the weights' gradients with scales of their own.
            assert relative_error(found[name], tensor) < 2 * CHAINED, name


def test_eight_bit_products__refuse_unsupported_arguments():
    x, weight = torch.randn(2, 3, 32), torch.randn(16, 32)
    with error("ops.eight_bit_linear.dtype", dtype=torch.int16):
        eight_bit_linear(x, weight, dtype=torch.int16)
    with error("ops.eight_bit_linear.features", shape=(15, 32)):
        eight_bit_linear(x, weight[:15])
    with error("ops.linear.shape", argument="weight"):
        eight_bit_linear(x, weight[:, :16])
    with error("registry.unsupported", backend="pallas_tpu"):
        eight_bit_linear(x, weight, dtype=torch.float8_e4m3fn, backend="pallas_tpu")
    given = draw(norm_mlp, (2, 9, 16), hidden=32) | {"weight2_OF": torch.zeros(16, 32)}
    with error("ops.norm_mlp.eight_bit", approximate="tanh"):
        norm_mlp(**given, approximate="tanh", eight_bit=torch.int8)


@pytest.mark.parametrize("backend", BACKENDS.names())
def test_eight_bit_linear__empty_tensors(backend):
    weight = torch.randn(16, 32, requires_grad=True)
    eight_bit_linear(torch.randn(0, 3, 32), weight, backend=backend).sum().backward()
    assert weight.grad.shape == weight.shape and not weight.grad.any()
