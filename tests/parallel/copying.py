"""Create ddp with send="copy" on CPUs, train small models with it, and compare gradients."""

import hashlib
import os
from unittest import mock

import torch
from late import Late
from timm.models import VisionTransformer
from torch.nn import functional as F

from vitkernels import parallel
from vitkernels.parallel import copy_engine, ddp, host_all_reduce
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


def expect_averages(engine, model, alone, **tolerance):
    """Compare `model`'s gradients with the means over ranks of those of `alone`, an unwrapped copy of it."""
    for name, own in alone.named_parameters():
        shares = engine.gather(own.grad.cpu())
        average = model.get_parameter(name).grad.cpu()
        torch.testing.assert_close(average, sum(shares) / len(shares), **tolerance, msg=lambda m, n=name: f"{n}: {m}")
