"""Integration with other libraries: transformers' AttentionInterface, open_clip's towers and timm's attn_layer."""

import copy

import pytest
import timm
import torch
from expecting import error

from vitkernels import attention, models

# Sums in another order, in float32, through two layers.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
PIXELS = {"image_size": 32, "patch_size": 8}


@pytest.fixture(scope="module")
def transformers():
    found = pytest.importorskip("transformers")
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    found.AttentionInterface.register("vitkernels", models.transformers_attention("native"))
    AttentionMaskInterface.register("vitkernels", sdpa_mask)
    return found


def towers(transformers):
    t = transformers
    images = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))}
    words = {
        "input_ids": torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    }
    text = {**SIZES, "vocab_size": 20, "max_position_embeddings": 8}
    return {
        "vit": (t.ViTModel, t.ViTConfig(**SIZES, **PIXELS), images),
        "dinov2": (t.Dinov2Model, t.Dinov2Config(**SIZES, **PIXELS), images),
        "siglip": (t.SiglipVisionModel, t.SiglipVisionConfig(**SIZES, **PIXELS), images),
        "siglip text": (t.SiglipTextModel, t.SiglipTextConfig(**text), words),
        "clip text": (t.CLIPTextModel, t.CLIPTextConfig(**text, bos_token_id=1, eos_token_id=2, pad_token_id=0), words),
    }


@pytest.mark.slow  # importing transformers takes seconds
@pytest.mark.parametrize("tower", ["vit", "dinov2", "siglip", "siglip text", "clip text"])
def test_transformers__outputs_and_gradients_match_its_sdpa(transformers, tower):
    kind, config, inputs = towers(transformers)[tower]
    results = []
    for implementation in ("eager", "vitkernels"):
        torch.manual_seed(0)
        config = copy.deepcopy(config)
        config._attn_implementation = implementation
        model = kind(config).eval()
        out = model(**inputs).last_hidden_state
        out.square().sum().backward()
        results.append((out, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (want, want_gradients), (found, gradients) = results
    torch.testing.assert_close(found, want, **TOLERANCE)
    for name, gradient in want_gradients.items():  # a key's bias has no gradient, up to rounding
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
def test_transformers__runs_the_named_backend(transformers):
    backend, calls = attention.get("native"), []

    class Spy(type(backend)):
        def refusal(self, problem):
            calls.append(problem)

    transformers.AttentionInterface.register("vitkernels_spy", models.transformers_attention(Spy()))
    config = transformers.ViTConfig(**SIZES, **PIXELS, attn_implementation="vitkernels_spy")
    transformers.ViTModel(config)(torch.randn(1, 3, 32, 32))
    assert calls and (calls[0].heads, calls[0].q_tokens, calls[0].head_dim) == (2, 17, 16)


def test_transformers_attention__refuses_unsupported_arguments():
    attend = models.transformers_attention("native")
    q = torch.randn(1, 2, 3, 16)
    with error("models.transformers_argument", argument="softcap"):
        attend(torch.nn.Identity(), q, q, q, softcap=30.0)
    with error("models.attn_type"):
        models.transformers_attention(None)


def test_open_clip__own_towers_keep_their_outputs_and_gradients():
    open_clip = pytest.importorskip("open_clip")
    torch.manual_seed(0)
    plain = open_clip.model.CLIP(
        embed_dim=16,
        vision_cfg={"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 32},
        text_cfg={"context_length": 8, "vocab_size": 20, "width": 32, "heads": 2, "layers": 2},
    ).eval()
    ours = models.set_attention(copy.deepcopy(plain), "native")
    assert models.attention_plan(ours).count == 4 and list(ours.state_dict()) == list(plain.state_dict())
    images, words = torch.randn(2, 3, 32, 32), torch.randint(1, 20, (2, 8))
    features = []
    for model in (plain, ours):
        image, text, _ = model(images, words)
        (image @ text.T).square().sum().backward()
        features.append((image, text, model.visual.conv1.weight.grad, model.token_embedding.weight.grad))
    for want, found in zip(*features, strict=True):
        torch.testing.assert_close(found, want, **TOLERANCE)


def test_attn_layer__accepts_a_name_or_a_class():
    from timm.models import vision_transformer

    layer = models.attention_layer(attention.get("native"))
    vision_transformer.ATTN_LAYERS["vitkernels"] = layer
    try:
        kwargs = {"img_size": 32, "depth": 1, "num_classes": 3}
        for attn_layer in ("vitkernels", layer):
            model = timm.create_model("vit_tiny_patch16_224", attn_layer=attn_layer, **kwargs)
            assert type(model.blocks[0].attn) is layer
    finally:
        del vision_transformer.ATTN_LAYERS["vitkernels"]
