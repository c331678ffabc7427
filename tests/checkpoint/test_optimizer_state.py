"""An optimizer resumes from a checkpoint exactly, whatever it keeps in its state."""

import json

import pytest
import torch
from expecting import error
from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn

from vitkernels.checkpoint import checkpoints as ckpt
from vitkernels.checkpoint import optimizer_state

ELSEWHERE = ("bnb", "fused")  # prefixes of optimizers that need a GPU or further packages


def make(opt):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 5))
    return model, create_optimizer_v2(model, opt=opt, lr=0.01, weight_decay=0.05)


def train(model, optimizer, steps):
    for number in steps:
        torch.manual_seed(number)  # some optimizers draw random numbers
        optimizer.zero_grad()
        model(torch.randn(2, 3, 2, 2)).square().sum().backward()
        optimizer.step()


def through_a_checkpoint(folder, model, optimizer, other_model, other_optimizer):
    tensors, rest = optimizer_state.pack(optimizer, model)
    store = ckpt.Checkpoints(folder)
    path = store.save(ckpt.prefixed("optimizer", tensors) | ckpt.prefixed("model", model.state_dict()), {"o": rest}, 1)
    store.wait()
    other_model.load_state_dict(ckpt.load_tensors(path, "model"))
    optimizer_state.load(other_optimizer, other_model, path, ckpt.load_state(path)["o"])


@pytest.mark.filterwarnings("ignore")  # deprecations of timm's and torch's optimizers
@pytest.mark.parametrize("opt", [o for o in list_optimizers() if not o.startswith(ELSEWHERE) and o != "adahessian"])
def test_timm_optimizer__resumes_bit_for_bit(tmp_path, opt):
    with torch.compiler.set_stance("force_eager"):  # Kron would compile
        model, optimizer = make(opt)
        optimizer_state.check(optimizer, opt)
        train(model, optimizer, range(3))
        resumed, its_optimizer = make(opt)
        through_a_checkpoint(tmp_path, model, optimizer, resumed, its_optimizer)
        train(model, optimizer, range(3, 6))
        train(resumed, its_optimizer, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


class Hoarder(torch.optim.SGD):
    """Keep any given object in the optimizer state."""

    def __init__(self, params, hoard):
        super().__init__(params)
        self.hoard = hoard

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["hoard"] = self.hoard
        super().step(closure)


def train_once(model, optimizer):
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()


def test_nested_lists_and_tuples__round_trip(tmp_path):
    """Also reads a checkpoint of an older version, which has no "rest"."""
    hoard = [torch.ones(2), (torch.arange(3.0), None, [torch.tensor(4.0), True]), (), 5, 0.1]
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, its_optimizer = Hoarder(model.parameters(), hoard), Hoarder(other.parameters(), [])
    train_once(model, optimizer)
    tensors, rest = optimizer_state.pack(optimizer, model)
    assert sorted(tensors) == [f"{p}/hoard.{i}" for p in ("bias", "weight") for i in ("0", "1.0", "1.2.0")]
    rest = json.loads(json.dumps(rest))
    del rest["rest"]
    optimizer_state.load(its_optimizer, other, tmp_path, rest, lambda *_: dict(tensors))
    torch.testing.assert_close(its_optimizer.state[other.weight]["hoard"], hoard, rtol=0, atol=0)


def test_state_that_cannot_be_saved__is_refused_in_the_first_step():
    model = nn.Linear(3, 2)
    optimizer = Hoarder(model.parameters(), [torch.float16])
    optimizer_state.check(optimizer, "hoarder")
    with error("optimizer.not_savable", name="hoarder") as caught:
        train_once(model, optimizer)
    assert "hoard.0 is of type dtype" in str(caught.value)


@pytest.mark.parametrize("opt", ["adahessian", "lookahead_adahessian"])
def test_second_order_optimizer__is_refused(opt):
    with error("optimizer.second_order", name=opt):
        optimizer_state.check(make(opt)[1], opt)
