"""A linear layer in mixed precision whose parameters' gradients take no passes of their own.

Shape suffixes: K input features, N output features; "..." any dimensions before them (images, tokens).
"""

import torch
from torch import Tensor

from vitkernels.autocast import cast
from vitkernels.errors import UsageError
from vitkernels.registry.op import Op

BACKENDS = Op.in_folder(
    __name__,
    ("reference", "triton", "pallas_hopper"),
    auto={"cuda": ("triton",)},
    features=lambda x, weight, bias, is_qkv: (tuple(weight.shape[::-1]), x.dtype),
)


def linear(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, is_qkv: bool = False, backend: str = "auto"
) -> Tensor:
    """x weightᵀ + bias: (..., K) -> (..., N).

    Under autocast a float32 weight's gradient is a product of bfloat16 tensors that is summed in float32, rounded to
    bfloat16 and cast back. Every other backend leaves it as it was summed.

    Args:
        x: floating, (..., K).
        weight_NK, bias_N: as in nn.Linear(K, N). The bias may have another dtype; its gradient has that too.
        is_qkv: the outputs are the queries, keys and values of softmax attention, a third each, and the keys go there
            as they are (no norm, no rotation). Their bias then adds one number to all scores of a query, which softmax
            does not see: its gradient is zero, and the kernels do not sum it up but say so. The reference sums it up,
            and finds what rounding leaves.
        backend: "auto" or a name. triton: the library's product, gradients of the parameters by kernels; pallas_hopper:
            the product by a kernel of its own too, on NVIDIA Hopper, which rounds after the bias and does not round it.

    Returns:
        (..., N) in autocast's dtype where autocast is on, else in x's.

    Raises:
        UsageError (a ValueError): shapes or dtypes that do not fit, or a named backend that cannot take the call.
    """
    check_linear(x, weight_NK, bias_N)
    if is_qkv and len(weight_NK) % 3:
        raise UsageError(f"is_qkv means three equal parts of the outputs, and there are {len(weight_NK)}")
    (x,) = cast(x)
    args = x, weight_NK, bias_N, is_qkv
    return BACKENDS.pick(backend, x.device, *args).run(*args)


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, number: str = "", features: int | None = None) -> None:
    """Raises UsageError unless weight<number> and bias<number> are a linear layer's that takes `features` beside x; by
    default x's own."""
    if x.ndim == 0:
        raise UsageError("x must be (..., input features), got a scalar; x[None] has one feature")
    features = x.shape[-1] if features is None else features
    if not x.dtype.is_floating_point or not weight.dtype.is_floating_point:
        raise UsageError(f"x and weight{number} must be floating, got {x.dtype} and {weight.dtype}")
    if weight.ndim != 2 or weight.shape[1] != features:
        raise UsageError(
            f"weight{number} must be (outputs, {features}) beside x {tuple(x.shape)}; got {tuple(weight.shape)}"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.dtype.is_floating_point):
        raise UsageError(
            f"bias{number} must be floating, of shape ({weight.shape[0]},); got {bias.dtype} {tuple(bias.shape)}"
        )
    for name, tensor in ((f"weight{number}", weight), (f"bias{number}", bias)):
        if tensor is not None and tensor.device != x.device:
            raise UsageError(f"{name} is on {tensor.device}, x on {x.device}; move them to one device")
    if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise UsageError(f"x is {x.dtype} and weight{number} {weight.dtype}; cast one of them, or use torch.autocast")
