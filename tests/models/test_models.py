"""create_model, set_attention and inspect_model: timm's architectures and numbers with another attention backend."""

import copy
import pickle

import pytest
import timm
import torch
from expecting import error
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer

from vitkernels import attention, models
from vitkernels.errors import UsageError
from vitkernels.models.backend_attention import BackendAttention

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 5}
# Summation order differs from timm's: a few units in the last place of float32 values near 1.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def swapped(**kwargs):
    torch.manual_seed(0)
    plain = VisionTransformer(**{**TINY, **kwargs})
    ours = VisionTransformer(**{**TINY, **kwargs}, attn_layer=models.attention_layer(attention.get("native")))
    ours.load_state_dict(plain.state_dict())
    return plain.eval(), ours.eval()


VARIANTS = {
    "plain": {},
    "qk_norm": {"qk_norm": True},
    "scale_norm": {"scale_attn_norm": True},
    "register tokens": {"reg_tokens": 4},
    "no class token": {"class_token": False, "global_pool": "avg"},
    "dynamic size": {"dynamic_img_size": True},
    "layer scale": {"init_values": 1e-1},
    "no qkv bias": {"qkv_bias": False},
    "map pooling": {"global_pool": "map", "class_token": False},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_backend_attention__matches_timm_forward_and_backward(name):
    plain, ours = swapped(**VARIANTS[name])
    size = 48 if name == "dynamic size" else 32
    x = torch.randn(2, 3, size, size)
    torch.testing.assert_close(ours(x), plain(x), **TOLERANCE)
    for model in (plain, ours):
        model(x).square().sum().backward()
    for (key, a), b in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=key, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_model__survives_deepcopy_and_pickle(copied):
    ops = {"layer_norm_residual": "reference", "mlp": "passes"}
    model = models.set_ops(models.create_model("vit_digits", "native", num_classes=10, depth=2), ops)
    again, images = copied(model), torch.randn(2, 1, 16, 16)
    assert torch.equal(again(images), model(images))
    first, second = (block.attn for block in again.blocks)
    assert type(first) is type(second) and first.qkv.weight is not model.blocks[0].attn.qkv.weight
    assert models.set_attention(again, "sdpa") and torch.allclose(again(images), model(images), atol=1e-5)


def test_backend_attention__matches_timm_with_gating():
    torch.manual_seed(0)
    try:
        plain = Attention(64, num_heads=2, gated=True)
    except TypeError:
        pytest.skip("this timm has no gated attention")
    ours = models.attention_layer(attention.get("native"))(64, num_heads=2, gated=True)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(2, 9, 64)
    torch.testing.assert_close(ours(x), plain(x), **TOLERANCE)


@pytest.mark.parametrize("kind", ["bool", "float", "causal"])
def test_backend_attention__matches_timm_with_masks(kind):
    torch.manual_seed(0)
    plain = Attention(64, num_heads=2)
    ours = models.attention_layer(attention.get("native"))(64, num_heads=2)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(2, 9, 64)
    keep = torch.rand(9, 9) > 0.3
    keep.fill_diagonal_(True)
    keywords = {"bool": {"attn_mask": keep}, "float": {"attn_mask": torch.randn(9, 9)}, "causal": {"is_causal": True}}
    torch.testing.assert_close(ours(x, **keywords[kind]), plain(x, **keywords[kind]), **TOLERANCE)


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "vit_wee_patch16_reg1_gap_256"]
)
def test_state_dict__loads_into_timm_and_back(name):
    ours = models.create_model(name, "sdpa", num_classes=10)
    plain = timm.create_model(name, num_classes=10)
    assert list(ours.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(ours.state_dict())
    models.load_weights(ours, plain.state_dict(), "timm")


@pytest.mark.parametrize("attn", [name for name in attention.names() if name != "auto"])
def test_create_model__same_parameters_for_every_backend(attn):
    model = models.create_model("vit_digits", attn, num_classes=10)
    assert list(model.state_dict()) == list(models.create_model("vit_digits", "native", num_classes=10).state_dict())
    assert {type(b.attn).backend.name for b in model.blocks} == {attn}


def test_set_attention__keeps_the_parameters():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3).eval()
    x, before = torch.randn(1, 3, 224, 224), {k: v.data_ptr() for k, v in model.state_dict().items()}
    expected = model(x)
    assert models.set_attention(model, "native") is model
    torch.testing.assert_close(model(x), expected, **TOLERANCE)
    assert {k: v.data_ptr() for k, v in model.state_dict().items()} == before
    models.set_attention(model, "sdpa")
    assert all(type(b.attn).backend.name == "sdpa" and not b.attn.training for b in model.blocks)
    with error("models.attention", model="Linear"):
        models.set_attention(torch.nn.Linear(2, 2), "sdpa")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("resnet50", "ResNet"),
        ("coat_tiny", "timm.models.coat.FactorAttnConvRelPosEnc"),
        ("swiftformer_xs", "timm.models.swiftformer.EfficientAdditiveAttention"),
    ],
)
def test_create_model__refuses_unsupported_attention_and_names_it(name, kind):
    with error("models.attention", name=name) as caught:
        models.create_model(name, "native")
    assert kind in caught.value.fields["why"]


def test_create_model__unknown_name_suggests_near_ones():
    with error("unknown_name", name="vit_base_patch16_223") as caught:
        models.create_model("vit_base_patch16_223", "native")
    assert "vit_base_patch16_224" in caught.value.fields["near"]


def test_auto_attention__compiles_without_graph_breaks_and_logs_its_choice(caplog):
    model, images = models.create_model("vit_digits", num_classes=5, depth=1), torch.randn(2, 1, 16, 16)
    with caplog.at_level("INFO"):
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(images)
    assert "auto chose sdpa" in caplog.text
    torch.testing.assert_close(found, model(images), **TOLERANCE)


def test_create_model__rejects_unknown_arguments_and_backends():
    with error("models.arguments", name="vit_digits"):
        models.create_model("vit_digits", "native", nonsense=1)
    with error("models.arguments", name="vit_digits") as caught:
        models.create_model("vit_digits", "native", embed_dim=97)
    assert caught.value.fields["kwargs"]["embed_dim"] == 97
    with error("unknown_name", name="nosuch"):
        models.create_model("vit_digits", "nosuch")


@pytest.mark.parametrize("kwargs", [{"depth": -1}, {"num_heads": 0}, {"embed_dim": "wide"}, {"embed_dim": -64}])
def test_create_model__impossible_arguments_are_refused(kwargs):
    with error("models.arguments", name="vit_digits", kwargs=kwargs):
        models.create_model("vit_digits", "native", **kwargs)


@pytest.mark.parametrize(("ratio", "works"), [(0.001, False), (0, False), (0.02, True)])
def test_create_model__refuses_an_mlp_ratio_that_rounds_to_width_0(ratio, works):
    if works:
        assert models.create_model("vit_digits", "native", depth=1, mlp_ratio=ratio).blocks[0].mlp.fc1.out_features == 1
        return
    with error("models.arguments", mlp_ratio=ratio, layer="blocks.0.mlp.fc1", in_features=96):
        models.create_model("vit_digits", "native", depth=1, mlp_ratio=ratio)


def test_create_model__arguments_message():
    """A snapshot of the wording."""
    with pytest.raises(UsageError, match=r"^timm cannot build model 'vit_digits' with \{.*'embed_dim': 97.*\}: dim "):
        models.create_model("vit_digits", "native", embed_dim=97)


def test_inspect_model__train_flops_are_three_forwards_except_for_image_gradients():
    def build(backend):
        return models.create_model("vit_b16_256", backend, num_classes=1000)

    facts = models.inspect_model(
        build, image_size=256, in_chans=3, batch_size=128, dtype=torch.bfloat16, device_type="cuda"
    )
    n, dim = 256, 768
    block = 2 * n * 12 * dim * dim + 4 * n * n * dim
    patches = 2 * n * 3 * 16 * 16 * dim
    # Images need no gradient, so the patch embedding's backward has one product instead of two.
    assert facts.train_flops_per_image == 3 * (12 * block + 2 * dim * 1000) + 2 * patches
    (problem,) = facts.attention
    assert (problem.batch, problem.heads, problem.q_tokens, problem.head_dim) == (128, 12, 256, 64)
    assert problem.dtype == torch.bfloat16 and problem.device_type == "cuda"
    assert facts.attention_calls == (12,)
    assert facts.parameters == sum(p.numel() for p in build("native").parameters())


def test_backend_attention__passes_dropout_in_training_only():
    seen = []

    class Spy(type(attention.get("native"))):
        def refusal(self, problem):
            seen.append(problem.dropout_p)

    layer = models.attention_layer(Spy())(64, num_heads=2, attn_drop=0.25)
    layer(torch.randn(1, 4, 64))
    layer.eval()(torch.randn(1, 4, 64))
    assert seen == [0.25, 0.0]
    assert issubclass(type(layer), BackendAttention)


def test_inspect_model__rejects_an_image_size_that_the_patches_do_not_divide():
    def create(backend):
        return models.create_model(
            "vit_tiny_patch16_224", backend, img_size=20, patch_size=8, depth=1, dynamic_img_size=True
        )

    with error("models.image_size", image_size=20):
        models.inspect_model(create, image_size=20, in_chans=3, batch_size=1, dtype=torch.float32, device_type="cpu")


@pytest.mark.parametrize(("size", "nearest"), [(100, [96, 112]), (17, [16, 32]), (9, [16])])
def test_inspect_model__rejects_an_image_size_whose_edge_pixels_would_be_ignored(size, nearest):
    def inspect(**kwargs):
        return models.inspect_model(
            lambda backend: models.create_model("vit_tiny_patch16_224", backend, depth=1, **kwargs),
            image_size=size, in_chans=3, batch_size=1, dtype=torch.float32, device_type="cpu",
        )  # fmt: skip

    with error("models.image_size", image_size=size, nearest=nearest):
        inspect(img_size=size)
    assert inspect(img_size=nearest[-1], dynamic_img_size=True, dynamic_img_pad=True).attention  # padded instead


def test_inspect_model__accepts_a_published_size_that_ignores_pixels():
    facts = models.inspect_model(
        lambda backend: models.create_model("vit_so400m_patch14_siglip_384", backend, depth=1),
        image_size=384, in_chans=3, batch_size=1, dtype=torch.float32, device_type="cpu",
    )  # fmt: skip
    assert facts.attention[0].q_tokens == 27 * 27


def test_input_spec__rejects_an_unknown_tag():
    with error("models.tag", name="vit_tiny_patch16_224.nosuch"):
        models.input_spec("vit_tiny_patch16_224.nosuch")


def test_pretrained__download_failure_is_one_line_with_its_reason(monkeypatch):
    def offline(*_, **__):
        raise OSError("no network\nand more")

    monkeypatch.setattr("vitkernels.models.download._is_cached", lambda repository: True)
    monkeypatch.setattr("timm.create_model", offline)
    with error("models.download", reason="no network"):
        models.timm_model("vit_tiny_patch16_224", pretrained=True)


def test_pretrained__unreachable_hub_is_reported_at_once(monkeypatch, tmp_path):
    """The hub's own client would retry for a minute."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # the port that nobody listens to
    monkeypatch.setattr("timm.create_model", lambda *_, **__: pytest.fail("it asked the hub"))
    with error("models.download", name="vit_tiny_patch16_224") as caught:
        models.timm_model("vit_tiny_patch16_224", pretrained=True)
    assert "127.0.0.1" in caught.value.fields["reason"]


def test_pretrained__cached_weights_need_no_network(monkeypatch, tmp_path):
    from vitkernels.models import download

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(download, "_unreachable", lambda _: pytest.fail("it asked for the network"))
    snapshot = tmp_path / "models--timm--mine" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_text("")
    download.check_download("mine", {"hf_hub_id": "timm/mine"})


def test_pretrained__preset_has_none():
    with error("models.download", name="vit_digits"):
        models.create_model("vit_digits", "native", pretrained=True)
