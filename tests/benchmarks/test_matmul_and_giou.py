"""The matmul and generalized-IoU benchmarks time the computation they report."""

import pytest
import torch
from expecting import error

from vitkernels.benchmarks import giou, matmul
from vitkernels.ops import generalized_box_iou
from vitkernels.tpu_estimate import compiler


@pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
def test_rows__estimated_without_a_chip():
    row = next(matmul.rows("estimate", "int8", 256))  # each further row takes as long
    assert (row.contender, row.how, row.device, row.peak) == ("xla", "ESTIMATE", "TPU v5e", 394e12)
    # At most the chip's peak, and at least a hundredth of it: a 256² matmul is dominated by launch and copies.
    assert 0.01 < row.utilization < 1
    assert row.utilization == pytest.approx(2 * 256**3 / (row.ms / 1e3) / 394e12)
    assert list(matmul.rows("estimate", "fp8", 256)) == []  # v5e has none


def test_rows__reject_an_unknown_dtype():
    with error("unknown_name", name="int4"):
        next(matmul.rows("estimate", "int4", 256))


def test_time_xla__is_plausible():
    torch_xla = pytest.importorskip("torch_xla")
    x = torch.ones(8, 8).to(torch_xla.device())
    assert 0 < matmul.time_xla(lambda: x @ x, calls=3) < 10_000


def test_min_bytes():
    assert giou.min_bytes(1024, 256, 4, "forward") == 1024 * 256 * 36
    assert giou.min_bytes(1024, 256, 2, "forward+backward") == 1024 * 256 * (20 + 36)


def test_jax_contenders__compute_giou():
    pytest.importorskip("jax")
    from vitkernels.bridge import pallas_op

    boxes = giou.random_boxes(4, 64, "cpu", torch.float32)
    expected = generalized_box_iou(*boxes)
    kernel = pallas_op(giou.pallas_on_gpu, name="test_giou_pallas_on_gpu")
    for found in (pallas_op(giou.xla_giou, name="test_giou_xla")(*boxes), kernel(*boxes, block=64)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # some twelve float32 roundings near 1


def test_unavailable__jax_without_gpu():
    """On a CPU nothing is missing. If jax cannot use the GPU, its contenders must not be timed on the CPU."""
    jax = pytest.importorskip("jax")
    boxes, _ = giou.random_boxes(2, 3, "cpu", torch.float32)
    assert giou.unavailable(boxes) == {}
    on_gpu = type("OnGpu", (), {"is_cuda": True, "shape": boxes.shape})()
    if jax.default_backend() != "gpu":
        assert set(giou.unavailable(on_gpu)) == {"jax.jit", "pallas"}
