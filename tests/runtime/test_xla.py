"""torch_xla for real, with PJRT_DEVICE=CPU."""

import logging

import pytest
import torch

from vitkernels import runtime
from vitkernels.runtime import xla

pytestmark = pytest.mark.skipif(xla.unavailable() is not None, reason="torch_xla is not installed")


def test_recompilation_after_warm_up_names_the_shape_that_changed(caplog):
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


def test_batches_arrive_in_order_and_an_epoch_can_be_left_early():
    device = runtime.create("xla")
    batches = [(torch.full((2, 2), float(i)), torch.tensor([i])) for i in range(20)]
    feed = device.feed(batches)
    got = [next(feed) for _ in range(3)]
    feed.close()
    assert [int(targets.cpu()) for _, targets in got] == [0, 1, 2]
    assert got[0][0].device.type == "xla"
    assert [int(targets.cpu()) for _, targets in device.feed(batches[:4])] == [0, 1, 2, 3]


def test_an_error_in_the_input_is_no_end_of_the_epoch():
    def batches():
        for i in range(3):
            yield torch.full((2, 2), float(i)), torch.tensor([i])
        raise OSError("the disk is gone")

    feed = runtime.create("xla").feed(batches())
    assert [int(next(feed)[1].cpu()) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(feed)


def test_random_state_comes_back():
    device = runtime.create("xla")
    state = device.rng_state()
    a = torch.rand(4, device=device.device).cpu()
    device.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=device.device).cpu(), a)


def test_bf16_runs_under_autocast():
    device = runtime.create("xla")
    with device.autocast():
        assert (torch.ones(2, 2, device=device.device) @ torch.ones(2, 2, device=device.device)).dtype == torch.bfloat16
