"""Time generalized IoU of (images, boxes, 4) pairs: plain torch, torch.compile, jitted JAX, Pallas and Triton.

The contenders are measured on an NVIDIA GPU, or on the CPU without Pallas and Triton, which would be interpreted there.
XLA's fusion and the Pallas kernel are estimated for TPU v5e from libtpu's schedules.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from vitkernels.ops import generalized_box_iou
from vitkernels.tpu_estimate.compile_process import compile_in
from vitkernels.tpu_estimate.estimate import estimate_program


def random_boxes(images: int, boxes: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two tensors of random boxes in an image of 256 × 256 pixels, at least 1 pixel wide and high."""

    def one() -> Tensor:
        corner = torch.rand(images, boxes, 2, device=device) * 255
        size = 1 + torch.rand(images, boxes, 2, device=device) * (255 - corner)
        return torch.cat((corner, corner + size), dim=-1).to(dtype)

    return one(), one()


def min_bytes(images: int, boxes: int, itemsize: int, pass_name: str) -> int:
    """Return the minimum bytes that a pass moves: boxes read once; scores (float32) and gradients written once."""
    count = images * boxes
    forward = count * (2 * 4 * itemsize + 4)
    return forward if pass_name == "forward" else forward + count * (4 * 4 * itemsize + 4)


def unavailable(preds: Tensor) -> dict[str, str]:
    """Return the contenders that cannot be measured on the device of these boxes, with the reasons."""
    try:
        backend = _jax().default_backend()
    except ImportError:
        return dict.fromkeys(("jax.jit", "pallas"), "jax is not installed")
    if not preds.is_cuda:
        return {}
    if backend != "gpu":
        return dict.fromkeys(("jax.jit", "pallas"), f"jax runs on {backend}, not on the GPU: pip install 'jax[cuda13]'")
    count = preds.shape[:-1].numel()
    return {"pallas": f"{count} boxes are not a multiple of {_PALLAS_BLOCK}"} if count % _PALLAS_BLOCK else {}


def contenders(preds: Tensor, targets: Tensor) -> dict[str, Callable[[], object]]:
    """Return the forward calls of the available contenders; a call may return before the device is done."""
    missing = unavailable(preds)
    reference = partial(generalized_box_iou, backend="reference")
    compiled = torch.compile(reference, dynamic=False)
    found: dict[str, Callable[[], object]] = {"torch": lambda: reference(preds, targets)}
    found["torch.compile"] = lambda: compiled(preds, targets)
    if "jax.jit" not in missing:
        jax_preds, jax_targets = _as_jax(preds), _as_jax(targets)
        jitted = _jax().jit(xla_giou)
        found["jax.jit"] = lambda: jitted(jax_preds, jax_targets)
    if preds.is_cuda:
        if "pallas" not in missing:
            found["pallas"] = lambda: pallas_on_gpu(jax_preds, jax_targets)
        found["triton"] = lambda: generalized_box_iou(preds, targets, backend="triton")
        found["torch.compile again"] = found["torch.compile"]
    return found


def training_contenders(preds: Tensor, targets: Tensor) -> dict[str, Callable[[], object]]:
    """Return forward-and-backward calls, with both tensors' gradients, of the contenders that support autograd."""
    preds, targets = preds.detach().requires_grad_(), targets.detach().requires_grad_()
    grad = torch.rand(preds.shape[:-1], device=preds.device)

    def both(function):
        return torch.autograd.grad(function(preds, targets), (preds, targets), grad)

    reference = partial(generalized_box_iou, backend="reference")
    compiled = torch.compile(reference, dynamic=False)
    found: dict[str, Callable[[], object]] = {"torch": partial(both, reference)}
    found["torch.compile"] = partial(both, compiled)
    if preds.is_cuda:
        found["triton"] = partial(both, partial(generalized_box_iou, backend="triton"))
    return found


def per_call_ms(function: Callable[[], object], repeats: int = 7, seconds: float = 0.05) -> float:
    """Return the milliseconds per call of many back-to-back calls, host time included; the median of `repeats`."""

    def run(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = function()
        _wait(result)
        return (time.perf_counter() - start) / calls

    run(3)
    calls = max(1, min(1000, int(seconds / max(run(3), 1e-6))))
    return statistics.median(run(calls) for _ in range(repeats)) * 1e3


def _wait(result) -> None:
    if hasattr(result, "block_until_ready"):
        result.block_until_ready()
    elif torch.cuda.is_available():
        torch.cuda.synchronize()


# --- JAX --------------------------------------------------------------------------------------------------------------


def _jax():
    import jax

    return jax


def _as_jax(x: Tensor):
    """Return a copy as a JAX array, so that JAX may choose its layout."""
    import numpy as np

    array = _jax().numpy.asarray(np.asarray(x.float().cpu()))
    return array.astype(str(x.dtype).removeprefix("torch."))


def xla_giou(preds, targets):
    """Return generalized IoU in plain JAX, for XLA to fuse."""
    jnp = _jax().numpy
    (px1, py1, px2, py2), (tx1, ty1, tx2, ty2) = (
        [x[..., corner].astype(jnp.float32) for corner in range(4)] for x in (preds, targets)
    )
    width = jnp.maximum(jnp.minimum(px2, tx2) - jnp.maximum(px1, tx1), 0)
    height = jnp.maximum(jnp.minimum(py2, ty2) - jnp.maximum(py1, ty1), 0)
    hull_width = jnp.maximum(jnp.maximum(px2, tx2) - jnp.minimum(px1, tx1), 0)
    hull_height = jnp.maximum(jnp.maximum(py2, ty2) - jnp.minimum(py1, ty1), 0)
    intersection, hull = width * height, hull_width * hull_height
    union = (px2 - px1) * (py2 - py1) + (tx2 - tx1) * (ty2 - ty1) - intersection
    return intersection / union - (hull - union) / hull


_PALLAS_BLOCK = 1024


def pallas_on_gpu(preds, targets, block: int = _PALLAS_BLOCK):
    """Return generalized IoU by a minimal Pallas kernel for GPUs, which Pallas lowers to Triton.

    The number of boxes must be a multiple of the block.
    """
    return _pallas_on_gpu()(preds, targets, block)


@cache
def _pallas_on_gpu():
    jax = _jax()
    from jax.experimental import pallas as pl

    def kernel(preds_ref, targets_ref, out_ref):
        boxes = [[ref[:, corner] for corner in range(4)] for ref in (preds_ref, targets_ref)]
        out_ref[...] = xla_giou(*(_Corners(corners) for corners in boxes))

    def run(preds, targets, block):
        images, boxes, _ = preds.shape
        count = images * boxes
        if count % block:
            raise ValueError(f"the number of boxes, {count}, must be a multiple of {block}")
        spec = pl.BlockSpec((block, 4), lambda i: (i, 0))
        out = pl.pallas_call(
            kernel,
            grid=(count // block,),
            in_specs=[spec, spec],
            out_specs=pl.BlockSpec((block,), lambda i: (i,)),
            out_shape=jax.ShapeDtypeStruct((count,), "float32"),
        )(preds.reshape(count, 4), targets.reshape(count, 4))
        return out.reshape(images, boxes)

    return jax.jit(run, static_argnums=2)


class _Corners(tuple):
    """Four arrays that support the indexing boxes[..., corner]."""

    def __getitem__(self, index):
        return super().__getitem__(index[-1])


# --- estimates for TPU ------------------------------------------------------------------------------------------------

ESTIMATED = ("xla", "pallas")


def build(contender: str, pass_name: str, dtype: str, images: int, boxes: int):
    """Return a contender's pass as a JAX function, and the shapes of its arrays."""
    from vitkernels.ops.generalized_box_iou import pallas_tpu_kernel

    jax = _jax()
    arrays = [jax.ShapeDtypeStruct((images, boxes, 4), dtype)] * 2
    forward = xla_giou if contender == "xla" else partial(pallas_tpu_kernel.giou, eps=None)
    if pass_name == "forward":
        return forward, arrays
    arrays = [*arrays, jax.ShapeDtypeStruct((images, boxes), "float32")]
    if contender == "xla":
        return (lambda preds, targets, grad: jax.vjp(xla_giou, preds, targets)[1](grad)), arrays
    return (lambda preds, targets, grad: pallas_tpu_kernel.giou_vjp((preds, targets), (), (grad,), eps=None)), arrays


def estimate_ms(contender: str, pass_name: str, dtype: str, images: int, boxes: int) -> tuple[float, list[str]]:
    """Return the estimated milliseconds on a TPU v5e, and the operations without a readable schedule."""
    with tempfile.TemporaryDirectory(prefix="vitkernels_giou_") as folder:
        dump = compile_in(Path(folder), f"{__name__}:build", contender, pass_name, dtype, images, boxes)
        program = estimate_program(dump)
    return program.estimate_ms, program.untimed
