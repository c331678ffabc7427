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
def test_import_path__rejects_what_is_not_an_optimizer_class(path):
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
    with caplog.at_level("INFO", "vitkernels"):
        assert type(create_optimizer(linear, "adamw", lr=0.1, kernel="auto")) is torch.optim.AdamW
    assert "falling back" in caplog.text
    with error("optim.kernel", kernel="triton"):
        create_optimizer(linear, "adamw", lr=0.1, kernel="triton")
    with error("unknown_name", name="mine"):
        with_kernel(torch.optim.AdamW(linear.parameters()), "mine")
