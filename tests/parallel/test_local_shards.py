"""FSDP's optimizer step and gradient norm on local shards match a plain model for any sharding."""

import contextlib
import copy
import gc
from functools import partial

import pytest
import torch
from expecting import error
from ranks import Ranks
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers
from torch import nn
from torch.distributed.tensor import DTensor

from vitkernels.parallel.base import Parallel
from vitkernels.parallel.fsdp import Fsdp
from vitkernels.parallel.local_shards import ELEMENTWISE, UNSHARDABLE, check_shardable, step_on_dtensors
from vitkernels.runtime.base import Runtime


class Tiny(nn.Module):
    """Sharded over 4 ranks, the first holds all of `token`, the last none of `body` and one of ten rows of `head`."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 5))
        self.body = nn.Linear(5, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 10)
        self.norm.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.norm(self.body(x + self.token)))


def train_alongside_a_plain_model(names):
    """Sums over processes are taken in another order: 1e-7, which Adam amplifies if a gradient is near zero."""
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)  # a step moves a weight by 1e-2
    runtime = Runtime()
    with Fsdp(runtime, lost_after=30.0) as engine:
        for name in names:
            torch.manual_seed(0)
            plain = Tiny()
            sharded = copy.deepcopy(plain)
            net = engine.wrap(sharded)
            models, strategies = (plain, sharded), (Parallel(runtime), engine)
            optimizers = [create_optimizer_v2(model, name, lr=0.01, weight_decay=0.1) for model in models]
            engine.prepare(optimizers[1])
            for step in range(3):
                images, targets = torch.randn(4 * engine.world, 5), torch.randint(10, (4 * engine.world,))
                own = slice(4 * engine.rank, 4 * engine.rank + 4)
                nn.functional.cross_entropy(plain(images), targets).backward()
                nn.functional.cross_entropy(net(images[own]), targets[own]).backward()
                norms = []
                for model, one, optimizer in zip(models, strategies, optimizers, strict=True):
                    norms.append(one.clip_gradients(list(model.parameters()), 0.2).item())
                    optimizer.step()
                    optimizer.zero_grad()
                assert norms[0] > 0.2 and norms[1] == pytest.approx(norms[0], rel=1e-4), (name, step)
                assert engine.gather(norms[1]) == [norms[1]] * engine.world, "equal bits on all ranks"
                of_plain, of_sharded = dict(plain.named_parameters()), dict(sharded.named_parameters())
                for parameter, expected in of_plain.items():
                    own = of_sharded[parameter]
                    assert isinstance(own, DTensor) and own._local_tensor.grad is None
                    close(engine.full(own), expected)
                    for entry, value in optimizers[0].state[expected].items():
                        found = optimizers[1].state[own][entry]
                        assert isinstance(found, DTensor) == (getattr(value, "shape", ()) == expected.shape), entry
                        close(engine.full(found), value)


@pytest.mark.parametrize("world", [2, 4])
def test_step_on_local_shards__matches_a_plain_model(tmp_path, world):
    names = {2: ["adamw", "lamb"], 4: ["adamw", "sgd", "nadam", "lamb"]}[world]
    ranks = Ranks.of(world, tmp_path / "log", train_alongside_a_plain_model, names)
    assert ranks.finish() == [0] * world, ranks.output()


def test_elementwise__lists_exactly_the_optimizers_that_ignore_sharding():
    """A step on a parameter and one on shards of it agree for these optimizers, and differ for others."""
    numbers = torch.Generator().manual_seed(0)
    weights, gradients = torch.randn(4, 5, generator=numbers), torch.randn(3, 4, 5, generator=numbers)

    def stepped(name, shards):
        parameters = [nn.Parameter(weights[rows].clone()) for rows in shards]
        optimizer = create_optimizer_v2(parameters, name, lr=0.1, weight_decay=0.1)
        for gradient in gradients:
            for parameter, rows in zip(parameters, shards, strict=True):
                parameter.grad = gradient[rows].clone()
            optimizer.step()
        return torch.cat([parameter.detach() for parameter in parameters]), type(optimizer)

    elementwise = set()
    for name in ("sgd", "adam", "adamw", "nadam", "radam", "adamax", "rmsprop", "adagrad", "adadelta", "momentum"):
        (unsharded, kind), (sharded, _) = stepped(name, [slice(0, 4)]), stepped(name, [slice(0, 3), slice(3, 4)])
        torch.testing.assert_close(sharded, unsharded, rtol=1e-6, atol=0, msg=name)
        elementwise.add(kind)
    assert elementwise == ELEMENTWISE
    for name in ("lamb", "lars", "muon"):
        (unsharded, kind), (sharded, _) = stepped(name, [slice(0, 4)]), stepped(name, [slice(0, 3), slice(3, 4)])
        assert kind not in ELEMENTWISE and not torch.allclose(sharded, unsharded, rtol=1e-5), name


def step_with_every_optimizer(names):
    """Fail unless a step on DTensors fails for the optimizers in UNSHARDABLE and for no other."""
    failed = {}
    with Fsdp(Runtime(), lost_after=60.0) as engine:

        def step_with(name):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(1, 8, 2, 2), nn.Flatten(), nn.LayerNorm(32), nn.Linear(32, 3))
            net = engine.wrap(model)
            optimizer = create_optimizer_v2(model, name, lr=0.01)
            step_on_dtensors(optimizer, engine.mesh)
            try:
                for _ in range(2):
                    net(torch.randn(2, 1, 4, 4)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            except (NotImplementedError, RuntimeError) as error:
                failed[f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"] = str(error)

        for name in names:
            step_with(name)
            # A step that fails leaves its contexts open, and they restore the grad mode when they are collected.
            gc.collect()
            torch.set_grad_enabled(True)
    assert failed.keys() == UNSHARDABLE, failed


@pytest.mark.slow
def test_unshardable__lists_exactly_the_optimizers_that_fail_on_sharded_tensors(tmp_path):
    kinds = {}
    for name in list_optimizers():
        with contextlib.suppress(ImportError, AssertionError, ValueError):  # bnb and apex are not installed
            kinds[get_optimizer_class(name, bind_defaults=False)] = name
    names = [name for kind, name in kinds.items() if kind.__name__ != "Adahessian"]  # refused by training
    assert len(names) > 20
    ranks = Ranks.of(2, tmp_path / "log", step_with_every_optimizer, names)
    assert ranks.finish() == [0, 0], ranks.output()


@pytest.mark.parametrize("name", ["kron", "adamp", "csgdp"])
def test_fsdp__refuses_an_optimizer_that_does_not_support_sharded_tensors(name):
    optimizer = create_optimizer_v2(nn.Linear(2, 2), name, lr=0.01)
    engine = Fsdp.__new__(Fsdp)  # without its processes, which a refusal does not need
    with error("parallel.optimizer", optimizer=type(optimizer).__name__, unsupported=["AdamP", "Kron", "SGDP"]):
        engine.prepare(optimizer)
    check_shardable(create_optimizer_v2(nn.Linear(2, 2), "lamb", lr=0.01))
