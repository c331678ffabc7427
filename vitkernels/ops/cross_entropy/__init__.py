"""Cross-entropy of logits with class indices or class distributions (mixup), with label smoothing.

Shape suffixes: B rows (images), C classes.
"""

import torch
from torch import Tensor

from vitkernels.errors import UsageError
from vitkernels.ops.checks import check_floating, check_same_device
from vitkernels.registry.op import Op

BACKENDS = Op.in_folder(
    __name__,
    ("reference", "triton", "pallas_tpu"),
    auto={"cuda": ("triton",), "tpu": ("pallas_tpu",)},
)


def cross_entropy(
    logits_BC: Tensor,
    targets: Tensor,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    *,
    backend: str = "auto",
) -> Tensor:
    """Return the mean cross-entropy, as torch.nn.functional.cross_entropy does, computed in float32 for any dtype.

    Args:
        logits_BC: floating point.
        targets: class indices (B,), or floating-point distributions (B, C), which need not sum to 1.
        label_smoothing: the share of each target, in [0, 1], that is spread evenly over all classes
            (Szegedy et al. 2015, arXiv 1512.00567).
        ignore_index: rows with this class index are excluded from the mean. If no row remains, the loss is NaN and the
            gradient zero.
        backend: "auto" or a name from BACKENDS.names().

    Returns:
        The loss, a float32 scalar (float64 for float64 logits).

    Raises:
        UsageError (a ValueError): invalid shapes, dtypes, devices or label_smoothing, or a named backend that cannot
            take the call. The reference raises its own error for a class index out of range. Kernels cannot raise, and
            return NaN.
    """
    _check(logits_BC, targets, label_smoothing)
    args = logits_BC, targets, label_smoothing, ignore_index
    return BACKENDS.pick(backend, logits_BC.device, *args).run(*args)


def _check(logits: Tensor, targets: Tensor, label_smoothing: float) -> None:
    check_floating("cross_entropy", "logits", logits)
    if logits.ndim != 2 or 0 in logits.shape:
        raise UsageError(
            f"logits must have shape (batch, classes) without a zero-sized dimension, got {tuple(logits.shape)}",
            code="ops.cross_entropy.shape", argument="logits", shape=tuple(logits.shape),
        )  # fmt: skip
    if targets.dtype == torch.bool:
        raise UsageError(
            "targets must be class indices or floating-point distributions, got torch.bool",
            code="ops.cross_entropy.dtype", argument="targets", dtype=targets.dtype,
        )  # fmt: skip
    expected = tuple(logits.shape) if targets.dtype.is_floating_point else (logits.shape[0],)
    if tuple(targets.shape) != expected:
        raise UsageError(
            f"targets must be class indices of shape ({logits.shape[0]},) or floating-point distributions of shape "
            f"{tuple(logits.shape)}; got {targets.dtype} {tuple(targets.shape)}",
            code="ops.cross_entropy.shape", argument="targets", shape=tuple(targets.shape), expected=expected,
        )  # fmt: skip
    check_same_device("cross_entropy", "logits", logits, targets=targets)
    if not 0.0 <= label_smoothing <= 1.0:
        raise UsageError(
            f"label_smoothing must be in [0, 1], got {label_smoothing}",
            code="ops.cross_entropy.label_smoothing", label_smoothing=label_smoothing,
        )  # fmt: skip
