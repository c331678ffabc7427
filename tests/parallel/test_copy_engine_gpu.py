"""send="copy" on machines with two or more GPUs, with their streams and waits."""

import contextlib
import copy
import os
from unittest import mock

import pytest
import torch
from copying import SMALL, STEPS, expect_averages, expect_close, fingerprint, train
from ranks import Ranks
from timm.models import VisionTransformer

from vitkernels import parallel
from vitkernels import runtime as runtimes
from vitkernels.parallel import copy_engine, host_all_reduce
from vitkernels.parallel.gradient_sends import options_for_sends


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
