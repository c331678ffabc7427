"""send="copy" on CPU processes.

One test covers GPUs, with their streams and waits, on machines that have two or more.
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
from expecting import error
from late import Late
from ranks import Ranks
from timm.models import VisionTransformer
from torch import nn
from torch.nn import functional as F

from vitkernels import parallel
from vitkernels import runtime as runtimes
from vitkernels.parallel import copy_engine, ddp, host_all_reduce, host_memory
from vitkernels.parallel.base import Parallel
from vitkernels.parallel.gradient_sends import options_for_sends
from vitkernels.runtime.base import Runtime

STEPS, IMAGES = 12, 8
SMALL = 64  # elements: in these models, as in larger ones, everything but matrices


def create_ddp(number: int, precision: str = "fp32", **settings):
    """Create ddp with send="copy", under keys of `number` in the ranks' store, as if CPUs had copy engines."""
    mock.patch.object(copy_engine, "unsupported", lambda *_: None).start()
    mock.patch.object(ddp, "SharedHostRows", Late).start()
    mock.patch.object(copy_engine, "_SMALL_GRADIENT", SMALL).start()
    mock.patch.object(host_all_reduce, "_MIN_BUCKET_ELEMENTS", 1).start()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
    return parallel.create("ddp", Runtime(precision), send="copy", **settings)


def train(engine, compiled=False, accum=1, in_float32=False):
    """Return each step's gradients by name, and the net. Ranks split a step's images and draw different weights."""
    torch.manual_seed(0)
    device = engine.runtime.device
    images = torch.randn(STEPS, IMAGES, 3, 8, 8).to(device)
    targets = torch.randint(10, (STEPS, IMAGES)).to(device)
    torch.manual_seed(engine.rank)
    model = VisionTransformer(8, 4, num_classes=10, embed_dim=16, depth=1, num_heads=2).to(device)
    model.weights_in_float32 = in_float32  # as fused ops set it
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
    """Compare up to float32 rounding: sums of 8 images in another order, after up to 12 steps of SGD."""
    for ours, theirs in zip(steps, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)


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
    [(1, [{}]), (2, UNCOMPILED), (4, UNCOMPILED), (2, [{"compiled": True}, {"compiled": True, "accum": 2}])],
    ids=["one", "two", "four", "two compiled"],
)
def test_gradients__match_one_process_with_equal_bits_on_all_ranks(tmp_path, world, cases):
    ranks = Ranks.of(world, tmp_path / "log", train_and_compare_with_one_process, cases)
    assert ranks.finish(400) == [0] * world, ranks.output()


def train_on_gpus():
    mock.patch.object(copy_engine, "_SMALL_GRADIENT", SMALL).start()
    mock.patch.object(host_all_reduce, "_MIN_BUCKET_ELEMENTS", 1).start()
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
    """Compare `model`'s gradients with the means over ranks of those of `alone`, an unwrapped copy of it."""
    for name, own in alone.named_parameters():
        shares = engine.gather(own.grad.cpu())
        average = model.get_parameter(name).grad.cpu()
        torch.testing.assert_close(average, sum(shares) / len(shares), **tolerance, msg=lambda m, n=name: f"{n}: {m}")


def average_in_bfloat16_on_gpus(mode):
    mock.patch.object(copy_engine, "_SMALL_GRADIENT", SMALL).start()
    mock.patch.object(host_all_reduce, "_MIN_BUCKET_ELEMENTS", 1).start()
    with parallel.create("ddp", runtimes.create("cuda", "bf16"), send="copy") as engine:
        torch.manual_seed(0)
        model = VisionTransformer(8, 4, num_classes=10, embed_dim=16, depth=3, num_heads=2).to(engine.device)
        alone = copy.deepcopy(model)
        sends = engine.wrap(model, compiled=True, mode=mode)
        keeps = torch.compile(alone, options=options_for_sends({}, alone))
        torch.manual_seed(engine.rank)
        for step in range(STEPS):
            images = torch.randn(4, 3, 8, 8, device=engine.device)
            for net in (sends, keeps):
                net.zero_grad()
                with engine.accumulating(sends, last=True) if net is sends else contextlib.nullcontext():
                    with engine.runtime.autocast():
                        loss = net(images).float().logsumexp(1).mean()
                    torch.cuda._sleep(2_000_000 * ((engine.rank + step) % engine.world))  # ranks take turns being late
                    loss.backward()
            assert sends.late == 0 or step == 0
            assert torch.bfloat16 in sends._all_reduce.dtypes
            # Two compiled graphs of the same products: equal bits on H200s, except in what inductor fuses differently
            # at the end of a CUDA graph, which may be rounded to bfloat16.
            expect_averages(engine, model, alone, **({"rtol": 2**-7, "atol": 1e-6} if mode else {"rtol": 0, "atol": 0}))


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("work", "settings"),
    [(train_on_gpus, []), *((average_in_bfloat16_on_gpus, [mode]) for mode in (None, "reduce-overhead"))],
    ids=["all ways", "bfloat16", "CUDA graphs"],
)
def test_averages__on_gpus(tmp_path, world, work, settings):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs of one host")
    if settings == ["reduce-overhead"] and not copy_engine.can_send_between_cuda_graphs():
        pytest.skip(f"PyTorch {torch.__version__} would send after all CUDA graphs")
    ranks = Ranks.of(world, tmp_path / "log", work, *settings)
    assert ranks.finish(400) == [0] * world, ranks.output()


def find_sends_in_the_compiled_backward(number, in_float32):
    from torch._inductor.utils import run_fw_bw_and_get_code

    with create_ddp(number, "bf16") as engine:
        model = VisionTransformer(8, 4, num_classes=10, embed_dim=16, depth=2, num_heads=2)
        model.weights_in_float32 = in_float32
        net = engine.wrap(model, compiled=True)

        def run():
            with engine.runtime.autocast():
                return net(torch.randn(4, 3, 8, 8))

        _, (_, backward) = run_fw_bw_and_get_code(run)
        sent = set(re.findall(r"buf\d+", "".join(re.findall(r"send_gradient.*", backward))))
        reused = set(re.findall(r"del (buf\d+)  # reuse", backward))
        assert len(sent) > 8 and not sent & reused, "a copy engine would read overwritten memory"
        model.zero_grad()
        run().float().sum().backward()
        assert net.late == 0  # except in the first pass, which shows how gradients travel
        assert (torch.bfloat16 in net._all_reduce.dtypes) != in_float32
    calls = re.findall(r"^ +(?:\w+ = )?(cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.\w+\.\w+)", backward, re.M)
    calls = [call == "torch.ops.vitkernels.send_gradient" for call in calls]
    assert sum(calls) == sum(p.numel() >= SMALL for p in model.parameters()), backward
    cuts = sum(send and not before for before, send in itertools.pairwise([False, *calls]))
    # A CUDA graph would end at each: after a bucket, and wherever inductor puts a kernel between two sends.
    assert cuts <= len(net._all_reduce._buckets) < sum(calls), (cuts, net._all_reduce._buckets)
    progress = [calls[:place].count(False) / calls.count(False) for place, sends in enumerate(calls) if sends]
    middle = sorted(progress)[len(progress) // 2]
    assert min(progress) < 0.2 and 0.3 < middle < 0.7, f"not spread over the backward pass: {progress}"
    return len(reused)


def find_sends():
    reused = [
        find_sends_in_the_compiled_backward(number, in_float32) for number, in_float32 in enumerate((False, True))
    ]
    assert reused[1] > 2 * reused[0], f"memory may be reused if nothing narrow is sent: {reused}"


def test_compiled_backward__sends_each_gradient_once_computed(tmp_path):
    ranks = Ranks.of(1, tmp_path / "log", find_sends)
    assert ranks.finish(400) == [0], ranks.output()


LINEAR = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")  # all not SMALL
IN_HALF = {"head.weight", *(f"blocks.0.{name}" for name in LINEAR)}


def average_in_bfloat16():
    """One micro-batch a step, then two, then one: compare with averages of the ranks' own gradients, in float32."""
    with create_ddp(0, "bf16") as engine:
        torch.manual_seed(0)
        model = VisionTransformer(8, 4, num_classes=10, embed_dim=16, depth=1, num_heads=2)
        alone = copy.deepcopy(model)
        sends, keeps = engine.wrap(model, compiled=True), torch.compile(alone, options=options_for_sends({}, alone))
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
            travels = dict(zip(sends._trained_by_name, sends._all_reduce.dtypes, strict=True))
            assert {name for name, dtype in travels.items() if dtype == torch.bfloat16} == in_half, (accum, travels)
            expect_averages(engine, model, alone, rtol=0, atol=0)
            model.zero_grad()
            alone.zero_grad()


def test_cast_gradients__travel_in_bfloat16_with_equal_averages(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", average_in_bfloat16)
    assert ranks.finish(400) == [0, 0], ranks.output()


class Extended(nn.Module):
    """A weight with frozen rows appended: its gradient is a slice of a cast, and another parameter uses all of it."""

    def __init__(self):
        super().__init__()
        self.own, self.wide, self.narrow = (nn.Parameter(torch.randn(n, 16)) for n in (16, 8, 32))
        self.register_buffer("frozen", torch.randn(16, 16))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            weight = torch.cat([self.own, self.frozen]) + self.narrow[:, :8] @ self.wide
        return F.linear(x, weight)


def average_a_slice_of_a_cast():
    with create_ddp(0, "bf16") as engine:
        torch.manual_seed(0)
        model = Extended()
        alone = copy.deepcopy(model)
        sends, keeps = engine.wrap(model, compiled=True), torch.compile(alone, options=options_for_sends({}, alone))
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


def test_gradient__slice_of_a_cast_is_averaged(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", average_a_slice_of_a_cast)
    assert ranks.finish(200) == [0, 0], ranks.output()


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


def test_unusual_models__are_averaged_or_refused(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", train_unusual_models)
    assert ranks.finish(400) == [0, 0], ranks.output()


def wrap_unsupported_models():
    with create_ddp(0) as engine:
        with error("parallel.send", send="copy") as refused:
            engine.wrap(nn.Linear(2, 2).double())
        assert "torch.float64" in refused.value.fields["reason"]
        mock.patch.object(copy_engine, "can_send_between_cuda_graphs", lambda: False).start()
        with error("parallel.send", send="copy") as refused:
            engine.wrap(nn.Linear(2, 2), True, "reduce-overhead")
        assert "CUDA graphs" in refused.value.fields["reason"]


def test_send_copy__refuses_unsupported_models(tmp_path):
    ranks = Ranks.of(1, tmp_path / "log", wrap_unsupported_models)
    assert ranks.finish() == [0], ranks.output()


def choose_automatically():
    """send="auto" on ranks that could copy, except in the last case, where one cannot."""
    model, device = nn.Linear(2, 2), mock.Mock(total_memory=2**20)
    mock.patch.object(torch.cuda, "get_device_properties", lambda _: device).start()
    info = mock.patch.object(ddp.log, "info").start()
    cases = [(True, None, "copy engines"), (False, None, "nccl, .*compiled")]
    mock.patch.object(copy_engine, "can_send_between_cuda_graphs", lambda: True).start()
    cases += [(True, "reduce-overhead", "copy engines")]
    with create_ddp(0) as engine:
        engine.send = "auto"
        engine.accum_steps = 2
        assert not engine._uses_copy_engine(model, True, None) and "accum_steps=2" in info.call_args.args[1]
        engine.accum_steps = 1
        for compiled, mode, expected in cases:
            assert engine._uses_copy_engine(model, compiled, mode) == expected.startswith("copy")
            assert re.match(expected, info.call_args.args[1])
        engine.world = 3
        assert not engine._uses_copy_engine(model, True, None) and "2 GPUs, not on 3" in info.call_args.args[1]
        engine.world = 2
        model.weights_in_float32 = True
        assert not engine._uses_copy_engine(model, True, None) and "float32 gradients" in info.call_args.args[1]
        assert engine._uses_copy_engine(model, True, "reduce-overhead")
        mock.patch.object(copy_engine, "can_send_between_cuda_graphs", lambda: False).start()
        assert not engine._uses_copy_engine(model, True, "reduce-overhead") and "torch 2.11" in info.call_args.args[1]
        model.weights_in_float32 = False
        device.total_memory = 900  # 5 % of it is 45; the received gradients take 48
        assert not engine._uses_copy_engine(model, True, None)
        assert "nccl" in info.call_args.args[1] and "GiB of each GPU's memory" in info.call_args.args[1]
    mock.patch.object(host_memory, "unavailable", lambda rank, *_: "as it were" if rank == 1 else None).start()
    with error("parallel.send", send="copy", reason="as it were"):
        create_ddp(1)


def test_send_auto__copies_only_where_measured_faster(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", choose_automatically)
    assert ranks.finish() == [0, 0], ranks.output()


def find_no_memory_and_exit_late():
    mock.patch.object(host_memory, "unavailable", lambda rank, *_: "as it were").start()
    with error("parallel.send", reason="as it were"):
        create_ddp(0)
    time.sleep(3 * int(os.environ["RANK"]))


def test_unavailable_copy_engine__raises_the_same_error_on_all_ranks(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", find_no_memory_and_exit_late)
    assert ranks.finish() == [0, 0], f"a rank that exited later counted the others as lost: {ranks.output()}"


def test_send__refuses_unsupported_configurations(monkeypatch):
    with error("unknown_name", name="copies", choices=["auto", "copy", "nccl"]):
        parallel.create("ddp", Runtime(), send="copies")
    for name in ("none", "fsdp"):
        with error("parallel.setting", setting="send", strategy=name):
            parallel.create(name, Runtime(), send="copy")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with error("parallel.send", send="copy"):
        parallel.create("ddp", Runtime(), send="copy")
    with error("parallel.send", send="nccl"):
        parallel.create("ddp", Runtime(), send="nccl")


def test_unsupported__several_hosts_or_reduced_precision(monkeypatch):
    gpu = torch.device("cuda", 0)
    assert copy_engine.unsupported(gpu, 2, torch.float32) is None
    assert "float32" in copy_engine.unsupported(gpu, 2, torch.bfloat16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "one host" in copy_engine.unsupported(gpu, 4, torch.float32)
