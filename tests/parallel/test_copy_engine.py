"""send="copy" on CPU processes: averages of ordinary and unusual models, and errors in a pass."""

import contextlib
import gc
import weakref
from unittest import mock

import pytest
import torch
from copying import SMALL, create_ddp, expect_close, fingerprint, train
from expecting import error
from ranks import Ranks
from torch import nn

from vitkernels.parallel.base import Parallel
from vitkernels.runtime.base import Runtime


def train_and_compare_with_one_process(cases: list[dict]):
    expected, _ = train(Parallel(Runtime("fp32")))
    for number, case in enumerate(cases):
        settings = {name: case[name] for name in case.keys() & {"overlap"}}
        with create_ddp(number, **settings) as engine:
            steps, net = train(engine, case.get("compiled", False), case.get("accum", 1))
            assert len(set(engine.gather(fingerprint(steps)))) == 1, f"{case}: ranks have different bits"
            during_backward = case.get("compiled") and case.get("overlap") is not False and case.get("accum", 1) == 1
            large = sum(g.numel() >= SMALL for g in expected[0].values())
            assert net.late == (0 if during_backward else large), case
            expect_close(steps, expected)
            when = "after" if case.get("overlap") is False else "during"
            assert engine.describe().endswith(f"copy engines, gradients sent {when} backward")


UNCOMPILED = [{}, {"overlap": False}, {"accum": 2}, {"overlap": False, "accum": 2}]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        pytest.param(1, [{}], id="one"),
        pytest.param(2, UNCOMPILED, id="two"),
        pytest.param(4, UNCOMPILED, id="four"),
        pytest.param(
            2, [{"compiled": True}, {"compiled": True, "accum": 2}], id="two compiled", marks=pytest.mark.slow
        ),
    ],
)
def test_gradients__match_one_process_with_equal_bits_on_all_ranks(tmp_path, world, cases):
    ranks = Ranks.of(world, tmp_path / "log", train_and_compare_with_one_process, cases)
    assert ranks.finish(400) == [0] * world, ranks.output()


def train_and_release():
    with create_ddp(0) as engine:
        _, net = train(engine, compiled=True)
        parameter, rows = next(net.parameters()), net._all_reduce._received_RB
        left = [weakref.ref(one) for one in (net, net._all_reduce, rows)]
        del net, rows
        torch._dynamo.reset()
        gc.collect()
        assert [one() for one in left] == [None] * 3
        parameter.square().sum().backward()  # its hook finds no sender


@pytest.mark.slow
def test_released_model__is_freed(tmp_path):
    ranks = Ranks.of(1, tmp_path / "log", train_and_release)
    assert ranks.finish(200) == [0], ranks.output()


class Unusual(nn.Module):
    """A weight used twice, a frozen one, a buffer, and a layer that may be skipped."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.frozen = (nn.Linear(8, 8) for _ in range(3))
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.norm, self.unused = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x, everything=True):
        x = self.norm(self.frozen(self.second(self.first(x).relu())))
        return self.unused(x) if everything else x


def unusual_gradients(net, model, x):
    """Return gradients of a loss that calls the model twice and also reads one parameter directly."""
    (net(x).square().mean() + net(2 * x).square().mean() + model.first.weight.square().sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def fail(_):
    raise RuntimeError("out of memory")


def train_unusual_models():
    for number, (compiled, settings) in enumerate([(False, {}), (True, {}), (False, {"overlap": False})]):
        with create_ddp(number, **settings) as engine:
            torch.manual_seed(engine.rank)
            model = Unusual()
            net = engine.wrap(model, compiled)
            images = torch.arange(2 * 6 * 8.0).view(2, 6, 8).sin()
            alone = Unusual()
            alone.load_state_dict(model.state_dict())
            each = []
            for x in images:
                alone.zero_grad()
                each.append({name: g.clone() for name, g in unusual_gradients(alone, alone, x).items()})
            mean = {name: (each[0][name] + each[1][name]) / 2 for name in each[0]}
            for _ in range(2):
                model.zero_grad()
                expect_close([unusual_gradients(net, model, images[engine.rank])], [mean])
            assert model.frozen.weight.grad is None
            # Gradients that were not cleared, as when they accumulate over two steps.
            unusual_gradients(net, model, images[engine.rank])
            expect_close(
                [{n: p.grad for n, p in model.named_parameters() if p.grad is not None}],
                [{name: 2 * g for name, g in mean.items()}],
            )
            model.zero_grad()
            with error("parallel.missing_gradients", names=["unused.weight", "unused.bias"]):
                net(images[0], False).sum().backward()
            # Steps are correct after this error, and after one in the middle of backward. Ranks may fail at different
            # places: one of them may have sent nothing.
            places = [(model.norm.weight,) * 2, (model.norm.weight, model.first.bias), (model.norm.weight, None)]
            for place in places:
                model.zero_grad()
                with engine.accumulating(net, last=True):
                    expect_close([unusual_gradients(net, model, images[engine.rank])], [mean])
                if place[engine.rank] is None:
                    with engine.accumulating(net, last=True):
                        net(images[0]), net(images[1])  # no backward
                    continue
                hook = place[engine.rank].register_post_accumulate_grad_hook(fail)
                with engine.accumulating(net, last=True), pytest.raises(RuntimeError, match="out of memory"):
                    unusual_gradients(net, model, images[engine.rank])
                hook.remove()
            # Or while averages are taken.
            failing = mock.patch.object(net._all_reduce, "_means", side_effect=RuntimeError("out of memory"))
            with engine.accumulating(net, last=True), contextlib.ExitStack() as stack:
                if engine.rank == 0:
                    stack.enter_context(pytest.raises(RuntimeError, match="out of memory"))
                    stack.enter_context(failing)
                unusual_gradients(net, model, images[engine.rank])
            model.zero_grad()
            with engine.accumulating(net, last=True):
                expect_close([unusual_gradients(net, model, images[engine.rank])], [mean])


@pytest.mark.slow
def test_unusual_models__are_averaged_or_refused(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", train_unusual_models)
    assert ranks.finish(400) == [0, 0], ranks.output()
