"""Quantized layers: what they store, what they give, swapping in and out; and training whose products run in 8 bits."""

import copy

import pytest
import torch
from expecting import error
from torch import nn

from vitkernels.models import create_model
from vitkernels.quant import (
    QuantizedEmbedding,
    QuantizedLinear,
    Scheme,
    dequantize_,
    quantize_,
    size_in_bytes,
    train_in_8_bits,
)
from vitkernels.quant.training import EightBitLinear

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = ["w8a16", "w4a16_block32", "w8a8_asym", "w4a8_block16_asym", "w8a8_fp8"]


@pytest.mark.parametrize("name", NAMES)
def test_linear_gives_what_its_float_form_gives(name):
    torch.manual_seed(0)
    linear = nn.Linear(64, 24)
    quantized = QuantizedLinear.of(linear, name)
    x = torch.randn(3, 5, 64)
    # Half a step of 1/127 or 1/7 of the range, or, in fp8, of 32 of 448; the same for tokens.
    weight_step = linear.weight.abs().max() * step_of(quantized.scheme)
    assert (quantized.dequantize().weight - linear.weight).abs().max() <= 0.51 * weight_step
    error = (quantized(x) - quantized.dequantize()(x)).norm() / linear(x).norm()
    # A token's 255 levels: rounding of 1/254 at most, and about 0.6 of that in the norm; fp8's three digits: 1/16.
    assert error < (0.05 if quantized.scheme.fp8 else 0.015 if quantized.scheme.activation_bits == 8 else 1e-6)


def step_of(scheme):
    """The widest step between two stored numbers, relative to the greatest."""
    return 32 / 448 if scheme.fp8 else 1 / 127 if scheme.weight_bits == 8 else 1 / 7


def test_four_bits_take_half_of_what_eight_do():
    sizes = {}
    for bits in (8, 4):
        layer = QuantizedLinear.of(nn.Linear(64, 32, bias=False), Scheme(bits))
        sizes[bits] = layer.weight.untyped_storage().nbytes()
    assert sizes == {8: 64 * 32, 4: 64 * 32 // 2}


@pytest.mark.parametrize("name", NAMES)
def test_embedding(name):
    torch.manual_seed(0)
    table = nn.Embedding(10, 64)
    quantized = QuantizedEmbedding.of(table, name)
    ids = torch.tensor([[0, 9], [3, 3]])
    assert torch.equal(quantized(ids), quantized.dequantize()(ids)) and quantized(ids).shape == (2, 2, 64)
    step = table.weight.abs().max() * step_of(quantized.scheme)
    assert (quantized(ids) - table(ids)).abs().max() <= 0.51 * step
    assert quantized.weight.untyped_storage().nbytes() == 10 * 64 * quantized.scheme.weight_bits // 8


def test_an_embedding_keeps_what_its_gradient_is_made_by():
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
def test_swap_round_trip(name):
    torch.manual_seed(0)
    model, ids = Tied(), torch.arange(7)
    before = size_in_bytes(model)
    quantize_(model, name, lambda layer, _: layer != "head")
    assert type(model.head) is nn.Linear and type(model.first) is QuantizedLinear
    assert model.again is model.first and type(model.embed) is QuantizedEmbedding
    assert size_in_bytes(model) < before / 2
    out = model(ids)
    # Through a state dict, into another model.
    other = quantize_(Tied(), name, lambda layer, _: layer != "head")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(ids), out)
    # And back to floats that plain modules load.
    plain = Tied()
    plain.load_state_dict(dequantize_(model).state_dict())
    torch.testing.assert_close(plain(ids), out, rtol=1e-5, atol=1e-5)


def test_a_bfloat16_model_is_one_again_when_it_is_swapped_back():
    model = dequantize_(quantize_(Tied().bfloat16(), "w8a16"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(torch.arange(7)).dtype == torch.bfloat16


def test_blocks_without_a_size_are_those_of_the_command_line(settings):
    assert Scheme.named("w4a8_block_asym") == Scheme.named("w4a8_block32_asym")
    assert settings("quant=w4a8_block").quant.block_size == Scheme.named("w4a8_block").block_size


def test_refusals():
    with pytest.raises(ValueError, match=r"unknown scheme 'w2a16'.*w4a16_block32_asym"):
        quantize_(Tied(), "w2a16")
    with pytest.raises(ValueError, match="w8a8_fp8 alone, got w4a16_fp8"):
        quantize_(Tied(), "w4a16_fp8")
    with pytest.raises(ValueError, match=r"block_size 24 does not divide the in features 32 \(as of embed\)"):
        quantize_(Tied(), "w4a16_block24")
    with pytest.raises(ValueError, match="filter lets through"):
        quantize_(Tied(), "w8a8", lambda *_: False)
    with pytest.raises(ValueError, match=r"scale of a w8a16 layer .* must be .*got none"):
        QuantizedLinear(32, 8, "w8a16").load_quantized_weight(torch.zeros(8, 32, dtype=torch.int8), None)
    with pytest.raises(ValueError, match="unknown 8-bit dtype 'int4'"):
        train_in_8_bits(Tied(), "int4")
    with pytest.raises(ValueError, match=r"multiples of 16.*head"):
        train_in_8_bits(Tied(), "int8")
    with pytest.raises(ValueError, match="a bare layer"):
        train_in_8_bits(nn.Linear(16, 16), "int8")


def test_a_model_that_trains_in_8_bits_is_not_swapped_again():
    """Within an MLP that runs as one, integers would be taken for weights; elsewhere layers would be passed over."""
    model = train_in_8_bits(small_vit(), "int8", lambda name, _: name != "head")
    for again in (lambda: quantize_(model, "w8a16"), lambda: train_in_8_bits(model, "fp8")):
        with pytest.raises(ValueError, match=r"blocks\.0\.attn\.qkv trains in 8 bits already; .* state_dict"):
            again()
    fresh = small_vit()
    fresh.load_state_dict(model.state_dict())
    quantize_(fresh, "w8a16")


def test_a_layer_in_two_places_trains_in_8_bits_in_both():
    model = train_in_8_bits(Tied(), "int8", lambda name, _: name != "head")
    assert type(model.first) is type(model.again) is EightBitLinear
    assert model.first.weight is model.again.weight


# --- training ---------------------------------------------------------------------------------------------------------


def small_vit():
    torch.manual_seed(0)
    return create_model("vit_digits", "sdpa", num_classes=10, depth=2)


def gradients(model, x):
    out = model(x)
    # A loss whose gradient is dense and of every size.
    (out * torch.linspace(-1, 1, 10, device=out.device)).sum().backward()
    return out.detach(), {name: p.grad.flatten() for name, p in model.named_parameters()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "loss"), [("int8", 0.06), ("fp8", 0.25)])
def test_gradients_point_where_float_ones_do(dtype, loss, device):
    """Rounding gives each product a relative error of about 1/60 (int8) or 1/14 (fp8); `loss`: of eight in a row."""
    x = torch.randn(4, 1, 16, 16, device=device)
    plain = small_vit().to(device)
    model = train_in_8_bits(copy.deepcopy(plain), dtype, lambda name, _: name != "head")
    assert list(model.state_dict()) == list(plain.state_dict())
    expected_out, expected = gradients(plain, x)
    out, found = gradients(model, x)
    assert 0 < (out - expected_out).norm() / expected_out.norm() < loss
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        assert torch.cosine_similarity(gradient, expected[name], dim=0) > 1 - loss, name


# Dynamo itself makes an instance of an autograd.Function to trace it, and PyTorch warns of that.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_whole():
    x, model = torch.randn(2, 1, 16, 16), train_in_8_bits(small_vit(), "int8", lambda name, _: name != "head")
    out, expected = gradients(model, x)
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    (compiled * torch.linspace(-1, 1, 10)).sum().backward()
    torch.testing.assert_close(compiled, out)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.flatten(), expected[name])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize(("M", "C"), [(48, 40), (37, 64), (1, 130)])
def test_triton_rounds_as_torch_does(M, C, dtype, device):
    pytest.importorskip("triton")
    from vitkernels.ops import rowwise_quantization
    from vitkernels.ops.rowwise_quantization import triton as kernels

    if (device, dtype) == ("cpu", torch.float8_e4m3fn):
        pytest.skip("Triton's interpreter rounds to fp8 without a carry into the exponent; runs where a GPU is")
    torch.manual_seed(0)
    x, gradient = torch.randn(M, C) * torch.rand(M, 1), torch.randn(M, C)
    x[M // 2] = 0
    on_device = lambda *tensors: [None if t is None else t.to(device) for t in tensors]  # noqa: E731
    bits = lambda q: q.cpu().view(torch.int8)  # noqa: E731
    for gelu, grad in ((False, None), (True, None), (True, gradient)):
        q, scale = (
            rowwise_quantization.quantize_gelu(x, grad, dtype) if gelu else rowwise_quantization.quantize_rows(x, dtype)
        )
        found, found_scale = kernels.quantize_rows(*on_device(x, grad), dtype, gelu)
        torch.testing.assert_close(found_scale.cpu(), scale, rtol=1e-6, atol=0)
        # gelu's polynomial is within 1e-7, and a reciprocal's last digit may differ: a value that close to a half may
        # fall to either side of it.
        assert (bits(found) != bits(q)).float().mean() < 2e-3
        assert (found.cpu().float() - q.float()).abs().max() <= (1 if dtype == torch.int8 else 32)
        turned, sums = kernels.transpose_rows(found, found_scale, True)
        assert turned.shape == (C, rowwise_quantization.padded(M)) and not bits(turned)[:, M:].any()
        assert torch.equal(bits(turned)[:, :M].T, bits(found))
        exact = (found.double() * found_scale.double()[:, None]).sum(0)
        torch.testing.assert_close(sums.double(), exact, rtol=1e-5, atol=1e-5)
    factor, other = torch.rand(M), torch.rand(M)
    for given, factors, wanted in ((x, (None, None), False), (q, (factor, other), True)):
        expected = rowwise_quantization.quantize_columns(given, *factors, dtype, wanted)
        found = kernels.quantize_columns(*on_device(given, *factors), dtype, wanted)
        assert (bits(found[0]) != bits(expected[0])).float().mean() < 2e-3 and found[0].shape == expected[0].shape
        torch.testing.assert_close(found[1].cpu(), expected[1])
        torch.testing.assert_close(found[2].cpu(), expected[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_rounding_reads_any_layout(dtype, device):
    """Kernels and what they hand on count rows from contiguous memory."""
    from vitkernels.ops.rowwise_quantization import quantize_columns, quantize_gelu, quantize_rows

    turned = torch.randn(64, 48, device=device).T
    apart = torch.randn(48, 64, 2, device=device)[..., 0]
    ways = (
        lambda x: quantize_rows(x, dtype),
        lambda x: quantize_gelu(x, None, dtype),
        lambda x: quantize_gelu(turned.contiguous(), x, dtype),
        lambda x: quantize_columns(x, None, None, dtype, False),
    )
    for x in (turned, apart, torch.randn(64, device=device).expand(48, 64)):
        for way in ways:
            for found, wanted in zip(way(x), way(x.contiguous()), strict=True):
                assert torch.equal(found.float(), wanted.float()) and found.stride() == wanted.stride()


def test_settings_keep_training_and_evaluation_apart(settings):
    from vitkernels.config import Config

    Config.from_hydra(settings("quant=int8"))
    Config.from_hydra(settings("quant=w4a8_block", "mode=eval", "checkpoint=somewhere"))
    with error("config.conflict", setting="quant.name", value="w8a8", mode="train"):
        Config.from_hydra(settings("quant=w8a8"))
    with error("config.conflict", setting="quant.name", value="fp8", mode="eval"):
        Config.from_hydra(settings("quant=fp8", "mode=eval", "checkpoint=somewhere"))
