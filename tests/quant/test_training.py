"""train_in_8_bits: selection of layers, and gradients against those of float training."""

import copy

import pytest
import torch
from expecting import error
from torch import nn

from vitkernels.models import create_model
from vitkernels.quant import quantize_, train_in_8_bits
from vitkernels.quant.training_modules import EightBitLinear

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Shared(nn.Module):
    """One layer under two names, and a head of 10 out features."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.again, self.head = self.first, nn.Linear(32, 10)


def except_head(name, _):
    return name != "head"


def small_vit():
    torch.manual_seed(0)
    return create_model("vit_digits", "sdpa", num_classes=10, depth=2)


def test_train_in_8_bits__rejects_before_it_swaps():
    model = Shared()
    with error("unknown_name", name="int4"):
        train_in_8_bits(model, "int4")
    with error("quant.features", layers=["head"]):
        train_in_8_bits(model, "int8")
    with error("quant.no_layers", model="Shared"):
        train_in_8_bits(model, "int8", lambda *_: False)
    with error("quant.bare_layer", model="Linear"):
        train_in_8_bits(nn.Linear(16, 16), "int8")
    assert type(model.first) is nn.Linear


def test_eight_bit_model__cannot_be_swapped_again():
    """Inside an EightBitMlp integers would be read as weights; elsewhere layers would be skipped."""
    model = train_in_8_bits(small_vit(), "int8", except_head)
    for again in (lambda: quantize_(model, "w8a16"), lambda: train_in_8_bits(model, "fp8")):
        with error("quant.eight_bit_model", layer="blocks.0.attn.qkv"):
            again()
    fresh = small_vit()
    fresh.load_state_dict(model.state_dict())
    quantize_(fresh, "w8a16")


def test_train_in_8_bits__shared_layer_is_swapped_under_both_names():
    model = train_in_8_bits(Shared(), "int8", except_head)
    assert type(model.first) is type(model.again) is EightBitLinear
    assert model.first.weight is model.again.weight


def gradients(model, x):
    out = model(x)
    # A loss with a dense gradient of varied magnitude.
    (out * torch.linspace(-1, 1, 10, device=out.device)).sum().backward()
    return out.detach(), {name: p.grad.flatten() for name, p in model.named_parameters()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "loss"), [("int8", 0.06), ("fp8", 0.25)])
def test_gradients__point_in_the_direction_of_float_gradients(dtype, loss, device):
    """Rounding gives each product a relative error of about 1/60 (int8) or 1/14 (fp8); `loss` bounds eight of them."""
    x = torch.randn(4, 1, 16, 16, device=device)
    plain = small_vit().to(device)
    model = train_in_8_bits(copy.deepcopy(plain), dtype, except_head)
    assert list(model.state_dict()) == list(plain.state_dict())
    expected_out, expected = gradients(plain, x)
    out, found = gradients(model, x)
    assert 0 < (out - expected_out).norm() / expected_out.norm() < loss
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        assert torch.cosine_similarity(gradient, expected[name], dim=0) > 1 - loss, name


def test_train_in_8_bits__compiles_without_graph_breaks():
    x, model = torch.randn(2, 1, 16, 16), train_in_8_bits(small_vit(), "int8", except_head)
    out, expected = gradients(model, x)
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    (compiled * torch.linspace(-1, 1, 10)).sum().backward()
    torch.testing.assert_close(compiled, out)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.flatten(), expected[name])
