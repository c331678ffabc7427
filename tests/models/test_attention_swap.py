"""set_attention: refused arguments, partly supported models, shared modules, tracing, MultiheadAttention."""

import copy
import pickle

import pytest
import timm
import torch
from expecting import error
from timm import layers
from timm.models._features_fx import create_feature_extractor
from torch import nn

from vitkernels import attention, models
from vitkernels.attention.native import Native
from vitkernels.models.backend_attention import BackendAttention


class Counting(Native):
    name = "counting"
    calls = 0

    def run(self, *args, **keywords):
        self.calls += 1
        return super().run(*args, **keywords)


def tiny(name: str = "vit_tiny_patch16_224", **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **{"img_size": 32, "depth": 2, "num_classes": 3, **kwargs}).eval()


@pytest.mark.parametrize("model", [None, 3, "sdpa", nn.Linear], ids=["None", "number", "swapped", "class"])
def test_set_attention__refuses_arguments_that_are_not_models(model):
    with error("models.model_type", model=model) as caught:
        models.set_attention(model, tiny() if model == "sdpa" else "sdpa")
    if model == "sdpa":
        assert "set_attention(model, 'sdpa')" in str(caught.value)


@pytest.mark.parametrize("attn", [None, 3, Native], ids=["None", "number", "class"])
def test_set_attention__refuses_arguments_that_are_not_backends(attn):
    with error("models.attn_type", attn=attn):
        models.set_attention(tiny(), attn)
    with error("models.attn_type", attn=attn):
        models.create_model("vit_digits", attn)


def test_attention_layer__takes_a_backend_or_its_name():
    assert models.attention_layer("sdpa") is models.attention_layer(attention.get("sdpa"))
    with error("models.attn_type", attn=None):
        models.attention_layer(None)
    with error("models.model_type", model=None):
        models.attention_plan(None)


def test_set_attention__refuses_unknown_backends_and_leaves_the_model_unchanged():
    model = tiny()
    with error("unknown_name", name="flash"):
        models.set_attention(model, "flash")
    with error("models.attention", model="Linear"):
        models.set_attention(nn.Linear(2, 2), "sdpa")
    assert not any(isinstance(module, BackendAttention) for module in model.modules())


def test_set_attention__refuses_a_backend_that_cannot_run_here(monkeypatch):
    backend = attention.get("pallas_flash")
    monkeypatch.setattr(type(backend), "unavailable", lambda self: "jax is not installed")
    for build in (
        lambda: models.set_attention(tiny(), "pallas_flash"),
        lambda: models.create_model("vit_digits", backend),
    ):
        with error("registry.unavailable", backend="pallas_flash", reason="jax is not installed"):
            build()


def test_set_attention__warns_about_unsupported_modules(caplog):
    model = tiny("cait_xxs24_224")
    models.set_attention(model, "native")
    assert "computes 2 of 4 attention layers" in caplog.text
    plan = models.attention_plan(model)
    assert plan.count == 2
    assert {kind for kind, _ in plan.unsupported.values()} == {"timm.models.cait.TalkingHeadAttn"}
    assert all("mixes the heads" in reason for _, reason in plan.unsupported.values())
    caplog.clear()
    models.create_model("cait_xxs24_224", "native", img_size=32, depth=1)
    assert "computes 2 of 3 attention layers" in caplog.text
    caplog.clear()
    models.set_attention(tiny("crossvit_9_240", img_size=48, depth=((1, 1, 0),)), "native")
    assert not caplog.text


def test_set_attention__names_unknown_attention_classes():
    class MyAttention(nn.Linear):
        pass

    model = nn.Sequential(tiny(), MyAttention(3, 3))
    (entry,) = models.attention_plan(model).unsupported.values()
    assert "MyAttention" in entry[0] and "no adapter" in entry[1]


def test_set_attention__keeps_shared_modules_shared():
    model = tiny()
    model.blocks[1].attn = model.blocks[0].attn
    models.set_attention(model, "native")
    assert model.blocks[1].attn is model.blocks[0].attn and isinstance(model.blocks[0].attn, BackendAttention)
    assert models.attention_plan(model).count == 1


SWIN = {"img_size": 32, "embed_dim": 16, "depths": (2, 1), "num_heads": (1, 2), "window_size": 4}


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("swin_tiny_patch4_window7_224", SWIN), ("vit_small_patch16_dinov3", {"img_size": 32, "depth": 1})],
)
def test_swapped_classes__survive_copies_and_pickle(name, kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **kwargs).eval()
    models.set_attention(model, "native")
    x = torch.randn(1, 3, 32, 32)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(x), model(x))
        models.set_attention(again, "sdpa")  # a swapped module can be swapped again
        torch.testing.assert_close(again(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "eva02_base_patch14_224"])
def test_rotary_models__hand_over_the_packed_projection(name):
    """Also with separate projections (EVA-02); rotation and attention then need no copies of q, k and v."""
    calls = []

    class Rotating(Native):
        name = "rotating"
        rotates_on = ("cpu",)

        def run_qkvpacked(self, qkv_BN3HD, *, rope, rope_half, **keywords):
            calls.append((qkv_BN3HD, rope))
            return super().run_qkvpacked(qkv_BN3HD, **keywords)

    model = models.set_attention(tiny(name, img_size=28 if "eva" in name else 32), Rotating())
    model(torch.randn(2, 3, *[28 if "eva" in name else 32] * 2))
    assert len(calls) == 2
    assert all(qkv.is_contiguous() and rope.shape == (4, 2 * qkv.shape[-1]) for qkv, rope in calls)


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "vit_relpos_small_patch16_224"])
def test_relative_positions__have_autocasts_dtype(name):
    """PyTorch's SDPA casts them in the same way. Their tables get gradients in float32."""
    found = []

    class Recording(Native):
        name = "recording"

        def run(self, *qkv, bias, **keywords):
            found.append(bias.dtype)
            return super().run(*qkv, bias=bias, **keywords)

    model = models.set_attention(tiny(name), Recording())
    model(torch.randn(2, 3, 32, 32))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randn(2, 3, 32, 32))
    out.sum().backward()
    assert found == 2 * [torch.float32] + 2 * [torch.bfloat16]
    tables = [x for n, x in model.named_parameters() if "rel_pos" in n or "relative_position" in n]
    assert tables and all(x.grad is not None and x.grad.dtype == torch.float32 for x in tables)


def test_timm_feature_extraction__traces_a_swapped_model():
    model, x = models.set_attention(tiny(), "native"), torch.randn(2, 3, 32, 32)
    features = create_feature_extractor(model, {"blocks.0.attn": "attn", "head": "logits"})(x)
    torch.testing.assert_close(features["logits"], model(x))
    assert features["attn"].shape == (2, 5, 192)


@pytest.mark.parametrize("backend", ["auto", "native", "sdpa"])
def test_torchscript__runs_timms_own_attention(backend):
    model, x = models.set_attention(tiny(), backend), torch.randn(2, 3, 32, 32)
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x), model(x), rtol=1e-4, atol=1e-5)
    models.set_attention(model, backend)  # torch.jit.script left timm's modules in it
    assert isinstance(model.blocks[0].attn, BackendAttention)


def test_torchscript__is_refused_for_kernels_of_our_own():
    model = models.set_attention(tiny(), "triton_flash")
    with error("models.torchscript", backend="triton_flash"):
        torch.jit.script(model)


MASKS = {
    "none": {},
    "boolean": {"attn_mask": torch.ones(6, 6, dtype=torch.bool).triu(1)},
    "additive": {"attn_mask": torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).double()},
    "padding": {"key_padding_mask": torch.tensor([[False] * 6, [False] * 4 + [True] * 2])},
    "both": {
        "attn_mask": torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).double(),
        "key_padding_mask": torch.tensor([[False] * 6, [False] * 4 + [True] * 2]),
    },
}


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # torch's own, of masks of two dtypes
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", MASKS)
def test_multihead_attention__matches_torch(masks, batch_first):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.MultiheadAttention(32, 4, batch_first=batch_first)).double()
    ours = models.set_attention(copy.deepcopy(plain), "native")
    x = torch.randn(2, 6, 32, dtype=torch.float64) if batch_first else torch.randn(6, 2, 32, dtype=torch.float64)
    (want, _), (found, weights) = (m[0](x, x, x, need_weights=False, **MASKS[masks]) for m in (plain, ours))
    torch.testing.assert_close(found, want)
    assert weights is None and list(ours.state_dict()) == list(plain.state_dict())


def test_multihead_attention__matches_torch_for_other_widths_and_without_a_batch():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.MultiheadAttention(32, 4, kdim=24, vdim=16)).double()
    ours = models.set_attention(copy.deepcopy(plain), "native")
    q, k, v = (torch.randn(n, width, dtype=torch.float64) for n, width in ((5, 32), (7, 24), (7, 16)))
    torch.testing.assert_close(ours[0](q, k, v, need_weights=False)[0], plain[0](q, k, v, need_weights=False)[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # from torch's own encoder
@pytest.mark.parametrize("is_padded", [False, True])
def test_transformer_encoder__runs_the_backend_in_evaluation(is_padded):
    """torch's encoder has a fast path for evaluation, which would read the projections and skip the module."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval()
    x, padding = torch.randn(2, 7, 32), torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 4:] = is_padded
    keywords = {"src_key_padding_mask": padding} if is_padded else {}
    kept = ~padding
    with torch.no_grad():
        expected = encoder(x, **keywords)
        models.set_attention(encoder, Counting())
        found = encoder(x, **keywords)
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-5, atol=1e-6)
    assert encoder.layers[0].self_attn.backend.calls == 2


def test_multihead_attention__refuses_causality_without_a_mask_as_torch_does():
    plain, x = nn.Sequential(nn.MultiheadAttention(32, 4)), torch.randn(5, 32)
    with pytest.raises(RuntimeError, match="is_causal"):
        plain[0](x, x, x, need_weights=False, is_causal=True)
    with error("models.causal_hint", backend="native"):
        models.set_attention(plain, "native")[0](x, x, x, need_weights=False, is_causal=True)


def test_multihead_attention__refuses_to_return_weights():
    model = models.set_attention(nn.Sequential(nn.MultiheadAttention(32, 4)), "native")
    x = torch.randn(5, 32)
    with error("models.need_weights", backend="native"):
        model[0](x, x, x)
    added = nn.Sequential(nn.MultiheadAttention(32, 4, add_zero_attn=True))
    with error("models.attention"):
        models.set_attention(added, "native")


LAYERS = {
    "AttentionPool2d": lambda: layers.AttentionPool2d(32, feat_size=6, num_heads=2, out_features=8),
    "AttentionPool2d, separate": lambda: layers.AttentionPool2d(32, feat_size=6, num_heads=2, qkv_separate=True),
    "RotAttentionPool2d": lambda: layers.RotAttentionPool2d(32, ref_feat_size=6, num_heads=2, class_token=True),
    "Attention2d": lambda: layers.Attention2d(32, num_heads=2),
    "Attention2d, head first": lambda: layers.Attention2d(32, num_heads=2, head_first=True),
    "MultiQueryAttention2d": lambda: layers.MultiQueryAttention2d(32, num_heads=2, key_dim=16, value_dim=24),
    "MultiQueryAttention2d, strides": lambda: layers.MultiQueryAttention2d(
        32, num_heads=2, query_strides=2, kv_stride=2
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_feature_map_attention__matches_timm(name):
    """timm's layers that its convolutional models use."""
    torch.manual_seed(0)
    plain = nn.Sequential(LAYERS[name]()).double().eval()
    ours = models.set_attention(copy.deepcopy(plain), "native")
    x = torch.randn(2, 32, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(ours(x), plain(x))
    assert list(ours.state_dict()) == list(plain.state_dict())
