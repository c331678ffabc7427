"""A linear layer that trains with 8-bit products; weight, gradients and result keep their dtypes.

Shape suffixes: K input features, N output features; "..." any leading dimensions (images, tokens).
"""

import torch
from torch import Tensor

from vitkernels.autocast import cast
from vitkernels.errors import UsageError
from vitkernels.ops.eight_bit_format import FEATURE_MULTIPLE, LARGEST
from vitkernels.ops.linear import check_linear
from vitkernels.registry.op import Op

BACKENDS = Op.in_folder(__name__, ("reference", "pallas_tpu"), auto={"tpu": ("pallas_tpu",)})


def eight_bit_linear(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
    *,
    backend: str = "auto",
) -> Tensor:
    """Return x weightᵀ + bias: (..., K) -> (..., N), with all three products of forward and backward pass in 8 bits.

    Operands are rounded to `dtype` at every call: x, the output's gradient and the weight with a scale per row of the
    product, and for the weight's gradient, which sums over tokens, with a scale per column.

    Args:
        x: floating point, (..., K).
        weight_NK, bias_N: the parameters of nn.Linear(K, N), in any floating-point dtype; N and K are multiples of 16.
        dtype: torch.int8 or torch.float8_e4m3fn.
        backend: "auto" or a name from BACKENDS.names(). reference: passes over the operands, by Triton kernels on
            NVIDIA GPUs. pallas_tpu: int8, rounded inside the products' kernels; the weight's gradient has scales per
            column of 1024 rows.

    Returns:
        (..., N) in autocast's dtype if autocast is on, else in x's.

    Raises:
        UsageError (a ValueError): invalid shapes, dtypes or devices, or a named backend that cannot take the call.
    """
    check_linear(x, weight_NK, bias_N, mixed=True)
    check_eight_bit(dtype, weight_NK)
    (x,) = cast(x)
    args = x, weight_NK, bias_N, dtype
    return BACKENDS.pick(backend, x.device, *args).run(*args)


def check_eight_bit(dtype: torch.dtype, *weights: Tensor) -> None:
    """Check that products of these weights can be in this dtype."""
    if dtype not in LARGEST:
        names = " or ".join(map(str, LARGEST))
        raise UsageError(f"8-bit products are in {names}, not {dtype}", code="ops.eight_bit_linear.dtype", dtype=dtype)
    for weight in weights:
        if any(size % FEATURE_MULTIPLE for size in weight.shape):
            shape = tuple(weight.shape)
            message = f"8-bit products require features in multiples of {FEATURE_MULTIPLE}, got a weight {shape}"
            raise UsageError(message, code="ops.eight_bit_linear.features", shape=shape, multiple=FEATURE_MULTIPLE)
