"""A linear layer and its GELU: the first half of a transformer's MLP. The whole MLP is `vitkernels.ops.mlp`.

Shape suffixes: K input features, N output features; "..." any dimensions before them (images, tokens).
"""

import torch
from torch import Tensor

from vitkernels.autocast import cast
from vitkernels.errors import UsageError
from vitkernels.ops.backends import Backends

BACKENDS = Backends(
    op="linear_gelu",
    modules={
        "reference": "vitkernels.ops.linear_gelu.reference",
        "passes": "vitkernels.ops.linear_gelu.passes",
        "triton": "vitkernels.ops.linear_gelu.triton",
        "pallas_hopper": "vitkernels.ops.linear_gelu.pallas_hopper",
        "pallas_tpu": "vitkernels.ops.linear_gelu.pallas_tpu",
    },
    preference={"cuda": ("passes",), "tpu": ("pallas_tpu",)},
    features=lambda x, weight, bias, tanh: (tuple(weight.shape[::-1]), x.dtype),
)


def linear_gelu(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, approximate: str = "none", *, backend: str = "auto"
) -> Tensor:
    """gelu(x weightᵀ + bias): (..., K) -> (..., N).

    Args:
        x: floating, (..., K).
        weight_NK, bias_N: as in nn.Linear(K, N). The bias may have another dtype; its gradient has that too.
        approximate: "none", the exact x Φ(x), or "tanh" (Hendrycks and Gimpel 2016, arXiv 1606.08415).
        backend: "auto" or a name. passes: the library's product, then one pass; triton: GELU in the epilogue of a
            product of its own; pallas_hopper: that too, behind the tensor cores' work, on NVIDIA Hopper.

    Returns:
        (..., N) in autocast's dtype where autocast is on, else in x's. GELU is calculated in float32 from the product
        rounded to that dtype, as F.gelu(F.linear(...)) does (pallas_hopper: from the product before it is rounded).

    Raises:
        UsageError (a ValueError): shapes, dtypes or `approximate` that do not fit, or a named backend that cannot take
            the call.
    """
    check_gelu(approximate)
    check_linear(x, x.shape[-1], weight_NK, bias_N, "")
    x, weight_NK = cast(x, weight_NK)
    args = x, weight_NK, bias_N, approximate == "tanh"
    return BACKENDS.pick(backend, x.device, *args).run(*args)


def check_gelu(approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise UsageError(f"approximate must be 'none' (exact) or 'tanh', got {approximate!r}")


def check_linear(x: Tensor, features: int, weight: Tensor, bias: Tensor | None, number: str) -> None:
    """Raises UsageError unless weight<number> and bias<number> are a linear layer's that takes `features` beside x."""
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
