"""send="copy" inside compiled backward passes, on CPU processes: when gradients leave, and in which dtype."""

import contextlib
import copy
import itertools
import re

import pytest
import torch
from copying import SMALL, create_ddp, expect_averages
from ranks import Ranks
from timm.models import VisionTransformer
from torch import nn
from torch.nn import functional as F

from vitkernels.parallel.gradient_sends import options_for_sends

pytestmark = pytest.mark.slow


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
