"""The fused blocks of EVA, BEiT and Swin: outputs and gradients of timm's blocks, and which ops apply."""

import copy

import pytest
import timm
import torch
from expecting import error
from torch import nn

from vitkernels import models
from vitkernels.models.fused_families import FusedBeitBlock, FusedEvaBlock, FusedSwinBlock
from vitkernels.models.fused_linear import FusedLinear
from vitkernels.ops.swiglu_norm import triton as swiglu_norm_triton

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2, "num_classes": 5}
SWIN = {"img_size": 64, "embed_dim": 16, "depths": (2, 2, 1, 1), "num_heads": (1, 2, 2, 2), "window_size": 4}
FAMILIES = {
    "eva02_base_patch14_224": (FusedEvaBlock, SMALL),  # separate projections, SwiGLU with a norm
    "eva02_tiny_patch14_224": (FusedEvaBlock, SMALL),  # both projections of the SwiGLU in one layer, no norm
    "eva_giant_patch14_224": (FusedEvaBlock, {**SMALL, "embed_dim": 64}),  # packed projection with biases for q and v
    "vit_small_patch16_dinov3": (FusedEvaBlock, SMALL),  # LayerScale, rotary embeddings by halves
    "beit_base_patch16_224": (FusedBeitBlock, SMALL),
    "swin_tiny_patch4_window7_224": (FusedSwinBlock, {**SWIN, "num_classes": 5}),
}
REFERENCE = dict.fromkeys(("layer_norm_residual", "linear"), "reference")


def stock(name: str) -> nn.Module:
    """Return timm's model in float64 with weights that let every sublayer matter."""
    torch.manual_seed(0)
    model = timm.create_model(name, **FAMILIES[name][1])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.double().eval()


def gradients(model: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = model(images)
    logits.square().mean().backward()
    return logits, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_families__outputs_and_gradients_equal_timms(name):
    plain = stock(name)
    kind, kwargs = FAMILIES[name]
    takes_mlp = not name.startswith("eva02")
    fused = models.set_attention(copy.deepcopy(plain), "native")
    models.set_ops(fused, REFERENCE | ({"mlp": "reference"} if takes_mlp else {}))
    images = torch.randn(2, 3, kwargs["img_size"], kwargs["img_size"], dtype=torch.float64)

    (want, want_gradients), (logits, found) = (gradients(model, images) for model in (plain, fused))

    assert list(fused.state_dict()) == list(plain.state_dict())
    assert sum(isinstance(m, kind) for m in fused.modules()) == sum(
        isinstance(m, kind.__bases__[1]) for m in plain.modules()
    )
    # float64 sums in another order.
    torch.testing.assert_close(logits, want, rtol=1e-9, atol=1e-9)
    for key, gradient in want_gradients.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-7, atol=1e-9 * want.abs().max().item(), msg=key)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith("eva02")])
def test_fused_families__run_a_gated_mlp_in_one_pass_between_its_products(name, monkeypatch):
    plain = stock(name).float()
    fused = models.set_ops(copy.deepcopy(plain), {"layer_norm_residual": "triton", "linear": "reference"})
    calls = []
    monkeypatch.setattr(swiglu_norm_triton, "swiglu_norm", counted(swiglu_norm_triton.swiglu_norm, calls))
    images = torch.randn(2, 3, SMALL["img_size"], SMALL["img_size"])

    (want, want_gradients), (logits, found) = (gradients(model, images) for model in (plain, fused))

    assert len(calls) == SMALL["depth"]
    # float32 sums in another order, through two blocks.
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
    for key, gradient in want_gradients.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item(), msg=key)


def counted(function, calls: list):
    """Return the function, which then also appends to `calls`."""

    def counting(*args):
        calls.append(args)
        return function(*args)

    return counting


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_families__drop_path_scales_each_image(name):
    fused = models.set_ops(models.set_attention(stock(name), "native"), {"layer_norm_residual": "reference"})
    for module in fused.modules():
        if isinstance(getattr(module, "drop_path1", None), nn.Identity):
            module.drop_path1 = timm.layers.DropPath(0.999999)  # drops every image
    size = FAMILIES[name][1]["img_size"]
    fused.train()(torch.randn(2, 3, size, size, dtype=torch.float64)).sum().backward()
    parameter = next(p for key, p in fused.named_parameters() if key.endswith("attn.proj.weight"))
    assert parameter.grad is None or not parameter.grad.any()


def test_set_ops__restores_timms_blocks_of_a_family():
    model = models.set_ops(stock("swin_tiny_patch4_window7_224"), REFERENCE)
    assert sum(isinstance(m, FusedLinear) for m in model.modules()) == 12
    models.set_ops(model, {})
    assert not any(isinstance(m, FusedSwinBlock | FusedLinear) for m in model.modules())


def test_set_ops__rounds_the_residual_stream_of_a_family():
    model = models.set_ops(stock("vit_small_patch16_dinov3").float(), REFERENCE, torch.bfloat16)
    dtypes = []
    model.blocks[1].register_forward_hook(lambda module, args, out: dtypes.append((args[0].dtype, out.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(1, 3, 32, 32))
    assert dtypes == [(torch.bfloat16, torch.bfloat16)]


def test_set_ops__swiglu_and_post_norm_blocks_are_refused_by_name():
    with error("models.op_unsupported") as caught:
        models.set_ops(stock("eva02_base_patch14_224"), {**REFERENCE, "mlp": "reference"})
    assert "SwiGLU" in caught.value.fields["reasons"]["mlp"]
    post_norm = timm.create_model("eva02_base_patch14_224", **SMALL, use_post_norm=True)
    with error("models.op_unsupported"):
        models.set_ops(post_norm, REFERENCE)
