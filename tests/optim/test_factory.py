"""create_optimizer: timm's optimizers, classes by import path, the arguments' precedence, and the kernel's choice."""

import pytest
import timm
import torch
from expecting import error
from torch import nn

from vitkernels.optim import create_optimizer, with_kernel


class DecayingSGD(torch.optim.SGD):
    """An optimizer that is not in the registry of timm."""


def small_vit():
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=2, num_classes=3, pos_embed="none"
    )


def group_summary(optimizer):
    return [
        (group["lr"], group["weight_decay"], group.get("lr_scale"), [tuple(p.shape) for p in group["params"]])
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("layer_decay", [None, 0.7])
def test_timm_optimizer__equals_create_optimizer_v2(layer_decay):
    model = small_vit()
    ours = create_optimizer(model, "adamw", lr=0.01, weight_decay=0.1, layer_decay=layer_decay, kwargs={"eps": 1e-6})
    theirs = timm.optim.create_optimizer_v2(
        model, "adamw", lr=0.01, weight_decay=0.1, layer_decay=layer_decay, eps=1e-6
    )
    assert type(ours) is torch.optim.AdamW
    assert ours.state_dict() == theirs.state_dict()


@pytest.mark.parametrize("separator", ".:")
@pytest.mark.parametrize("layer_decay", [None, 0.7])
def test_import_path__gets_timm_parameter_groups(separator, layer_decay):
    model = small_vit()
    options = {"lr": 0.01, "weight_decay": 0.1, "layer_decay": layer_decay}
    path = f"{__name__}{separator}DecayingSGD"
    ours = create_optimizer(model, path, **options, kwargs={"momentum": 0.5}, defaults={"nesterov": True})
    assert type(ours).__name__ == "DecayingSGD"
    assert (ours.defaults["momentum"], ours.defaults["nesterov"]) == (0.5, True)
    assert group_summary(ours) == group_summary(create_optimizer(model, "sgd", **options))


def test_import_path__lr_of_none_leaves_the_class_default():
    assert create_optimizer(nn.Linear(2, 2), "torch.optim.Adam", lr=None).defaults["lr"] == 1e-3


def test_kwargs__override_defaults():
    defaults = {"momentum": 0.1, "nesterov": False}
    optimizer = create_optimizer(nn.Linear(2, 2), "sgd", lr=0.1, kwargs={"momentum": 0.8}, defaults=defaults)
    assert (optimizer.defaults["momentum"], optimizer.defaults["nesterov"]) == (0.8, False)


def test_lookahead__wraps_the_named_optimizer():
    optimizer = create_optimizer(nn.Linear(2, 2), "lookahead_adamw", lr=0.1)
    assert type(optimizer).__name__ == "Lookahead"


def test_unknown_optimizer__suggests_near_names():
    with error("unknown_name", name="adamww") as caught:
        create_optimizer(nn.Linear(2, 2), "adamww", lr=0.1)
    assert "adamw" in caught.value.fields["near"]
    assert "Did you mean" in str(caught.value) and len(str(caught.value)) < 200  # timm has over a hundred


@pytest.mark.parametrize("path", ["no_such_module:SGD", "torch.optim:NoSuchClass", "torch.nn:Linear", ":SGD", "torch."])
def test_import_path__rejects_objects_that_are_not_optimizer_classes(path):
    with error("optim.import", path=path):
        create_optimizer(nn.Linear(2, 2), path, lr=0.1)


@pytest.mark.parametrize("name", ["sgd", "torch.optim:SGD"])
def test_arguments__rejected_by_the_optimizer(name):
    with error("optim.arguments", name=name, options={"no_such_option": 1}):
        create_optimizer(nn.Linear(2, 2), name, lr=0.1, kwargs={"no_such_option": 1})


@pytest.mark.parametrize("betas", [3, [0.9]])
def test_arguments__of_several_numbers_are_explained(betas):
    with error("optim.arguments") as caught:
        create_optimizer(nn.Linear(2, 2), "adamw", lr=0.1, kwargs={"betas": betas})
    assert "betas must be a list of 2 numbers" in str(caught.value)


def test_arguments__message_names_optimizer_and_value():
    with error("optim.arguments") as caught:
        create_optimizer(nn.Linear(2, 2), "sgd", lr=-1.0)
    assert str(caught.value).startswith("could not build optimizer 'sgd' with lr=-1.0, ")


def test_kernel__falls_back_only_with_auto(caplog):
    linear = nn.Linear(2, 2)
    with caplog.at_level("DEBUG", "vitkernels"):
        assert type(create_optimizer(linear, "adamw", lr=0.1, kernel="auto")) is torch.optim.AdamW
    assert "falling back" in caplog.text
    with error("optim.kernel", kernel="triton"):
        create_optimizer(linear, "adamw", lr=0.1, kernel="triton")
    with error("unknown_name", name="mine"):
        with_kernel(torch.optim.AdamW(linear.parameters()), "mine")


def test_layer_decay__scales_each_block_by_the_power_of_its_distance_from_the_head():
    """A ViT of two blocks has layers 0 (embeddings), 1, 2 and the head: 0.7**3, 0.7**2, 0.7 and 1."""
    model = small_vit()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = create_optimizer(model, "adamw", lr=0.01, weight_decay=0.1, layer_decay=0.7)
    scales = {names[id(p)]: group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    assert scales["patch_embed.proj.weight"] == pytest.approx(0.343)
    assert scales["blocks.0.attn.qkv.weight"] == scales["blocks.0.norm1.bias"] == pytest.approx(0.49)
    assert scales["blocks.1.mlp.fc2.weight"] == pytest.approx(0.7)
    assert scales["head.weight"] == 1.0
    assert scales["norm.weight"] == pytest.approx(0.7)  # timm groups the last norm with the last block
    assert scales.keys() == set(names.values())


def test_kron__matches_timm():
    """Three steps on the same gradients, with the class constructed by hand and timm's groups.

    A layer has a parameter with weight decay and one without. kron compiles its steps for each shape.
    """
    optimizer_class = timm.optim.get_optimizer_class("kron", bind_defaults=False)
    models = []
    for build in (
        lambda model: create_optimizer(model, "kron", lr=0.01, weight_decay=0.1),
        lambda model: optimizer_class(timm.optim.param_groups_weight_decay(model, 0.1), lr=0.01, weight_decay=0.1),
    ):
        torch.manual_seed(0)
        model = nn.Linear(6, 5)
        optimizer = build(model)
        for step in range(3):
            draw = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            torch.manual_seed(step)
            optimizer.step()
        models.append(model)
    ours, theirs = (model.state_dict() for model in models)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_muon__first_step_has_the_orthogonalized_gradient():
    """For a square weight, Newton-Schulz brings the singular values of the step near 1 (Jordan et al. 2024)."""
    layer = nn.Linear(8, 8, bias=False)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    create_optimizer(layer, "muon", lr=0.1, weight_decay=0.0).step()
    step = (before - layer.weight.detach()) / 0.1
    values = torch.linalg.svdvals(step)
    scale = values.mean()
    assert ((values / scale - 1).abs() < 0.5).all()
    assert values.max() / values.min() < torch.linalg.cond(layer.weight.grad) / 2
