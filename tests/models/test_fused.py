"""Fused operations in a timm model: the same parameters, the same function."""

import copy

import pytest
import torch
from timm.layers import Attention

from vitkernels import models
from vitkernels.models import fusing
from vitkernels.models.fused_blocks import FusedBlock, FusedBlocks
from vitkernels.quant import quantize_

ALL = {"layer_norm_residual": "triton", "linear": "triton", "mlp": "passes", "patch_embed": "triton"}


def pair(ops, residual_dtype=None, keep_activation=False, **kwargs):
    """The model as timm has it, and one of the same weights with these ops."""
    torch.manual_seed(0)
    plain, fused = (models.create_model("vit_digits", "native", num_classes=10, depth=2, **kwargs) for _ in range(2))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # biases and scales start at constants
    fused.load_state_dict(plain.state_dict())
    return plain, models.set_ops(fused, ops, residual_dtype, keep_activation)


def losses_and_gradients(model, images):
    loss = model(images).square().mean()
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "ops",
    [ALL, *({name: "triton"} for name in ("layer_norm_residual", "linear", "patch_embed"))],
    ids=lambda ops: "+".join(ops),
)
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"init_values": 0.1, "class_token": True, "global_pool": "token"},
        {"act_layer": "gelu_tanh", "proj_bias": False},
        {"qk_norm": True},
        {"qkv_bias": False},
    ],
    ids=[
        "plain", "scale and class token", "tanh GELU, no projection bias", "norms of q and k", "no qkv bias",
    ],
)  # fmt: skip
def test_the_same_function_and_gradients(ops, kwargs):
    plain, fused = pair(ops, **kwargs)
    assert list(plain.state_dict()) == list(fused.state_dict())
    images = torch.randn(3, 1, 16, 16)
    (loss, want), (got_loss, got) = (losses_and_gradients(m, images) for m in (plain, fused))
    assert got_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in want.items():
        # float32 sums in another order; of the keys' bias, and of their norm's, nothing but rounding is left
        assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8, name


def test_only_keys_that_reach_the_scores_as_they_are_need_no_bias():
    for kwargs, expected in (({}, True), ({"qk_norm": True}, False)):
        attn = pair(ALL, **kwargs)[1].blocks[0].attn
        assert (attn.qkv.is_qkv, attn.proj.is_qkv) == (expected, False)


def test_keeping_the_activation_saves_one_more_hidden_tensor_and_changes_no_gradient():
    images, found = torch.randn(3, 1, 16, 16), {}
    for keep in (False, True):
        torch.manual_seed(1)
        fused, saved = pair(ALL, keep_activation=keep)[1], []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.numel()) or x, lambda x: x):
            loss = fused(images).square().mean()
        loss.backward()
        found[keep] = sum(saved), {name: p.grad for name, p in fused.named_parameters()}
    hidden = fused.blocks[0].mlp.fc1.out_features * 3 * fused.patch_embed.num_patches
    assert found[True][0] - found[False][0] == len(fused.blocks) * hidden
    for name, gradient in found[False][1].items():
        assert torch.equal(found[True][1][name], gradient), name


def test_drop_path_drops_whole_images_and_keeps_the_mean():
    plain, fused = pair({"layer_norm_residual": "reference"}, drop_path_rate=0.5)
    images = torch.randn(1, 1, 16, 16).expand(512, -1, -1, -1)
    plain.train(), fused.train()
    torch.manual_seed(1)
    want, got = plain(images).mean(0), fused(images).mean(0)
    assert len(fused(images[:64]).unique(dim=0)) > 1  # images differ by what was dropped
    assert torch.allclose(got, want, atol=0.15)  # means of 512 draws, each with a deviation near 1
    plain.eval(), fused.eval()
    assert torch.allclose(plain(images[:2]), fused(images[:2]), atol=1e-5)


def test_dropout_between_linear_and_seam():
    _, fused = pair(ALL, proj_drop_rate=0.5)
    images = torch.randn(2, 1, 16, 16)
    fused.train()
    assert not torch.equal(fused(images), fused(images))
    fused.eval()
    assert torch.equal(fused(images), fused(images))


def test_a_block_alone_is_timms_block():
    plain, fused = pair(ALL)
    tokens = torch.randn(2, 16, 96)
    assert isinstance(fused.blocks, FusedBlocks) and isinstance(fused.blocks[0], FusedBlock)
    assert torch.allclose(plain.blocks[1](tokens), fused.blocks[1](tokens), atol=1e-5)
    assert len(fused.forward_intermediates(torch.randn(2, 1, 16, 16))[1]) == 2


def test_a_bfloat16_stream_is_close():
    plain, fused = pair({"layer_norm_residual": "triton"}, torch.bfloat16)
    images = torch.randn(3, 1, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = plain(images).float(), fused(images).float()
    assert not torch.equal(got, want)
    assert (got - want).norm() < 0.05 * want.norm()  # four roundings of 0.2 % along the stream, and its norms


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8_fp8"])
def test_a_model_can_be_quantized_before_its_ops_are_set_or_after(scheme):
    """... under autocast, where integers and 8-bit floats would be cast like weights."""
    plain, fused = pair({"layer_norm_residual": "reference", "linear": "reference", "mlp": "reference"})
    for model in (plain, fused):
        quantize_(model, scheme)
    images = torch.randn(2, 1, 16, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want, got = plain(images), fused(images)
    assert (got - want).norm() < 0.02 * want.norm()  # bfloat16 rounds what passes between layers at other places


def test_it_compiles_whole():
    _, fused = pair(ALL)
    images = torch.randn(2, 1, 16, 16)
    want = losses_and_gradients(fused, images)
    got = losses_and_gradients(torch.compile(fused, fullgraph=True, backend="aot_eager"), images)
    assert got[0] == pytest.approx(want[0], rel=1e-6)


def test_auto_leaves_what_does_not_fit(caplog):
    model = models.create_model("vit_digits", "native", num_classes=10, qk_norm=True, norm_layer="rmsnorm")
    with pytest.raises(
        ValueError, match=r"cannot run VisionTransformer.*layer_norm_residual=triton: it normalizes with RmsNorm"
    ):
        models.set_ops(model, {"layer_norm_residual": "triton"})
    with caplog.at_level("INFO", "vitkernels"):
        models.set_ops(model, {"layer_norm_residual": "auto"})
    assert not isinstance(model.blocks, FusedBlocks) and "stays as timm has it" in caplog.text


def test_what_does_not_fit_takes_no_residual_dtype_either(monkeypatch):
    monkeypatch.setattr("vitkernels.models.fusing._has_kernel", lambda *_: True)  # as on a GPU
    model = models.create_model("vit_digits", "native", num_classes=10, norm_layer="rmsnorm")
    with pytest.raises(ValueError, match="needs layer_norm_residual, which is eager here"):
        models.set_ops(model, {"layer_norm_residual": "auto"}, torch.bfloat16)


def test_auto_leaves_patches_that_do_not_cover_the_image(monkeypatch, caplog):
    """timm's convolution passes over the pixels at the end."""
    monkeypatch.setattr("vitkernels.models.fusing._has_kernel", lambda *_: True)  # as on a GPU
    model = models.create_model("vit_digits", "native", num_classes=10, depth=1, img_size=18)
    with caplog.at_level("INFO", "vitkernels"):
        models.set_ops(model, {"patch_embed": "auto"})
    assert "18 x 18 pixels do not divide into patches of 4" in caplog.text
    assert model(torch.randn(2, 1, 18, 18)).shape == (2, 10)


def test_blocks_without_attention(monkeypatch, caplog):
    monkeypatch.setattr("vitkernels.models.fusing._has_kernel", lambda *_: True)  # as on a GPU
    model = models.create_model("vit_small_patch16_18x2_224", "native", depth=1)
    with caplog.at_level("INFO", "vitkernels"):
        models.set_ops(model, dict.fromkeys(models.MODEL_OPS, "auto"))
    assert "linear stays as timm has it: ParallelThingsBlock.attn.qkv is NoneType, not Linear" in caplog.text
    with pytest.raises(ValueError, match=r"(?s)set to eager or auto: layer_norm_residual=triton: .*; linear=triton: "):
        models.set_ops(model, ALL)


def test_layers_with_a_parametrization_stay():
    _, model = pair(ALL)
    qkv = torch.nn.utils.parametrizations.weight_norm(model.blocks[0].attn.qkv)
    quantize_(model, "w8a16")
    assert model.blocks[0].attn.qkv is qkv and type(model.blocks[1].attn.qkv).__name__ == "QuantizedLinear"


def test_a_later_call_decides_alone():
    plain, model = pair(ALL, torch.bfloat16)
    models.set_ops(model, {"patch_embed": "eager"})
    assert str(model) == str(plain)
    images = torch.randn(2, 1, 16, 16)
    assert torch.equal(model(images), plain(images))


@pytest.mark.parametrize("fused_attn, backend", [(True, "sdpa"), (False, "native")])
def test_timms_own_attention_goes_on_as_the_backend_that_calculates_the_same(fused_attn, backend):
    torch.manual_seed(0)
    plain = models.timm_model("vit_digits", num_classes=10, depth=2)
    for block in plain.blocks:
        block.attn.fused_attn = fused_attn
    fused, images = models.set_ops(copy.deepcopy(plain), ALL), torch.randn(3, 1, 16, 16)
    assert {block.attn.backend.name for block in fused.blocks} == {backend}
    assert fused.blocks[0].attn.qkv.is_qkv and list(fused.state_dict()) == list(plain.state_dict())
    (loss, want), (got_loss, got) = (losses_and_gradients(m, images) for m in (plain, fused))
    assert got_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in want.items():  # as above; the keys' bias has none but timm's rounding
        assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8, name
    assert type(models.set_ops(copy.deepcopy(plain), {"patch_embed": "triton"}).blocks[0].attn) is Attention


def test_ops_in_words_names_the_exceptions():
    eager = dict.fromkeys(models.MODEL_OPS, "eager")
    assert models.ops_in_words(eager) == "eager"
    assert models.ops_in_words(eager | {"layer_norm_residual": "mine"}) == "eager but layer_norm_residual=mine"
    assert models.ops_in_words(ALL) == "triton but mlp=passes"


@pytest.mark.parametrize(
    "ops,residual,message",
    [
        ({"layer_norm": "triton"}, None, "Did you mean 'layer_norm_residual'?"),
        ({"patch_embed": "tritn"}, None, "Did you mean 'triton'?"),
        ({"mlp": "triton"}, None, "mlp=triton: it is fused together with layer_norm_residual"),
        ({"mlp": "passes", "layer_norm_residual": "auto"}, None, "mlp=passes: it is fused together with"),
        ({"patch_embed": "triton"}, torch.bfloat16, "needs layer_norm_residual"),
    ],
)
def test_errors(ops, residual, message):
    with pytest.raises(ValueError) as caught:
        models.set_ops(models.create_model("vit_digits", "native", num_classes=10), ops, residual)
    assert message in str(caught.value)


def test_mlp_by_itself_stays_where_its_partner_does(monkeypatch, caplog):
    monkeypatch.setattr(fusing, "place_of", lambda device: "cuda")
    plain = models.create_model("vit_digits", "native", num_classes=10)
    model = copy.deepcopy(plain)
    with caplog.at_level("INFO", "vitkernels"):
        models.set_ops(model, {"mlp": "auto", "layer_norm_residual": "eager"}, keep_activation=True)
    assert str(model) == str(plain)
    assert "mlp stays as timm has it: it is fused together with layer_norm_residual" in caplog.text


def test_an_option_of_an_op_that_is_eager_is_an_error():
    model = models.create_model("vit_digits", "native", num_classes=10)
    with pytest.raises(ValueError, match="keep_activation is an option of mlp, which is eager"):
        models.set_ops(model, {"layer_norm_residual": "triton"}, keep_activation=True)
