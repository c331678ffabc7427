"""The benchmarks of products and of generalized IoU: what they time is what it should be."""

import pytest
import torch

from vitkernels.benchmarks import giou, matmul
from vitkernels.errors import UsageError
from vitkernels.ops import generalized_box_iou
from vitkernels.tpu_estimate import compiler


@pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
def test_without_a_chip_products_are_estimated_and_say_so():
    row = next(matmul.rows("estimate", "int8", 256))  # the others would take as long again
    assert (row.contender, row.how, row.device, row.peak) == ("xla", "ESTIMATE", "TPU v5e", 394e12)
    # No faster than the chip's peak; no slower than a hundred times that, launch and copies of 256² included.
    assert 0.01 < row.utilisation < 1
    assert row.utilisation == pytest.approx(2 * 256**3 / (row.ms / 1e3) / 394e12)
    assert list(matmul.rows("estimate", "fp8", 256)) == []  # v5e has none


def test_unknown_dtype():
    with pytest.raises(UsageError, match="unknown dtype 'int4'; known: bf16, int8, fp8"):
        next(matmul.rows("estimate", "int4", 256))


def test_time_on_xla():
    torch_xla = pytest.importorskip("torch_xla")
    x = torch.ones(8, 8).to(torch_xla.device())
    assert 0 < matmul.time_xla(lambda: x @ x, calls=3) < 10_000


def test_bytes_of_giou():
    assert giou.moved_bytes(1024, 256, 4, "forward") == 1024 * 256 * 36
    assert giou.moved_bytes(1024, 256, 2, "forward+backward") == 1024 * 256 * (20 + 36)


def test_jax_contenders_compute_giou():
    pytest.importorskip("jax")
    from vitkernels.bridge import pallas_op

    boxes = giou.draw(4, 64, "cpu", torch.float32)
    expected = generalized_box_iou(*boxes)
    kernel = pallas_op(giou.pallas_on_gpu, name="test_giou_pallas_on_gpu")
    for found in (pallas_op(giou.xla_giou, name="test_giou_xla")(*boxes), kernel(*boxes, block=64)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # a dozen float32 roundings of numbers near 1


def test_what_of_giou_cannot_be_measured_is_said():
    """On a CPU nothing is missing; on a GPU beside a jax that has none, jax's contenders would be timed on the CPU."""
    jax = pytest.importorskip("jax")
    boxes, _ = giou.draw(2, 3, "cpu", torch.float32)
    assert giou.left_out(boxes) == {}
    on_gpu = type("OnGpu", (), {"is_cuda": True, "shape": boxes.shape})()
    if jax.default_backend() != "gpu":
        assert set(giou.left_out(on_gpu)) == {"jax.jit", "pallas"} and "no GPU" in giou.left_out(on_gpu)["pallas"]
