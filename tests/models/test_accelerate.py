"""`accelerate` swaps attention and fused ops of stock timm models and of the models that contain them."""

import logging
import runpy

import pytest
import timm
import torch
from expecting import error
from timm.layers import Attention
from torch import nn

from vitkernels.models import MODEL_OPS, accelerate
from vitkernels.models.backend_attention import BackendAttention
from vitkernels.models.fused_modules import FusedBlock, FusedLinear, FusedPatchConv

# Sums in another order, in float32, through two blocks; logits are of order 1.
TOLERANCE = 1e-5


def small(name: str = "vit_tiny_patch16_224", **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, img_size=32, depth=2, num_classes=10, **kwargs)


def images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "deit_tiny_distilled_patch16_224",
        "deit3_small_patch16_224",
        "vit_small_patch14_reg4_dinov2",
        "vit_base_patch16_siglip_224",
        "vit_base_patch16_siglip_gap_224",
    ],
)
@pytest.mark.parametrize("ops", ["auto", "eager", dict.fromkeys(MODEL_OPS, "reference")], ids=str)
def test_accelerate__keeps_outputs_gradients_and_keys(name, ops):
    size = 28 if "patch14" in name else 32
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=size, depth=2, num_classes=10).eval()
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    expected = model(x)
    (gradient,) = torch.autograd.grad(expected.square().sum(), model.patch_embed.proj.weight)
    keys, parameters = list(model.state_dict()), list(model.parameters())

    assert accelerate(model, "native", ops) is model

    logits = model(x)
    (found,) = torch.autograd.grad(logits.square().sum(), model.patch_embed.proj.weight)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    torch.testing.assert_close(logits, expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=TOLERANCE * gradient.abs().max().item())


def test_accelerate__swaps_every_standard_attention():
    model = accelerate(small(), "sdpa")
    kinds = [type(m) for m in model.modules() if isinstance(m, Attention)]
    assert len(kinds) == 2
    assert all(issubclass(kind, BackendAttention) for kind in kinds)


def test_accelerate__fuses_for_the_device_on_which_the_model_will_run():
    model = accelerate(small(), device="cuda")
    counts = [sum(isinstance(m, kind) for m in model.modules()) for kind in (FusedBlock, FusedLinear, FusedPatchConv)]
    assert counts == [2, 4, 1]


def test_accelerate__can_be_repeated_with_another_choice():
    model = small().eval()
    expected = model(images())
    accelerate(model, "native", device="cuda")
    accelerate(model, "sdpa", "eager")
    assert not any(isinstance(m, FusedBlock | FusedLinear | FusedPatchConv) for m in model.modules())
    torch.testing.assert_close(model(images()), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_accelerate__finds_the_vit_inside_another_module():
    wrapper = nn.Sequential(nn.Identity(), small())
    keys = list(wrapper.state_dict())
    accelerate(wrapper, "sdpa", device="cuda")
    assert list(wrapper.state_dict()) == keys
    assert sum(isinstance(m, FusedBlock) for m in wrapper.modules()) == 2


def test_accelerate__logs_swaps_and_the_reasons_for_the_rest(caplog):
    with caplog.at_level(logging.INFO, "vitkernels"):
        accelerate(small("vit_base_patch16_siglip_224"), "sdpa", device="cpu")
    reason, line = caplog.messages
    assert "no kernel for cpu" in reason and all(name in reason for name in MODEL_OPS)
    assert "attention sdpa in 3 layers; fused ops: none" in line


def test_accelerate__refuses_models_without_timm_attention():
    with error("models.attention", model="Linear"):
        accelerate(nn.Linear(2, 2))


def test_accelerate__refuses_unknown_choices_of_ops():
    with error("models.ops_choice", ops="fast"):
        accelerate(small(), ops="fast")
    with error("unknown_name"):
        accelerate(small(), "fast")


def test_accelerate__reaches_a_script_that_imports_timms_create_model(tmp_path, monkeypatch):
    """The lines that docs/howto/your_training_loop.md shows for timm's train.py, which imports create_model by name."""
    (tmp_path / "train.py").write_text(
        "from timm.models import create_model\n"
        "model = create_model('vit_tiny_patch16_224', img_size=32, depth=2, num_classes=10)\n"
    )
    create_model = timm.models.create_model
    monkeypatch.setattr(timm.models, "create_model", lambda *a, **k: accelerate(create_model(*a, **k), "sdpa"))
    model = runpy.run_path(str(tmp_path / "train.py"))["model"]
    assert all(isinstance(block.attn, BackendAttention) for block in model.blocks)
