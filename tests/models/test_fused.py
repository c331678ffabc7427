"""set_ops: fused ops in a timm model compute the same function of the same parameters."""

import copy
import inspect

import pytest
import torch
from expecting import error
from timm.layers import Attention

from vitkernels import models
from vitkernels.errors import UsageError
from vitkernels.models import fused_modules, model_ops
from vitkernels.models.fused_modules import FusedBlock, FusedBlocks
from vitkernels.quant import quantize_, train_in_8_bits
from vitkernels.registry import op as registry_op

pytestmark = pytest.mark.usefixtures("quick_kernels")

ALL = {"layer_norm_residual": "triton", "linear": "triton", "mlp": "passes", "patch_embed": "triton"}


PALLAS = {"layer_norm_residual": "pallas_tpu", "linear": "pallas_tpu", "mlp": "pallas_tpu", "patch_embed": "xla"}


def pair(ops, residual_dtype=None, keep_activation=False, **kwargs):
    """Return a model with timm's modules, and one with the same weights and these ops."""
    torch.manual_seed(0)
    plain, fused = (models.create_model("vit_digits", "native", num_classes=10, depth=2, **kwargs) for _ in range(2))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # biases and scales are initialized to constants
    fused.load_state_dict(plain.state_dict())
    return plain, models.set_ops(fused, ops, residual_dtype, keep_activation)


def losses_and_gradients(model, images):
    loss = model(images).square().mean()
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "ops",
    [
        ALL,
        pytest.param(PALLAS, marks=pytest.mark.slow),
        *({name: "triton"} for name in ("layer_norm_residual", "linear", "patch_embed")),
    ],
    ids=lambda ops: "pallas" if ops is PALLAS else "+".join(ops),
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
def test_set_ops__same_function_and_gradients(ops, kwargs):
    plain, fused = pair(ops, **kwargs)
    assert list(plain.state_dict()) == list(fused.state_dict())
    images = torch.randn(3, 1, 16, 16)
    (loss, want), (got_loss, got) = (losses_and_gradients(m, images) for m in (plain, fused))
    assert got_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in want.items():
        # Summation order differs; gradients of the keys' bias and of its norm are zero up to rounding.
        assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8, name


def test_fused_linear__is_qkv_only_without_a_norm_of_the_keys():
    for kwargs, expected in (({}, True), ({"qk_norm": True}, False)):
        attn = pair(ALL, **kwargs)[1].blocks[0].attn
        assert (attn.qkv.is_qkv, attn.proj.is_qkv) == (expected, False)


def test_keep_activation__saves_one_more_hidden_tensor_and_the_same_gradients():
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


def test_drop_path__drops_per_image_and_keeps_the_mean():
    plain, fused = pair({"layer_norm_residual": "reference"}, drop_path_rate=0.5)
    images = torch.randn(1, 1, 16, 16).expand(512, -1, -1, -1)
    plain.train(), fused.train()
    torch.manual_seed(1)
    want, got = plain(images).mean(0), fused(images).mean(0)
    assert len(fused(images[:64]).unique(dim=0)) > 1  # each image drops its own branches
    assert torch.allclose(got, want, atol=0.15)  # means of 512 draws, each with a deviation near 1
    plain.eval(), fused.eval()
    assert torch.allclose(plain(images[:2]), fused(images[:2]), atol=1e-5)


def test_dropout__applies_in_training_only():
    _, fused = pair(ALL, proj_drop_rate=0.5)
    images = torch.randn(2, 1, 16, 16)
    fused.train()
    assert not torch.equal(fused(images), fused(images))
    fused.eval()
    assert torch.equal(fused(images), fused(images))


TOKEN = {"class_token": True, "global_pool": "token"}


@pytest.mark.parametrize(
    "kwargs",
    [TOKEN, TOKEN | {"reg_tokens": 2, "init_values": 0.1}, TOKEN | {"drop_path_rate": 0.5}, TOKEN | {"fc_norm": True}],
    ids=["plain", "registers and scale", "drop path", "norm of the head"],
)
def test_class_token__is_the_only_row_of_the_last_mlp(kwargs):
    """The logits and gradients equal those of all rows, with the same draws of drop path."""
    _, fused = pair(ALL, **kwargs)
    images, rows, found = torch.randn(5, 1, 16, 16), [], []
    fused.blocks[-1].norm2.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    for forward in (fused, lambda x: fused.forward_head(fused.forward_features(x))):
        torch.manual_seed(1)
        fused.zero_grad()
        logits = forward(images)
        logits.square().mean().backward()
        found.append((logits, {name: p.grad for name, p in fused.named_parameters()}))
    (logits, gradients), (want, want_gradients) = found
    assert rows == [1], "fused blocks read the norm's parameters, so its hook runs for the class token alone"
    assert (logits - want).norm() <= 1e-5 * want.norm()
    for name, gradient in want_gradients.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8, name


def test_class_token__all_tokens_where_they_are_asked_for():
    plain, fused = pair(ALL, **TOKEN)
    images = torch.randn(2, 1, 16, 16)
    assert torch.allclose(fused.forward_features(images), plain.forward_features(images), atol=1e-5)
    fused.set_grad_checkpointing()
    assert torch.allclose(fused(images), plain(images), atol=1e-5)
    fused.reset_classifier(10, "avg")
    plain.reset_classifier(10, "avg")
    plain.head.load_state_dict(fused.head.state_dict())
    fused.set_grad_checkpointing(False)
    assert torch.allclose(fused(images), plain(images), atol=1e-5)


def _replace_blocks(model):
    model.blocks = torch.nn.Sequential(*model.blocks[:1])


def _replace_forward_features(model):
    original = model.forward_features
    model.forward_features = lambda x, **masks: 2 * original(x, **masks)


@pytest.mark.parametrize("replace", [_replace_blocks, _replace_forward_features])
def test_class_token__parts_replaced_after_set_ops_are_used(replace):
    plain, fused = pair(ALL, **TOKEN)
    images = torch.randn(2, 1, 16, 16)
    before = fused(images)
    replace(plain), replace(fused)
    assert torch.allclose(fused(images), plain(images), atol=1e-5)
    assert not torch.allclose(fused(images), before, atol=1e-2)


def test_class_token__in_8_bits():
    _, fused = pair({"layer_norm_residual": "reference"}, **TOKEN)
    train_in_8_bits(fused, "int8", lambda name, _: name != "head")
    images = torch.randn(3, 1, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = fused(images), fused.forward_head(fused.forward_features(images))
    assert (got - want).norm() < 0.02 * want.norm()  # bfloat16 rounds activations at different places


def test_fused_block__alone_matches_timm():
    plain, fused = pair(ALL)
    tokens = torch.randn(2, 16, 96)
    assert isinstance(fused.blocks, FusedBlocks) and isinstance(fused.blocks[0], FusedBlock)
    assert torch.allclose(plain.blocks[1](tokens), fused.blocks[1](tokens), atol=1e-5)
    assert len(fused.forward_intermediates(torch.randn(2, 1, 16, 16))[1]) == 2


def test_residual_dtype__bfloat16_stays_close():
    plain, fused = pair({"layer_norm_residual": "triton"}, torch.bfloat16)
    images = torch.randn(3, 1, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = plain(images).float(), fused(images).float()
    assert not torch.equal(got, want)
    assert (got - want).norm() < 0.05 * want.norm()  # four roundings of 0.2 % along the stream, amplified by its norms


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8_fp8"])
def test_quantize__before_or_after_set_ops(scheme):
    """Under autocast, because integers and 8-bit floats must not be cast like weights."""
    plain, fused = pair({"layer_norm_residual": "reference", "linear": "reference", "mlp": "reference"})
    for model in (plain, fused):
        quantize_(model, scheme)
    images = torch.randn(2, 1, 16, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want, got = plain(images), fused(images)
    assert (got - want).norm() < 0.02 * want.norm()  # bfloat16 rounds activations at different places


@pytest.mark.parametrize("kwargs", [{}, TOKEN], ids=["all tokens", "class token"])
def test_set_ops__compiles_without_graph_breaks(kwargs):
    _, fused = pair(ALL, **kwargs)
    images = torch.randn(2, 1, 16, 16)
    want = losses_and_gradients(fused, images)
    got = losses_and_gradients(torch.compile(fused, fullgraph=True, backend="aot_eager"), images)
    assert got[0] == pytest.approx(want[0], rel=1e-6)


@pytest.fixture
def as_on_gpu(monkeypatch):
    """Give "auto" a kernel for every op."""
    monkeypatch.setattr(model_ops, "_has_kernel", lambda *_: True)


def test_unsupported_architecture__named_raises_and_auto_falls_back(caplog):
    model = models.create_model("vit_digits", "native", num_classes=10, qk_norm=True, norm_layer="rmsnorm")
    with error("models.op_unsupported", model="VisionTransformer") as caught:
        models.set_ops(model, {"layer_norm_residual": "triton"})
    assert "RmsNorm" in caught.value.fields["reasons"]["layer_norm_residual"]
    with caplog.at_level("INFO", "vitkernels"):
        models.set_ops(model, {"layer_norm_residual": "auto"}, device="cuda")
    assert not isinstance(model.blocks, FusedBlocks) and "timm computes layer_norm_residual:" in caplog.text


def test_unsupported_architecture__message():
    """A snapshot of the wording."""
    model = models.create_model("vit_digits", "native", num_classes=10, norm_layer="rmsnorm")
    with pytest.raises(UsageError) as caught:
        models.set_ops(model, {"layer_norm_residual": "triton"})
    assert str(caught.value) == (
        "VisionTransformer does not support layer_norm_residual='triton' (its norm is RmsNorm, "
        'expected LayerNorm with weight and bias); set these ops to "eager" or "auto"'
    )


def test_residual_dtype__requires_layer_norm_residual_after_auto_fell_back(as_on_gpu):
    model = models.create_model("vit_digits", "native", num_classes=10, norm_layer="rmsnorm")
    with error("models.op_option", option="residual_dtype", op="layer_norm_residual"):
        models.set_ops(model, {"layer_norm_residual": "auto"}, torch.bfloat16)


def test_auto__falls_back_if_patches_do_not_cover_the_image(as_on_gpu, caplog):
    """timm's convolution ignores the remaining pixels."""
    model = models.create_model("vit_digits", "native", num_classes=10, depth=1, img_size=18)
    with caplog.at_level("INFO", "vitkernels"):
        models.set_ops(model, {"patch_embed": "auto"})
    assert "timm computes patch_embed:" in caplog.text and "18 x 18" in caplog.text
    assert model(torch.randn(2, 1, 18, 18)).shape == (2, 10)


def test_unsupported_architecture__blocks_without_standard_attention(as_on_gpu, caplog):
    model = models.create_model("vit_small_patch16_18x2_224", "native", depth=1)
    with caplog.at_level("INFO", "vitkernels"):
        models.set_ops(model, dict.fromkeys(models.MODEL_OPS, "auto"))
    assert "ParallelThingsBlock.attn.qkv is NoneType" in caplog.text
    with error("models.op_unsupported") as caught:
        models.set_ops(model, ALL)
    assert caught.value.fields["reasons"].keys() == {"layer_norm_residual", "linear", "mlp"}


def test_quantize__leaves_parametrized_layers():
    _, model = pair(ALL)
    qkv = torch.nn.utils.parametrizations.weight_norm(model.blocks[0].attn.qkv)
    quantize_(model, "w8a16")
    assert model.blocks[0].attn.qkv is qkv and type(model.blocks[1].attn.qkv).__name__ == "QuantizedLinear"


@pytest.mark.parametrize("kwargs", [{}, TOKEN], ids=["all tokens", "class token"])
def test_set_ops__later_call_replaces_the_earlier_one(kwargs):
    plain, model = pair(ALL, torch.bfloat16, **kwargs)
    models.set_ops(model, {"patch_embed": "eager"})
    assert str(model) == str(plain)
    images = torch.randn(2, 1, 16, 16)
    assert torch.equal(model(images), plain(images))


@pytest.mark.parametrize("fused_attn, backend", [(True, "sdpa"), (False, "native")])
def test_set_ops__replaces_timm_attention_by_the_equivalent_backend(fused_attn, backend):
    torch.manual_seed(0)
    plain = models.timm_model("vit_digits", num_classes=10, depth=2)
    for block in plain.blocks:
        block.attn.fused_attn = fused_attn
    fused, images = models.set_ops(copy.deepcopy(plain), ALL), torch.randn(3, 1, 16, 16)
    assert {block.attn.backend.name for block in fused.blocks} == {backend}
    assert fused.blocks[0].attn.qkv.is_qkv and list(fused.state_dict()) == list(plain.state_dict())
    (loss, want), (got_loss, got) = (losses_and_gradients(m, images) for m in (plain, fused))
    assert got_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in want.items():  # as above; the gradient of the keys' bias is zero up to rounding
        assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8, name
    assert type(models.set_ops(copy.deepcopy(plain), {"patch_embed": "triton"}).blocks[0].attn) is Attention


def test_fused__names_the_kernels_of_the_device(monkeypatch):
    fused = dict.fromkeys(models.MODEL_OPS, "fused")
    assert models.set_ops(tiny(), fused).blocks[0].ops == models.set_ops(tiny(), ALL).blocks[0].ops == ALL
    monkeypatch.setattr(registry_op, "place_of", lambda device: "tpu")
    assert models.set_ops(tiny(), fused).blocks[0].ops == PALLAS


def test_pallas_block__joins_norms_with_products(monkeypatch):
    called = []
    for name in ("norm_linear", "norm_mlp", "layer_norm_residual", "mlp"):
        original = getattr(fused_modules, name)
        monkeypatch.setattr(
            fused_modules,
            name,
            lambda *args, name=name, original=original, **kw: called.append(name) or original(*args, **kw),
        )
    _, model = pair(PALLAS)
    with torch.no_grad():
        model(torch.randn(1, 1, 16, 16))
    assert called == ["norm_linear", "norm_mlp"] * 2
    called.clear()
    _, model = pair(PALLAS | {"linear": "eager", "mlp": "passes"})
    with torch.no_grad():
        model(torch.randn(1, 1, 16, 16))
    assert called == ["layer_norm_residual", "layer_norm_residual", "mlp"] * 2


def test_describe_ops__message():
    """A snapshot of the wording."""
    eager = dict.fromkeys(models.MODEL_OPS, "eager")
    assert models.describe_ops(eager) == "eager"
    assert models.describe_ops(eager | {"layer_norm_residual": "mine"}) == "eager except layer_norm_residual=mine"
    assert models.describe_ops(ALL) == "triton except mlp=passes"
    auto = dict.fromkeys(models.MODEL_OPS, "auto")
    assert models.describe_ops(auto | {"mlp": "passes"}, "cpu") == "eager except mlp=passes"
    assert models.describe_ops(auto, "cuda") == models.describe_ops(auto) == "auto"


def tiny():
    return models.create_model("vit_digits", "native", num_classes=10)


@pytest.mark.parametrize("ops", ["auto", None, ["linear"]])
def test_set_ops__refuses_what_is_no_mapping(ops):
    with error("models.ops_type", ops=ops):
        models.set_ops(tiny(), ops)


@pytest.mark.parametrize(
    ("backends", "near"), [({"layer_norm": "triton"}, "layer_norm_residual"), ({"patch_embed": "tritn"}, "triton")]
)
def test_set_ops__unknown_names_suggest_near_ones(backends, near):
    with error("unknown_name") as caught:
        models.set_ops(tiny(), backends)
    assert near in caught.value.fields["near"]


@pytest.mark.parametrize("backends", [{"mlp": "triton"}, {"mlp": "passes", "layer_norm_residual": "auto"}], ids=str)
def test_mlp__named_requires_layer_norm_residual(backends):
    with error("models.op_requires", op="mlp", requires="layer_norm_residual"):
        models.set_ops(tiny(), backends)


def test_mlp__auto_falls_back_without_layer_norm_residual(monkeypatch, caplog):
    monkeypatch.setattr(model_ops, "place_of", lambda device: "cuda")
    plain = tiny()
    model = copy.deepcopy(plain)
    with caplog.at_level("INFO", "vitkernels"):
        models.set_ops(model, {"mlp": "auto", "layer_norm_residual": "eager"}, keep_activation=True)
    assert str(model) == str(plain)
    assert "timm computes mlp:" in caplog.text and "requires layer_norm_residual" in caplog.text


def test_options__require_their_op():
    with error("models.op_option", option="residual_dtype", op="layer_norm_residual"):
        models.set_ops(tiny(), {"patch_embed": "triton"}, torch.bfloat16)
    with error("models.op_option", option="keep_activation", op="mlp"):
        models.set_ops(tiny(), {"layer_norm_residual": "triton"}, keep_activation=True)


@pytest.mark.parametrize(
    ("ops", "module"),
    [
        ({"layer_norm_residual": "reference", "mlp": "reference"}, "ClassTokenViT"),
        ({"linear": "reference"}, "FusedLinear"),
        ({"patch_embed": "reference"}, "FusedPatchConv"),
    ],
)
def test_torchscript__of_fused_ops_is_refused_and_works_without_them(ops, module):
    model, x = models.create_model("vit_digits", "sdpa", depth=2).eval(), torch.randn(2, 1, 16, 16)
    expected = model(x)
    models.set_ops(model, ops)
    with error("models.torchscript", module=module) as caught:
        torch.jit.script(model)
    assert "set_ops(model, {})" in str(caught.value)
    scripted = torch.jit.script(models.set_ops(model, {}))
    torch.testing.assert_close(scripted(x), expected)  # PyTorch's tolerances: another order of float32 sums


def test_torchscript__reads_the_signature_of_fused_blocks():
    """A comment at the signature would be a type comment for it."""
    assert torch.jit.annotations.get_type_line(inspect.getsource(FusedBlock.forward)) is None
