"""Quantized layers: stored values, results, and swapping in and out of a model."""

import pytest
import torch
from expecting import error
from torch import nn

from vitkernels.errors import UsageError
from vitkernels.quant import (
    QuantizedEmbedding,
    QuantizedLinear,
    Scheme,
    dequantize_,
    quantize_,
    size_in_bytes,
)

NAMES = ["w8a16", "w4a16_block32", "w8a8_asym", "w4a8_block16_asym", "w8a8_fp8"]


@pytest.mark.parametrize("name", NAMES)
def test_quantized_linear__matches_its_dequantized_form(name):
    torch.manual_seed(0)
    linear = nn.Linear(64, 24)
    quantized = QuantizedLinear.of(linear, name)
    x = torch.randn(3, 5, 64)
    # Half a step of 1/127 or 1/7 of the range, in fp8 of 32/448; the same for tokens.
    weight_step = linear.weight.abs().max() * step_of(quantized.scheme)
    assert (quantized.dequantize().weight - linear.weight).abs().max() <= 0.51 * weight_step
    deviation = (quantized(x) - quantized.dequantize()(x)).norm() / linear(x).norm()
    # A token's 255 levels: rounding of at most 1/254, about 0.6 of that in the norm; fp8's three mantissa bits: 1/16.
    assert deviation < (0.05 if quantized.scheme.fp8 else 0.015 if quantized.scheme.activation_bits == 8 else 1e-6)


def step_of(scheme):
    """Return the widest step between two stored numbers, relative to the largest."""
    return 32 / 448 if scheme.fp8 else 1 / 127 if scheme.weight_bits == 8 else 1 / 7


def test_quantized_linear__four_bits_take_half_the_memory_of_eight():
    sizes = {}
    for bits in (8, 4):
        layer = QuantizedLinear.of(nn.Linear(64, 32, bias=False), Scheme(bits))
        sizes[bits] = layer.weight.untyped_storage().nbytes()
    assert sizes == {8: 64 * 32, 4: 64 * 32 // 2}


@pytest.mark.parametrize("name", NAMES)
def test_quantized_embedding__matches_its_dequantized_form(name):
    torch.manual_seed(0)
    table = nn.Embedding(10, 64)
    quantized = QuantizedEmbedding.of(table, name)
    ids = torch.tensor([[0, 9], [3, 3]])
    assert torch.equal(quantized(ids), quantized.dequantize()(ids)) and quantized(ids).shape == (2, 2, 64)
    step = table.weight.abs().max() * step_of(quantized.scheme)
    assert (quantized(ids) - table(ids)).abs().max() <= 0.51 * step
    assert quantized.weight.untyped_storage().nbytes() == 10 * 64 * quantized.scheme.weight_bits // 8


def test_quantized_embedding__dequantize_restores_gradient_options():
    table = nn.Embedding(10, 64, padding_idx=3, scale_grad_by_freq=True)
    again = QuantizedEmbedding.of(table, NAMES[0]).dequantize()
    assert again.padding_idx == 3 and again.scale_grad_by_freq and not again.sparse


class Tied(nn.Module):
    """An embedding, two uses of one layer, and a head of 10."""

    def __init__(self):
        super().__init__()
        self.embed, self.first = nn.Embedding(7, 32), nn.Linear(32, 32)
        self.again, self.head = self.first, nn.Linear(32, 10)

    def forward(self, ids):
        return self.head(self.again(self.first(self.embed(ids))))


@pytest.mark.parametrize("name", NAMES[:2])
def test_quantize__round_trip_through_a_state_dict(name):
    torch.manual_seed(0)
    model, ids = Tied(), torch.arange(7)
    before = size_in_bytes(model)
    quantize_(model, name, lambda layer, _: layer != "head")
    assert type(model.head) is nn.Linear and type(model.first) is QuantizedLinear
    assert model.again is model.first and type(model.embed) is QuantizedEmbedding
    assert size_in_bytes(model) < before / 2
    out = model(ids)
    # Load its state dict into another model.
    other = quantize_(Tied(), name, lambda layer, _: layer != "head")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(ids), out)
    # Dequantize, and load the result into a plain model.
    plain = Tied()
    plain.load_state_dict(dequantize_(model).state_dict())
    torch.testing.assert_close(plain(ids), out, rtol=1e-5, atol=1e-5)


def test_dequantize__restores_bfloat16():
    model = dequantize_(quantize_(Tied().bfloat16(), "w8a16"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(torch.arange(7)).dtype == torch.bfloat16


def test_scheme__default_block_size_equals_the_configuration(settings):
    assert Scheme.named("w4a8_block_asym") == Scheme.named("w4a8_block32_asym")
    assert settings("quant=w4a8_block").quant.block_size == Scheme.named("w4a8_block").block_size


@pytest.mark.parametrize("name", ["w2a16", "w4a16_fp8", "w8a8_block1", "int8"])
def test_scheme__rejects_unsupported_names(name):
    with error("quant.scheme"):
        quantize_(Tied(), name)


def test_scheme__message():
    """A snapshot of the wording."""
    with pytest.raises(UsageError, match=r"^unknown scheme 'w2a16'; expected w8a8_fp8, .* such as w4a16_block32"):
        Scheme.named("w2a16")


def test_quantize__rejects_before_it_swaps():
    model = Tied()
    layers = {"embed": 32, "first": 32, "again": 32, "head": 32}
    with error("quant.block_size", block_size=24, layers=layers):
        quantize_(model, "w4a16_block24")
    with error("quant.no_layers", model="Tied"):
        quantize_(model, "w8a8", lambda *_: False)
    with error("quant.bare_layer", model="Linear"):
        quantize_(nn.Linear(16, 16), "w8a8")
    assert [type(module) for module in model.modules()] == [type(module) for module in Tied().modules()]


def test_layers__reject_unsupported_weights():
    with error("quant.weight_shape", name="scale", got="none"):
        QuantizedLinear(32, 8, "w8a16").load_quantized_weight(torch.zeros(8, 32, dtype=torch.int8), None)
    with error("quant.block_size", in_features=32):
        QuantizedLinear(32, 8, "w8a16_block24")
    with error("quant.block_size", in_features=32):
        QuantizedEmbedding(7, 32, "w8a16_block24")
    with error("quant.max_norm"):
        QuantizedEmbedding.of(nn.Embedding(7, 32, max_norm=1.0), "w8a16")


def test_settings__each_scheme_is_valid_in_one_mode(settings):
    from vitkernels.config import Config

    Config.from_hydra(settings("quant=int8"))
    Config.from_hydra(settings("quant=w4a8_block", "mode=eval", "checkpoint=somewhere"))
    with error("config.conflict", setting="quant.name", value="w8a8", mode="train"):
        Config.from_hydra(settings("quant=w8a8"))
    with error("config.conflict", setting="quant.name", value="fp8", mode="eval"):
        Config.from_hydra(settings("quant=fp8", "mode=eval", "checkpoint=somewhere"))
