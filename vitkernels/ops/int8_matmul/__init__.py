"""int8_matmul: the product of two int8 matrices, in int32, exact.

    out_MN = int8_matmul(x_MK, w_KN)                # either may be a transposed view: int8_matmul(x_MK, w_NK.T)

Shape suffixes: M rows, K the summed dimension, N columns.
"""

import torch
from torch import Tensor

from vitkernels.errors import UsageError
from vitkernels.registry.op import Op

# (-128)² · 131071 is the largest sum that int32 holds whatever the operands are.
LARGEST_K = 131071

BACKENDS = Op.in_folder(
    __name__,
    ("reference", "triton", "pallas_tpu"),
    auto={"cuda": ("triton",), "tpu": ("pallas_tpu",)},
)


def int8_matmul(x_MK: Tensor, w_KN: Tensor, *, backend: str = "auto") -> Tensor:
    """x @ w in int32, exact: int8 (M, K) and (K, N), of any strides and any sizes, to int32 (M, N), row-major.

    backend: "auto" (the fastest that takes the call here) or one of BACKENDS.names().

    Raises UsageError for other shapes and dtypes, for operands on two devices, for K above 131071, where a sum of
    products could leave int32, and where the named backend cannot run.

    Not differentiable: integers have no gradient.
    Source: the int8 kernel of "The Rise of Pallas" (C. Rand, 2024), here for any size, on TPU and GPU.
    """
    for name, matrix in (("x", x_MK), ("w", w_KN)):
        if matrix.ndim != 2 or matrix.dtype != torch.int8:
            raise UsageError(
                f"int8_matmul takes two int8 matrices; {name} is {matrix.dtype} of shape {tuple(matrix.shape)}. "
                "Flatten leading dimensions with .flatten(0, -2); quantize floats first"
            )
    if x_MK.shape[1] != w_KN.shape[0]:
        raise UsageError(
            f"int8_matmul takes (M, K) and (K, N), got {tuple(x_MK.shape)} and {tuple(w_KN.shape)}; "
            "pass w.T where w is stored as (N, K)"
        )
    if x_MK.device != w_KN.device:
        raise UsageError(f"x is on {x_MK.device}, w on {w_KN.device}; move them to one device")
    if x_MK.shape[1] > LARGEST_K:
        raise UsageError(f"a sum over K = {x_MK.shape[1]} could leave int32; split K into parts of at most {LARGEST_K}")
    return BACKENDS.pick(backend, x_MK.device, x_MK, w_KN).run(x_MK, w_KN)
