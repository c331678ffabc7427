"""Models: timm's architectures, names and numbers, with the kernel swapped."""

import copy
import pickle
from argparse import Namespace
from collections import OrderedDict

import pytest
import timm
import torch
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from timm.utils import CheckpointSaver, ModelEmaV3

from vitkernels import attention, models
from vitkernels.errors import UsageError
from vitkernels.models.attention_layer import BackendAttention

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 5}
# float32 sums in another order than timm's: a few units in the last place of values near 1.
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
def test_same_numbers_as_timm(name):
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
def test_a_model_can_be_copied_and_pickled(copied):
    ops = {"layer_norm_residual": "reference", "mlp": "passes"}
    model = models.set_ops(models.create_model("vit_digits", "native", num_classes=10, depth=2), ops)
    again, images = copied(model), torch.randn(2, 1, 16, 16)
    assert torch.equal(again(images), model(images))
    first, second = (block.attn for block in again.blocks)
    assert type(first) is type(second) and first.qkv.weight is not model.blocks[0].attn.qkv.weight
    assert models.set_attention(again, "sdpa") and torch.allclose(again(images), model(images), atol=1e-5)


def test_gated_attention_is_timms():
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
def test_masks_mean_what_they_mean_in_timm(kind):
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
def test_state_dicts_travel_both_ways(name):
    ours = models.create_model(name, "sdpa", num_classes=10)
    plain = timm.create_model(name, num_classes=10)
    assert list(ours.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(ours.state_dict())
    models.load_weights(ours, plain.state_dict(), "timm")


@pytest.mark.parametrize("attn", [name for name in attention.names() if name != "auto"])
def test_every_backend_builds_with_the_same_parameters(attn):
    model = models.create_model("vit_digits", attn, num_classes=10)
    assert list(model.state_dict()) == list(models.create_model("vit_digits", "native", num_classes=10).state_dict())
    assert {type(b.attn).backend.name for b in model.blocks} == {attn}


def test_set_attention_keeps_the_parameters():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3).eval()
    x, before = torch.randn(1, 3, 224, 224), {k: v.data_ptr() for k, v in model.state_dict().items()}
    expected = model(x)
    assert models.set_attention(model, "native") is model
    torch.testing.assert_close(model(x), expected, **TOLERANCE)
    assert {k: v.data_ptr() for k, v in model.state_dict().items()} == before
    models.set_attention(model, "sdpa")
    assert all(type(b.attn).backend.name == "sdpa" and not b.attn.training for b in model.blocks)
    with pytest.raises(UsageError, match="no timm"):
        models.set_attention(torch.nn.Linear(2, 2), "sdpa")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_base_patch16_223", "Did you mean 'vit_base_patch16_224'"),
        ("resnet50", "cannot take an attention backend"),
        ("vit_dlittle_patch16_reg1_gap_256", "DiffAttention"),
        ("eva02_tiny_patch14_224", "EvaAttention"),
        ("beit_base_patch16_224", "timm.models.beit.Attention"),
    ],
)
def test_models_that_cannot_be_built_say_why(name, message):
    with pytest.raises(UsageError, match=message):
        models.create_model(name, "native")


def test_auto_compiles_whole_and_says_what_it_chose(caplog):
    model, images = models.create_model("vit_digits", num_classes=5, depth=1), torch.randn(2, 1, 16, 16)
    with caplog.at_level("INFO"):
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(images)
    assert "attn=auto chose sdpa for a compiled graph" in caplog.text
    torch.testing.assert_close(found, model(images), **TOLERANCE)


def test_unknown_keyword_and_backend():
    with pytest.raises(UsageError, match="nonsense"):
        models.create_model("vit_digits", "native", nonsense=1)
    with pytest.raises(UsageError, match=r"'embed_dim': 97.* cannot be built by timm: dim should be divisible"):
        models.create_model("vit_digits", "native", embed_dim=97)
    with pytest.raises(UsageError, match=r"unknown attention backend 'nosuch'; known: .*native"):
        models.create_model("vit_digits", "nosuch")


def test_flops_are_three_forwards_but_for_the_images():
    def build(backend):
        return models.create_model("vit_b16_256", backend, num_classes=1000)

    facts = models.inspect_model(
        build, image_size=256, in_chans=3, batch_size=128, dtype=torch.bfloat16, device_type="cuda"
    )
    n, dim = 256, 768
    block = 2 * n * 12 * dim * dim + 4 * n * n * dim
    patches = 2 * n * 3 * 16 * 16 * dim
    # Images need no gradient: the patch embedding has one product in the backward and not two.
    assert facts.train_flops_per_image == 3 * (12 * block + 2 * dim * 1000) + 2 * patches
    (problem,) = facts.attention
    assert (problem.batch, problem.heads, problem.q_tokens, problem.head_dim) == (128, 12, 256, 64)
    assert problem.dtype == torch.bfloat16 and problem.device_type == "cuda"
    assert facts.parameters == sum(p.numel() for p in build("native").parameters())


def test_dropout_reaches_the_backend_in_training_only():
    seen = []

    class Spy(type(attention.get("native"))):
        def refusal(self, problem):
            seen.append(problem.dropout_p)

    layer = models.attention_layer(Spy())(64, num_heads=2, attn_drop=0.25)
    layer(torch.randn(1, 4, 64))
    layer.eval()(torch.randn(1, 4, 64))
    assert seen == [0.25, 0.0]
    assert issubclass(type(layer), BackendAttention)


def test_weights_files(tmp_path):
    from safetensors.torch import save_file

    model = models.create_model("vit_digits", "native", num_classes=10)
    torch.save({"model": model.state_dict(), "ema": None}, tmp_path / "a.pt")
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    for name in ("a.pt", "a.safetensors"):
        models.load_weights(model, models.read_state_dict(tmp_path / name), name)
    (tmp_path / "b.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:5000])
    for name, message in (("b.pt", "cannot be read"), ("none.pt", "no such file")):
        with pytest.raises(UsageError, match=message):
            models.read_state_dict(tmp_path / name)
    other = models.create_model("vit_digits", "native", num_classes=7)
    with pytest.raises(UsageError, match=r"another model.*head\.weight"):
        models.load_weights(other, model.state_dict(), "x")


def test_what_timm_saved_while_it_trained_is_read_its_ema_first(tmp_path, caplog):
    model, average = tiny(), tiny()
    (tmp_path / "recovery").mkdir()
    saver = CheckpointSaver(
        torch.nn.Sequential(OrderedDict(module=model)),
        torch.optim.SGD(model.parameters(), lr=0.1),
        args=Namespace(model="vit", lr=0.1),
        model_ema=ModelEmaV3(average),
        checkpoint_dir=str(tmp_path),
    )
    saver.unwrap_fn = lambda wrapped: wrapped
    saver.save_checkpoint(epoch=0, metric=50.0)
    with caplog.at_level("INFO", "vitkernels"):
        weights = models.read_state_dict(tmp_path / "last.pth.tar")
    assert "the EMA (state_dict_ema)" in caplog.text
    assert weights.keys() == model.state_dict().keys()  # without the wrapper's prefix
    assert torch.equal(weights["blocks.0.attn.qkv.weight"], average.blocks[0].attn.qkv.weight)


def tiny(**kwargs):
    sizes = {"img_size": 16, "embed_dim": 48, "depth": 1, "num_heads": 3, **kwargs}
    return models.create_model("vit_tiny_patch16_224", "native", **{"patch_size": 8, "num_classes": 3, **sizes})


def test_weights_go_on_with_other_classes_and_other_images(caplog):
    there, here = tiny(), tiny(num_classes=5, img_size=32)
    one_for_all_patches = torch.randn(48)
    there.pos_embed.data[:, 1:] = one_for_all_patches
    weights = there.state_dict()
    with caplog.at_level("INFO", "vitkernels"):
        models.load_weights(here, models.fitted(weights, here, new_classes=False), "there")
    assert "pos_embed is resampled: 5 tokens there, 17 here" in caplog.text
    assert "the head begins anew" in caplog.text
    assert torch.equal(here.blocks[0].attn.qkv.weight, there.blocks[0].attn.qkv.weight)
    assert torch.equal(here.pos_embed[:, :1], there.pos_embed[:, :1])  # of the class token
    # What is everywhere the same stays so, to float32's rounding of bicubic weights that add up to 1.
    torch.testing.assert_close(here.pos_embed[0, 1:], one_for_all_patches.expand(16, -1))


def test_weights_of_another_image_size_are_told_as_that():
    with pytest.raises(UsageError, match=r"pos_embed \(1, 17, 48\), the model has \(1, 5, 48\); .*model\.img_size"):
        models.load_weights(tiny(), tiny(img_size=32).state_dict(), "there")


def test_a_head_of_as_many_other_classes_begins_anew_and_one_of_the_same_stays():
    there, here = tiny(), tiny()
    weights = there.state_dict()
    own = here.head.weight.detach().clone()
    assert torch.equal(models.fitted(weights, here, new_classes=True)["head.weight"], own)
    assert torch.equal(models.fitted(weights, here, new_classes=False)["head.weight"], there.head.weight)


def test_weights_without_a_head_go_on_with_a_new_one(caplog):
    here, headless = tiny(), tiny(num_classes=0)
    with caplog.at_level("INFO", "vitkernels"):
        models.load_weights(here, models.fitted(headless.state_dict(), here, new_classes=False), "there")
    assert "the weights have none" in caplog.text
    assert torch.equal(here.patch_embed.proj.weight, headless.patch_embed.proj.weight)


def test_weights_of_another_width_are_still_another_model_s():
    there, here = tiny(), tiny(embed_dim=24)
    with pytest.raises(UsageError, match=r"belongs to another model: of another shape: \S*(?!.*model\.img_size)"):
        models.load_weights(here, models.fitted(there.state_dict(), here, new_classes=False), "there")


def test_images_that_do_not_fit_the_patches_are_an_error_before_training():
    create = lambda attn: tiny(img_size=20, dynamic_img_size=True)  # noqa: E731
    with pytest.raises(UsageError, match=r"cannot take images of 20 px: .*divisible by patch size"):
        models.inspect_model(create, image_size=20, in_chans=3, batch_size=1, dtype=torch.float32, device_type="cpu")


def test_an_unknown_tag_is_an_error_of_one_line():
    with pytest.raises(UsageError, match="nosuch"):
        models.input_spec("vit_tiny_patch16_224.nosuch")


def test_pretrained_weights_that_cannot_be_fetched_name_the_way_around(monkeypatch):
    def offline(*_, **__):
        raise OSError("no network\nand more")

    monkeypatch.setattr("timm.create_model", offline)
    with pytest.raises(UsageError, match=r"cannot be fetched: no network\. .*checkpoint=PATH"):
        models.timm_model("vit_tiny_patch16_224", pretrained=True)
