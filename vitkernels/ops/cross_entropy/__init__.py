"""Cross-entropy of logits with class numbers or with distributions over classes (mixup), label smoothing included.

Shape suffixes: B rows (images), C classes.
"""

import torch
from torch import Tensor

from vitkernels.errors import UsageError
from vitkernels.registry.op import Op

BACKENDS = Op.in_folder(
    __name__,
    ("reference", "triton"),
    auto={"cuda": ("triton",)},
)


def cross_entropy(
    logits_BC: Tensor,
    targets: Tensor,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    *,
    backend: str = "auto",
) -> Tensor:
    """torch.nn.functional.cross_entropy with reduction="mean", in float32 whatever the logits' dtype.

    Args:
        logits_BC: floating.
        targets: class numbers (B,), or a distribution (B, C) for each row, floating; it need not add up to 1.
        label_smoothing: in [0, 1]: this share of each target is spread evenly over all classes
            (Szegedy et al. 2015, arXiv 1512.00567).
        ignore_index: rows with this class number count for nothing; the mean is over the others (NaN without any,
            and no gradient).
        backend: "auto" or a name.

    Returns:
        the loss, a float32 scalar (float64 for float64 logits).

    Raises:
        UsageError (a ValueError): shapes, dtypes or label_smoothing that do not fit, or a named backend that cannot
            take the call. A class number that is no class is the reference's own error; kernels cannot raise, and give
            NaN.
    """
    _check(logits_BC, targets, label_smoothing)
    args = logits_BC, targets, label_smoothing, ignore_index
    return BACKENDS.pick(backend, logits_BC.device, *args).run(*args)


def _check(logits: Tensor, targets: Tensor, label_smoothing: float) -> None:
    if logits.ndim != 2 or not logits.dtype.is_floating_point or 0 in logits.shape:
        raise UsageError(
            f"logits must be floating, of shape (batch, classes); got {logits.dtype} {tuple(logits.shape)}"
        )
    soft = targets.dtype.is_floating_point
    expected = tuple(logits.shape) if soft else (logits.shape[0],)
    if tuple(targets.shape) != expected or targets.dtype == torch.bool:
        raise UsageError(
            f"targets must be class numbers of shape ({logits.shape[0]},), or floating distributions of shape "
            f"{tuple(logits.shape)}; got {targets.dtype} {tuple(targets.shape)}"
        )
    if targets.device != logits.device:
        raise UsageError(f"targets are on {targets.device}, logits on {logits.device}; move them to one device")
    if not 0.0 <= label_smoothing <= 1.0:
        raise UsageError(f"label_smoothing must lie in [0, 1], got {label_smoothing}")
