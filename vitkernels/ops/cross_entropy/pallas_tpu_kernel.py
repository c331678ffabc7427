"""Cross-entropy for TPU: each row's loss and its gradient from one read of the logits.

Shape suffixes: B rows (images), C classes.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

f32 = jnp.float32
_BLOCK_BYTES = 2**22  # of float32 logits


def loss_and_gradient(logits_BC, targets, *, smoothing: float, ignore_index: int):
    """Return the loss (B, 1) of each row in float32, and its gradient (B, C) in the logits' dtype.

    targets: class numbers (B, 1) in int32, or distributions (B, C). A row with the number ignore_index has the loss 0
    and no gradient; with any other invalid class number, both are NaN.
    """
    B, C = logits_BC.shape
    rows = min(-(-B // 16) * 16, max(16, _BLOCK_BYTES // (4 * C) // 16 * 16))

    def spec(width):
        return pl.BlockSpec((rows, width), lambda i: (i, 0))

    return pl.pallas_call(
        partial(_kernel, smoothing=smoothing, ignore_index=ignore_index),
        grid=(pl.cdiv(B, rows),),
        in_specs=[spec(C), spec(targets.shape[1])],
        out_specs=[spec(1), spec(C)],
        out_shape=[jax.ShapeDtypeStruct((B, 1), f32), jax.ShapeDtypeStruct((B, C), logits_BC.dtype)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=100 * 2**20),
        name="cross_entropy",
    )(logits_BC, targets)


def _kernel(logits_ref, targets_ref, loss_ref, gradient_ref, *, smoothing: float, ignore_index: int):
    x = logits_ref[...].astype(f32)
    C = x.shape[1]
    largest = jnp.max(x, axis=1, keepdims=True)
    exponentials = jnp.exp(x - largest)
    total = jnp.sum(exponentials, axis=1, keepdims=True)
    log_total, softmax = largest + jnp.log(total), exponentials / total
    targets = targets_ref[...]
    if jnp.issubdtype(targets.dtype, jnp.floating):
        target = targets.astype(f32) * (1.0 - smoothing) + smoothing / C
        mass = jnp.sum(target, axis=1, keepdims=True)
        loss_ref[...] = mass * log_total - jnp.sum(target * x, axis=1, keepdims=True)
        gradient_ref[...] = (softmax * mass - target).astype(gradient_ref.dtype)
        return
    hot = lax.broadcasted_iota(jnp.int32, x.shape, 1) == targets
    loss = (1.0 - smoothing) * (log_total - jnp.sum(jnp.where(hot, x, 0.0), axis=1, keepdims=True))
    if smoothing > 0.0:
        loss += smoothing * (log_total - jnp.sum(x, axis=1, keepdims=True) / C)
    gradient = softmax - smoothing / C - jnp.where(hot, 1.0 - smoothing, 0.0)
    known, ignored = (targets >= 0) & (targets < C), targets == ignore_index
    loss_ref[...] = jnp.where(ignored, 0.0, jnp.where(known, loss, jnp.nan))
    gradient_ref[...] = jnp.where(ignored, 0.0, jnp.where(known, gradient, jnp.nan)).astype(gradient_ref.dtype)
