"""A linear layer for mixed precision that computes its parameters' gradients without extra passes.

Shape suffixes: K input features, N output features; "..." any leading dimensions (images, tokens).
"""

import torch
from torch import Tensor

from vitkernels.autocast import cast
from vitkernels.errors import UsageError
from vitkernels.ops.checks import check_floating, check_same_device
from vitkernels.registry.op import Op

BACKENDS = Op.in_folder(
    __name__,
    ("reference", "triton", "pallas_hopper", "pallas_tpu"),
    auto={"cuda": ("triton",), "tpu": ("pallas_tpu",)},
    features=lambda x, weight, bias, is_qkv: (tuple(weight.shape[::-1]), x.dtype),
)


def linear(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, is_qkv: bool = False, backend: str = "auto"
) -> Tensor:
    """Return x weightᵀ + bias: (..., K) -> (..., N).

    Under autocast, PyTorch sums a float32 weight's gradient in float32, rounds it to bfloat16 and casts it back. Every
    backend except the reference keeps the float32 sum.

    Args:
        x: floating point, (..., K).
        weight_NK, bias_N: the parameters of nn.Linear(K, N). The bias may have another dtype, and so has its gradient.
        is_qkv: the outputs are the queries, keys and values of softmax attention, one third each, and the keys reach
            attention unchanged (no norm, no rotation). The keys' bias then adds the same number to all scores of a
            query, which softmax ignores, so its gradient is zero. Kernels return zeros without summing; the reference
            sums, and returns the rounding errors.
        backend: "auto" or a name from BACKENDS.names(). triton: the library's product, with the parameters' gradients
            by kernels. pallas_hopper: also the product by a kernel, for NVIDIA Hopper, which adds the unrounded bias
            before it rounds the sum.

    Returns:
        (..., N) in autocast's dtype if autocast is on, else in x's.

    Raises:
        UsageError (a ValueError): invalid shapes, dtypes or devices, or a named backend that cannot take the call.
    """
    check_linear(x, weight_NK, bias_N)
    check_qkv(weight_NK, is_qkv)
    (x,) = cast(x)
    args = x, weight_NK, bias_N, is_qkv
    return BACKENDS.pick(backend, x.device, *args).run(*args)


def check_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer: str = "", features: int | None = None, mixed: bool = False
) -> None:
    """Check the parameters of a linear layer that takes `features` inputs, by default those of x.

    layer: suffix of the parameters' names in messages, such as "1" for weight1. All codes begin with "ops.linear.".
    mixed: accept a weight of another dtype than x without autocast.
    """
    check_floating("linear", "x", x)
    check_floating("linear", f"weight{layer}", weight)
    if x.ndim == 0:
        raise UsageError(
            "x must have shape (..., input features), got a scalar; pass x[None] for one feature",
            code="ops.linear.shape", argument="x", shape=(),
        )  # fmt: skip
    features = x.shape[-1] if features is None else features
    if weight.ndim != 2 or weight.shape[1] != features:
        raise UsageError(
            f"weight{layer} must have shape (outputs, {features}) for x {tuple(x.shape)}; got {tuple(weight.shape)}",
            code="ops.linear.shape", argument=f"weight{layer}", shape=tuple(weight.shape), features=features,
        )  # fmt: skip
    if bias is not None:
        check_floating("linear", f"bias{layer}", bias, tuple(weight.shape[:1]))
    check_same_device("linear", "x", x, **{f"weight{layer}": weight, f"bias{layer}": bias})
    if not mixed and weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise UsageError(
            f"x is {x.dtype} and weight{layer} is {weight.dtype}; cast one of them, or use torch.autocast",
            code="ops.linear.mixed_dtypes", argument=f"weight{layer}", dtype=weight.dtype, expected=x.dtype,
        )  # fmt: skip


def check_qkv(weight: Tensor, is_qkv: bool) -> None:
    """Check that the outputs split into queries, keys and values."""
    if is_qkv and len(weight) % 3:
        raise UsageError(
            f"is_qkv=True splits the outputs into three equal parts; {len(weight)} is not a multiple of 3",
            code="ops.linear.is_qkv", outputs=len(weight),
        )  # fmt: skip
