"""XlaRuntime under torch_xla with PJRT_DEVICE=CPU."""

import logging

import pytest
import torch
from expecting import error

from vitkernels import runtime
from vitkernels.runtime import xla

pytestmark = pytest.mark.skipif(xla.unavailable() is not None, reason="torch_xla is not installed")


def test_recompile_guard__names_the_shape_that_changed_after_warm_up(caplog):
    device = runtime.create("xla", "fp32")
    weight = torch.ones(7, 3, device=device.device)

    def step(rows):
        images = torch.ones(rows, 7).to(device.device)
        with device.autocast():
            weight.add_((images @ weight).sum() * 1e-3)
        device.end_step(images, images[:, 0])

    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            step(8)
        assert caplog.text == ""
        step(5)
    assert "images (8, 7) -> (5, 7)" in caplog.text


def test_feed__keeps_order_and_can_be_closed_early():
    device = runtime.create("xla")
    batches = [(torch.full((2, 2), float(i)), torch.tensor([i])) for i in range(20)]
    feed = device.feed(batches)
    got = [next(feed) for _ in range(3)]
    feed.close()
    assert [int(targets.cpu()) for _, targets in got] == [0, 1, 2]
    assert got[0][0].device.type == "xla"
    assert [int(targets.cpu()) for _, targets in device.feed(batches[:4])] == [0, 1, 2, 3]


def test_feed__raises_errors_of_the_input():
    def batches():
        for i in range(3):
            yield torch.full((2, 2), float(i)), torch.tensor([i])
        raise OSError("the disk is gone")

    feed = runtime.create("xla").feed(batches())
    assert [int(next(feed)[1].cpu()) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(feed)


def test_rng_state__round_trip():
    device = runtime.create("xla")
    state = device.rng_state()
    a = torch.rand(4, device=device.device).cpu()
    device.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=device.device).cpu(), a)


def test_precision__default_autocasts_to_bf16():
    device = runtime.create("xla")
    with device.autocast():
        assert (torch.ones(2, 2, device=device.device) @ torch.ones(2, 2, device=device.device)).dtype == torch.bfloat16


def test_compile__rejects_modes():
    with error("runtime.compile_mode", runtime="xla", mode="reduce-overhead"):
        runtime.create("xla").compile(torch.nn.Linear(2, 2), "reduce-overhead")
