"""parallel.send=copy on CPU processes.

What needs GPUs, streams and what they wait for, is tried by one test, where there are two or more.
"""

import contextlib
import copy
import gc
import hashlib
import itertools
import os
import re
import time
import weakref
from unittest import mock

import pytest
import torch
from late import Late
from ranks import Ranks
from timm.models import VisionTransformer
from torch import nn
from torch.nn import functional as F

from vitkernels import parallel
from vitkernels import runtime as runtimes
from vitkernels.errors import UsageError
from vitkernels.parallel import copy_engine, host_all_reduce, host_memory, processes
from vitkernels.parallel.base import Parallel
from vitkernels.runtime.base import Runtime

STEPS, IMAGES = 12, 8
SMALL = 64  # elements: of these models, as of larger ones, all that is no matrix


def engine_of(number: int, precision: str = "fp32", **settings):
    """The ddp engine with send=copy, number `number` in the store that all share, as if CPUs had copy engines."""
    mock.patch.object(copy_engine, "unsupported", lambda *_: None).start()
    mock.patch.object(processes, "HostRows", Late).start()
    mock.patch.object(copy_engine, "_SMALL", SMALL).start()
    mock.patch.object(host_all_reduce, "_LEAST", 1).start()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
    return parallel.create("ddp", Runtime(precision), send="copy", **settings)


def train(engine, compiled=False, accum=1, in_float32=False):
    """Gradients of each step, by name, and the net. Ranks share out a step's images, and begin with other weights."""
    torch.manual_seed(0)
    device = engine.runtime.device
    images = torch.randn(STEPS, IMAGES, 3, 8, 8).to(device)
    targets = torch.randint(10, (STEPS, IMAGES)).to(device)
    torch.manual_seed(engine.rank)
    model = VisionTransformer(8, 4, num_classes=10, embed_dim=16, depth=1, num_heads=2).to(device)
    model.weights_in_float32 = in_float32  # as fused operations say of themselves
    net = engine.wrap(model, compiled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for x, y in zip(images, targets, strict=True):
        pairs = zip(
            x[engine.rank :: engine.world].chunk(accum), y[engine.rank :: engine.world].chunk(accum), strict=True
        )
        for number, (some, labels) in enumerate(pairs):
            with engine.accumulating(net, last=number == accum - 1):
                with engine.runtime.autocast():
                    logits = net(some)
                if device.type == "cuda":
                    torch.cuda._sleep(2_000_000 * (engine.rank + 1))  # ranks are a millisecond apart
                (F.cross_entropy(logits.float(), labels) / accum).backward()
        steps.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return steps, net


def fingerprint(steps) -> str:
    return hashlib.sha256(b"".join(g.cpu().numpy().tobytes() for step in steps for g in step.values())).hexdigest()


def expect_close(steps, expected):
    """To float32's rounding: sums of 8 images in another order, after up to 12 steps of SGD."""
    for ours, theirs in zip(steps, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)


def train_as_one_process_would(cases: list[dict]):
    expected, _ = train(Parallel(Runtime("fp32")))
    for number, case in enumerate(cases):
        settings = {name: case[name] for name in case.keys() & {"overlap"}}
        with engine_of(number, **settings) as engine:
            steps, net = train(engine, case.get("compiled", False), case.get("accum", 1))
            assert len(set(engine.gather(fingerprint(steps)))) == 1, f"{case}: ranks have different bits"
            at_once = case.get("compiled") and case.get("overlap") is not False and case.get("accum", 1) == 1
            large = sum(g.numel() >= SMALL for g in expected[0].values())
            assert net.late == (0 if at_once else large), case
            expect_close(steps, expected)
            said = "after" if case.get("overlap") is False else "beside"
            assert engine.describe().endswith(f"copy engines, gradients sent {said} backward")


UNCOMPILED = [{}, {"overlap": False}, {"accum": 2}, {"overlap": False, "accum": 2}]


@pytest.mark.parametrize(
    ("world", "cases"),
    [(1, [{}]), (2, UNCOMPILED), (4, UNCOMPILED), (2, [{"compiled": True}, {"compiled": True, "accum": 2}])],
    ids=["one", "two", "four", "two compiled"],
)
def test_gradients_are_those_of_one_process_and_the_same_bits_on_all_ranks(tmp_path, world, cases):
    ranks = Ranks.of(world, tmp_path / "log", train_as_one_process_would, cases)
    assert ranks.finish(400) == [0] * world, ranks.said()


def train_on_gpus():
    mock.patch.object(copy_engine, "_SMALL", SMALL).start()
    mock.patch.object(host_all_reduce, "_LEAST", 1).start()
    expected = None
    cases = [{"send": "nccl"}, {"send": "copy"}, {"send": "copy"}, {"send": "copy", "overlap": False}]
    for number, settings in enumerate(cases):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        with parallel.create("ddp", runtimes.create("cuda", "fp32"), **settings) as engine:
            steps, net = train(engine, compiled=True, in_float32=number == 2)
            assert len(set(engine.gather(fingerprint(steps)))) == 1, f"{settings}: ranks have different bits"
            expected = expected or steps
            expect_close(steps, expected)
            assert number not in (1, 2) or net.late == 0


def expect_averages(engine, model, alone, **tolerance):
    """The gradients of `model`: means of those that `alone`, the same model, has on each rank for itself."""
    for name, own in alone.named_parameters():
        shares = engine.gather(own.grad.cpu())
        average = model.get_parameter(name).grad.cpu()
        torch.testing.assert_close(average, sum(shares) / len(shares), **tolerance, msg=lambda m, n=name: f"{n}: {m}")


def average_in_bfloat16_on_gpus(mode):
    mock.patch.object(copy_engine, "_SMALL", SMALL).start()
    mock.patch.object(host_all_reduce, "_LEAST", 1).start()
    with parallel.create("ddp", runtimes.create("cuda", "bf16"), send="copy") as engine:
        torch.manual_seed(0)
        model = VisionTransformer(8, 4, num_classes=10, embed_dim=16, depth=3, num_heads=2).to(engine.device)
        alone = copy.deepcopy(model)
        sends = engine.wrap(model, compiled=True, mode=mode)
        keeps = torch.compile(alone, options=copy_engine._at_once({}, alone))
        torch.manual_seed(engine.rank)
        for step in range(STEPS):
            images = torch.randn(4, 3, 8, 8, device=engine.device)
            for net in (sends, keeps):
                net.zero_grad()
                with engine.accumulating(sends, last=True) if net is sends else contextlib.nullcontext():
                    with engine.runtime.autocast():
                        loss = net(images).float().logsumexp(1).mean()
                    torch.cuda._sleep(2_000_000 * ((engine.rank + step) % engine.world))  # ranks are late by turns
                    loss.backward()
            assert sends.late == 0 or step == 0
            assert torch.bfloat16 in sends._exchange.dtypes
            # The same products in two compiled graphs: seen to have the same bits on H200s, but for what inductor fuses
            # otherwise where CUDA graphs end; and that may be rounded to bfloat16.
            expect_averages(engine, model, alone, **({"rtol": 2**-7, "atol": 1e-6} if mode else {"rtol": 0, "atol": 0}))


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("work", "settings"),
    [(train_on_gpus, []), *((average_in_bfloat16_on_gpus, [mode]) for mode in (None, "reduce-overhead"))],
    ids=["all ways", "bfloat16", "CUDA graphs"],
)
def test_on_gpus_the_averages_are_right(tmp_path, world, work, settings):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs of one host")
    if settings == ["reduce-overhead"] and not copy_engine.sends_between_cuda_graphs():
        pytest.skip(f"PyTorch {torch.__version__} would send all behind them")
    ranks = Ranks.of(world, tmp_path / "log", work, *settings)
    assert ranks.finish(400) == [0] * world, ranks.said()


def find_sends_in_the_compiled_backward(number, in_float32):
    from torch._inductor.utils import run_fw_bw_and_get_code

    with engine_of(number, "bf16") as engine:
        model = VisionTransformer(8, 4, num_classes=10, embed_dim=16, depth=2, num_heads=2)
        model.weights_in_float32 = in_float32
        net = engine.wrap(model, compiled=True)

        def run():
            with engine.runtime.autocast():
                return net(torch.randn(4, 3, 8, 8))

        _, (_, backward) = run_fw_bw_and_get_code(run)
        sent = set(re.findall(r"buf\d+", "".join(re.findall(r"send_gradient.*", backward))))
        given_on = set(re.findall(r"del (buf\d+)  # reuse", backward))
        assert len(sent) > 8 and not sent & given_on, "a copy engine would read what others have written since"
        model.zero_grad()
        run().float().sum().backward()
        assert net.late == 0  # but for the first pass, which shows how gradients travel
        assert (torch.bfloat16 in net._exchange.dtypes) != in_float32
    calls = re.findall(r"^ +(?:\w+ = )?(cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.\w+\.\w+)", backward, re.M)
    calls = [call == "torch.ops.vitkernels.send_gradient" for call in calls]
    assert sum(calls) == sum(p.numel() >= SMALL for p in model.parameters()), backward
    cuts = sum(send and not before for before, send in itertools.pairwise([False, *calls]))
    # A CUDA graph would end at each: behind a group, and once more where inductor puts a kernel between two sends.
    assert cuts <= len(net._exchange._groups) < sum(calls), (cuts, net._exchange._groups)
    others = [calls[:place].count(False) / calls.count(False) for place, sends in enumerate(calls) if sends]
    middle = sorted(others)[len(others) // 2]
    assert min(others) < 0.2 and 0.3 < middle < 0.7, f"not spread over the backward pass: {others}"
    return len(given_on)


def find_sends():
    given_on = [
        find_sends_in_the_compiled_backward(number, in_float32) for number, in_float32 in enumerate((False, True))
    ]
    assert given_on[1] > 2 * given_on[0], f"where nothing narrow is sent memory may be used again: {given_on}"


def test_a_compiled_backward_sends_each_gradient_where_it_is_made(tmp_path):
    ranks = Ranks.of(1, tmp_path / "log", find_sends)
    assert ranks.finish(400) == [0], ranks.said()


LINEAR = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")  # all not SMALL
IN_HALF = {"head.weight", *(f"blocks.0.{name}" for name in LINEAR)}


def average_in_bfloat16():
    """One batch a step, then two, then one: averages against those of the ranks' own gradients, in float32."""
    with engine_of(0, "bf16") as engine:
        torch.manual_seed(0)
        model = VisionTransformer(8, 4, num_classes=10, embed_dim=16, depth=1, num_heads=2)
        alone = copy.deepcopy(model)
        sends, keeps = engine.wrap(model, compiled=True), torch.compile(alone, options=copy_engine._at_once({}, alone))
        torch.manual_seed(engine.rank)
        for accum, late, in_half in ((1, 8, IN_HALF), (1, 0, IN_HALF), (2, 8, set()), (1, 0, set())):
            for batch in range(accum):
                images = torch.randn(4, 3, 8, 8)
                for net in (sends, keeps):
                    begun = engine.accumulating(net, batch == accum - 1) if net is sends else contextlib.nullcontext()
                    with begun, engine.runtime.autocast():
                        loss = net(images).float().logsumexp(1).mean()
                    loss.backward()
            assert sends.late == late
            travels = dict(zip(sends._named, sends._exchange.dtypes, strict=True))
            assert {name for name, dtype in travels.items() if dtype == torch.bfloat16} == in_half, (accum, travels)
            expect_averages(engine, model, alone, rtol=0, atol=0)
            model.zero_grad()
            alone.zero_grad()


def test_what_autocast_cast_travels_in_half_the_bytes_with_the_same_averages(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", average_in_bfloat16)
    assert ranks.finish(400) == [0, 0], ranks.said()


class Extended(nn.Module):
    """Frozen rows extend a weight: its gradient is a part of what autocast cast, and another reader has it whole."""

    def __init__(self):
        super().__init__()
        self.own, self.wide, self.narrow = (nn.Parameter(torch.randn(n, 16)) for n in (16, 8, 32))
        self.register_buffer("frozen", torch.randn(16, 16))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            weight = torch.cat([self.own, self.frozen]) + self.narrow[:, :8] @ self.wide
        return F.linear(x, weight)


def average_a_part_of_what_was_cast():
    with engine_of(0, "bf16") as engine:
        torch.manual_seed(0)
        model = Extended()
        alone = copy.deepcopy(model)
        sends, keeps = engine.wrap(model, compiled=True), torch.compile(alone, options=copy_engine._at_once({}, alone))
        torch.manual_seed(engine.rank)
        for late in (3, 0):
            images = torch.randn(8, 16)
            for net in (sends, keeps):
                net.zero_grad()
                with engine.runtime.autocast():
                    loss = net(images).float().logsumexp(1).mean()
                loss.backward()
            assert sends.late == late
            expect_averages(engine, model, alone, rtol=0, atol=0)


def test_a_gradient_that_is_a_part_of_what_was_cast(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", average_a_part_of_what_was_cast)
    assert ranks.finish(200) == [0, 0], ranks.said()


def train_and_let_go():
    with engine_of(0) as engine:
        _, net = train(engine, compiled=True)
        parameter, rows = next(net.parameters()), net._exchange._received_RB
        left = [weakref.ref(one) for one in (net, net._exchange, rows)]
        del net, rows
        torch._dynamo.reset()
        gc.collect()
        assert [one() for one in left] == [None] * 3
        parameter.square().sum().backward()  # of nobody's any more


def test_a_model_that_is_let_go_leaves_nothing_behind(tmp_path):
    ranks = Ranks.of(1, tmp_path / "log", train_and_let_go)
    assert ranks.finish(200) == [0], ranks.said()


class Odd(nn.Module):
    """A weight that is used twice, one that is frozen, a buffer, and a layer that may be left out."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.frozen = (nn.Linear(8, 8) for _ in range(3))
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.norm, self.unused = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x, everything=True):
        x = self.norm(self.frozen(self.second(self.first(x).relu())))
        return self.unused(x) if everything else x


def odd_gradients(net, model, x):
    """Of a loss that calls the model twice, and reads one of its parameters by itself."""
    (net(x).square().mean() + net(2 * x).square().mean() + model.first.weight.square().sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def fail(_):
    raise RuntimeError("out of memory")


def train_what_is_odd():
    for number, (compiled, settings) in enumerate([(False, {}), (True, {}), (False, {"overlap": False})]):
        with engine_of(number, **settings) as engine:
            torch.manual_seed(engine.rank)
            model = Odd()
            net = engine.wrap(model, compiled)
            images = torch.arange(2 * 6 * 8.0).view(2, 6, 8).sin()
            alone = Odd()
            alone.load_state_dict(model.state_dict())
            each = []
            for x in images:
                alone.zero_grad()
                each.append({name: g.clone() for name, g in odd_gradients(alone, alone, x).items()})
            mean = {name: (each[0][name] + each[1][name]) / 2 for name in each[0]}
            for _ in range(2):
                model.zero_grad()
                expect_close([odd_gradients(net, model, images[engine.rank])], [mean])
            assert model.frozen.weight.grad is None
            # A gradient that was left in place, and one that is zero: as added up over two steps.
            odd_gradients(net, model, images[engine.rank])
            expect_close(
                [{n: p.grad for n, p in model.named_parameters() if p.grad is not None}],
                [{name: 2 * g for name, g in mean.items()}],
            )
            model.zero_grad()
            with pytest.raises(UsageError, match=r"all parameters, and unused.weight and 1 more have none .* freeze"):
                net(images[0], False).sum().backward()
            # After this error, and after one in the middle of backward, steps are as right as before. It need not be
            # where the other ranks have theirs: one of them may have sent nothing.
            places = [(model.norm.weight,) * 2, (model.norm.weight, model.first.bias), (model.norm.weight, None)]
            for place in places:
                model.zero_grad()
                with engine.accumulating(net, last=True):
                    expect_close([odd_gradients(net, model, images[engine.rank])], [mean])
                if place[engine.rank] is None:
                    with engine.accumulating(net, last=True):
                        net(images[0]), net(images[1])  # ends before backward
                    continue
                hook = place[engine.rank].register_post_accumulate_grad_hook(fail)
                with engine.accumulating(net, last=True), pytest.raises(RuntimeError, match="out of memory"):
                    odd_gradients(net, model, images[engine.rank])
                hook.remove()
            # Nor need it be while gradients are sent.
            failing = mock.patch.object(net._exchange, "_means", side_effect=RuntimeError("out of memory"))
            with engine.accumulating(net, last=True), contextlib.ExitStack() as stack:
                if engine.rank == 0:
                    stack.enter_context(pytest.raises(RuntimeError, match="out of memory"))
                    stack.enter_context(failing)
                odd_gradients(net, model, images[engine.rank])
            model.zero_grad()
            with engine.accumulating(net, last=True):
                expect_close([odd_gradients(net, model, images[engine.rank])], [mean])


def test_odd_models_and_losses_are_right_or_refused(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", train_what_is_odd)
    assert ranks.finish(400) == [0, 0], ranks.said()


def train_in_float64():
    with engine_of(0) as engine:
        with pytest.raises(UsageError, match=r"contiguous float32 parameters, and weight is torch.float64; .*=auto"):
            engine.wrap(nn.Linear(2, 2).double())
        mock.patch.object(copy_engine, "sends_between_cuda_graphs", lambda: False).start()
        with pytest.raises(UsageError, match=r"behind the CUDA graphs of this compile mode: torch 2.11.*overlap=false"):
            engine.wrap(nn.Linear(2, 2), True, "reduce-overhead")


def test_what_cannot_be_copied_is_refused(tmp_path):
    ranks = Ranks.of(1, tmp_path / "log", train_in_float64)
    assert ranks.finish() == [0], ranks.said()


def choose_by_itself():
    """send=auto on ranks that could copy, but for the last case, in which one of them cannot."""
    model, device = nn.Linear(2, 2), mock.Mock(total_memory=2**20)
    mock.patch.object(torch.cuda, "get_device_properties", lambda _: device).start()
    info = mock.patch.object(processes.log, "info").start()
    cases = [(True, None, "copy engines, beside backward"), (False, None, "nccl, .*: measured for compiled models")]
    mock.patch.object(copy_engine, "sends_between_cuda_graphs", lambda: True).start()
    cases += [(True, "reduce-overhead", "copy engines, beside backward")]
    with engine_of(0) as engine:
        engine.send = "auto"
        engine.accum_steps = 2
        assert not engine._copies(model, True, None) and "accum_steps=2" in info.call_args.args[1]
        engine.accum_steps = 1
        for compiled, mode, said in cases:
            assert engine._copies(model, compiled, mode) == said.startswith("copy")
            assert re.match(said, info.call_args.args[1])
        engine.world = 3
        assert not engine._copies(model, True, None) and "measured on 2 GPUs, not on 3" in info.call_args.args[1]
        engine.world = 2
        model.weights_in_float32 = True
        assert not engine._copies(model, True, None) and "float32 gradients" in info.call_args.args[1]
        assert engine._copies(model, True, "reduce-overhead")
        mock.patch.object(copy_engine, "sends_between_cuda_graphs", lambda: False).start()
        assert not engine._copies(model, True, "reduce-overhead") and "torch 2.11" in info.call_args.args[1]
        model.weights_in_float32 = False
        device.total_memory = 900  # what is received would be 48
        assert not engine._copies(model, True, None)
        assert "nccl" in info.call_args.args[1] and "GiB of each GPU's memory" in info.call_args.args[1]
    mock.patch.object(host_memory, "unavailable", lambda rank, *_: "as it were" if rank == 1 else None).start()
    with pytest.raises(UsageError, match=r"send=copy cannot be had: as it were; parallel.send=auto does without"):
        engine_of(1)


def test_by_itself_it_copies_where_that_was_measured_to_be_faster(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", choose_by_itself)
    assert ranks.finish() == [0, 0], ranks.said()


def find_no_memory_and_end_late():
    mock.patch.object(host_memory, "unavailable", lambda rank, *_: "as it were").start()
    with pytest.raises(UsageError, match="send=copy cannot be had: as it were"):
        engine_of(0)
    time.sleep(3 * int(os.environ["RANK"]))


def test_an_engine_that_cannot_be_had_is_that_error_on_all_ranks(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", find_no_memory_and_end_late)
    assert ranks.finish() == [0, 0], f"one that ended later missed the others: {ranks.said()}"


def test_a_setting_that_does_not_fit_is_an_error_that_names_it(monkeypatch):
    with pytest.raises(UsageError, match=r"unknown parallel.send 'copies'; known: auto, copy, nccl"):
        parallel.create("ddp", Runtime(), send="copies")
    for name in ("none", "fsdp"):
        with pytest.raises(UsageError, match=rf"send=copy is for parallel=ddp under torchrun; for parallel={name}"):
            parallel.create(name, Runtime(), send="copy")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"send=copy cannot be had: .* NVIDIA GPUs, and this is runtime=cpu"):
        parallel.create("ddp", Runtime(), send="copy")
    with pytest.raises(UsageError, match=r"send=nccl is for NVIDIA GPUs, and this is cpu"):
        parallel.create("ddp", Runtime(), send="nccl")


def test_copy_engines_are_for_one_host_and_float32(monkeypatch):
    gpu = torch.device("cuda", 0)
    assert copy_engine.unsupported(gpu, 2, torch.float32) is None
    assert "float32" in copy_engine.unsupported(gpu, 2, torch.bfloat16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "one host" in copy_engine.unsupported(gpu, 4, torch.float32)
