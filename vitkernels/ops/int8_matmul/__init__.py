"""int8_matmul: the exact int32 product of two int8 matrices.

    out_MN = int8_matmul(x_MK, w_KN)                # either may be a transposed view: int8_matmul(x_MK, w_NK.T)

Shape suffixes: M rows, K the summed dimension, N columns.
"""

import torch
from torch import Tensor

from vitkernels.errors import UsageError
from vitkernels.ops.checks import check_same_device
from vitkernels.registry.op import Op

# The largest K whose sums fit int32 for all operands: (-128)² · 131071 < 2³¹.
LARGEST_K = 131071

BACKENDS = Op.in_folder(
    __name__,
    ("reference", "triton", "pallas_tpu"),
    auto={"cuda": ("triton",), "tpu": ("pallas_tpu",)},
)


def int8_matmul(x_MK: Tensor, w_KN: Tensor, *, backend: str = "auto") -> Tensor:
    """Return x @ w, exact, as row-major int32 (M, N).

    Args:
        x_MK, w_KN: int8, with any strides and sizes. Integers have no gradient, so the op is not differentiable.
        backend: "auto" or a name from BACKENDS.names().

    Raises:
        UsageError (a ValueError): invalid shapes, dtypes or devices, K above 131071, where a sum could overflow int32,
            or a named backend that cannot take the call.

    Source: the int8 kernel of "The Rise of Pallas" (C. Rand, 2024), generalized to any size on TPU and GPU.
    """
    for name, matrix in (("x", x_MK), ("w", w_KN)):
        if matrix.dtype != torch.int8:
            raise UsageError(
                f"{name} must be int8, got {matrix.dtype}; quantize floating-point matrices first",
                code="ops.int8_matmul.dtype", argument=name, dtype=matrix.dtype,
            )  # fmt: skip
        if matrix.ndim != 2:
            raise UsageError(
                f"{name} must be a matrix, got shape {tuple(matrix.shape)}; flatten leading dimensions with "
                ".flatten(0, -2)",
                code="ops.int8_matmul.shape", argument=name, shape=tuple(matrix.shape),
            )  # fmt: skip
    if x_MK.shape[1] != w_KN.shape[0]:
        raise UsageError(
            f"x (M, K) and w (K, N) must have the same K, got {tuple(x_MK.shape)} and {tuple(w_KN.shape)}; pass w.T if "
            "w is stored as (N, K)",
            code="ops.int8_matmul.shape", argument="w", shape=tuple(w_KN.shape), x=tuple(x_MK.shape),
        )  # fmt: skip
    check_same_device("int8_matmul", "x", x_MK, w=w_KN)
    if x_MK.shape[1] > LARGEST_K:
        raise UsageError(
            f"a sum over K = {x_MK.shape[1]} products could overflow int32; split K into parts of at most {LARGEST_K}",
            code="ops.int8_matmul.overflow", K=x_MK.shape[1], limit=LARGEST_K,
        )  # fmt: skip
    return BACKENDS.pick(backend, x_MK.device, x_MK, w_KN).run(x_MK, w_KN)
