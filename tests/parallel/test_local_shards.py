"""FSDP's optimizer step and gradient norm on parts of parameters: those of a plain model, whatever the parts."""

import copy
from functools import partial

import pytest
import torch
from ranks import Ranks
from timm.optim import create_optimizer_v2
from torch import nn
from torch.distributed.tensor import DTensor

from vitkernels.parallel.base import Parallel
from vitkernels.parallel.local_shards import ELEMENTWISE
from vitkernels.parallel.processes import Fsdp
from vitkernels.runtime.base import Runtime


class Tiny(nn.Module):
    """Shared by 4, the first has all of `token`, the last nothing of `body` and one of the ten rows of `head`."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 5))
        self.body = nn.Linear(5, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 10)
        self.norm.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.norm(self.body(x + self.token)))


def train_beside_a_plain_model(names):
    """Sums over processes are taken in another order: 1e-7, which Adam makes more of where a gradient is near zero."""
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)  # a step moves a weight by 1e-2
    runtime = Runtime()
    with Fsdp(runtime, lost_after=30.0) as engine:
        for name in names:
            torch.manual_seed(0)
            plain = Tiny()
            shared = copy.deepcopy(plain)
            net = engine.wrap(shared)
            models, engines = (plain, shared), (Parallel(runtime), engine)
            optimizers = [create_optimizer_v2(model, name, lr=0.01, weight_decay=0.1) for model in models]
            engine.prepare(optimizers[1])
            for step in range(3):
                images, targets = torch.randn(4 * engine.world, 5), torch.randint(10, (4 * engine.world,))
                own = slice(4 * engine.rank, 4 * engine.rank + 4)
                nn.functional.cross_entropy(plain(images), targets).backward()
                nn.functional.cross_entropy(net(images[own]), targets[own]).backward()
                norms = []
                for model, one, optimizer in zip(models, engines, optimizers, strict=True):
                    norms.append(one.clip_gradients(list(model.parameters()), 0.2).item())
                    optimizer.step()
                    optimizer.zero_grad()
                assert norms[0] > 0.2 and norms[1] == pytest.approx(norms[0], rel=1e-4), (name, step)
                assert engine.gather(norms[1]) == [norms[1]] * engine.world, "the same to the last bit"
                of_plain, of_shared = dict(plain.named_parameters()), dict(shared.named_parameters())
                for parameter, expected in of_plain.items():
                    whole = of_shared[parameter]
                    assert isinstance(whole, DTensor) and whole._local_tensor.grad is None
                    close(engine.full(whole), expected)
                    for entry, value in optimizers[0].state[expected].items():
                        found = optimizers[1].state[whole][entry]
                        assert isinstance(found, DTensor) == (getattr(value, "shape", ()) == expected.shape), entry
                        close(engine.full(found), value)


@pytest.mark.parametrize("world", [2, 4])
def test_a_step_on_parts_is_that_of_a_plain_model(tmp_path, world):
    names = {2: ["adamw", "lamb"], 4: ["adamw", "sgd", "nadam", "lamb"]}[world]
    ranks = Ranks.of(world, tmp_path / "log", train_beside_a_plain_model, names)
    assert ranks.finish() == [0] * world, ranks.said()


def test_only_optimizers_that_treat_each_element_alone_step_on_parts():
    """A step on a whole parameter, and one on parts of it, are the same for these; for others they are not."""
    numbers = torch.Generator().manual_seed(0)
    weights, gradients = torch.randn(4, 5, generator=numbers), torch.randn(3, 4, 5, generator=numbers)

    def stepped(name, parts):
        parameters = [nn.Parameter(weights[rows].clone()) for rows in parts]
        optimizer = create_optimizer_v2(parameters, name, lr=0.1, weight_decay=0.1)
        for gradient in gradients:
            for parameter, rows in zip(parameters, parts, strict=True):
                parameter.grad = gradient[rows].clone()
            optimizer.step()
        return torch.cat([parameter.detach() for parameter in parameters]), type(optimizer)

    elementwise = set()
    for name in ("sgd", "adam", "adamw", "nadam", "radam", "adamax", "rmsprop", "adagrad", "adadelta", "momentum"):
        (whole, kind), (of_parts, _) = stepped(name, [slice(0, 4)]), stepped(name, [slice(0, 3), slice(3, 4)])
        torch.testing.assert_close(of_parts, whole, rtol=1e-6, atol=0, msg=name)
        elementwise.add(kind)
    assert elementwise == ELEMENTWISE
    for name in ("lamb", "lars", "muon"):
        (whole, kind), (of_parts, _) = stepped(name, [slice(0, 4)]), stepped(name, [slice(0, 3), slice(3, 4)])
        assert kind not in ELEMENTWISE and not torch.allclose(of_parts, whole, rtol=1e-5), name
