"""A transformer's MLP: linear, GELU, linear, with GELU and both bias gradients inside the products' own passes.

Shape suffixes: K input features, N hidden features, O output features; "..." images, tokens.
"""

import torch
from torch import Tensor

from vitkernels.autocast import cast
from vitkernels.ops.linear import check_linear
from vitkernels.ops.linear_gelu import check_gelu
from vitkernels.registry.op import Op

BACKENDS = Op.in_folder(
    __name__,
    ("reference", "passes", "triton", "pallas_hopper"),
    auto={"cuda": ("passes",)},
    features=lambda x, weight1, bias1, weight2, bias2, tanh, keep: (
        (*weight1.shape[::-1], weight2.shape[0], int(keep)),
        x.dtype,
    ),
)


def mlp(
    x: Tensor,
    weight1_NK: Tensor,
    bias1_N: Tensor | None,
    weight2_ON: Tensor,
    bias2_O: Tensor | None = None,
    approximate: str = "none",
    *,
    keep_activation: bool = False,
    backend: str = "auto",
) -> Tensor:
    """gelu(x weight1ᵀ + bias1) weight2ᵀ + bias2: (..., K) -> (..., O).

    For the backward pass it keeps x and what GELU was given, and calculates GELU again; or GELU's result and slope.

    Args:
        x: floating, (..., K).
        weight1_NK, bias1_N, weight2_ON, bias2_O: as in nn.Linear. Leave bias2 out where `layer_norm_residual` adds it:
            there its gradient costs no pass of its own.
        approximate: "none", the exact x Φ(x), or "tanh" (Hendrycks and Gimpel 2016, arXiv 1606.08415).
        keep_activation: keep GELU's result, and its slope instead of what it was given: as much memory again per
            layer, for a backward pass that has no GELU to calculate and writes a tensor of that size less.
        backend: "auto" or a name. `linear_gelu` says what passes, triton and pallas_hopper are.

    Returns:
        (..., O) in autocast's dtype where autocast is on, else in x's.

    Raises:
        UsageError (a ValueError): shapes, dtypes or `approximate` that do not fit, or a named backend that cannot take
            the call.
    """
    check_gelu(approximate)
    check_linear(x, weight1_NK, bias1_N, "1")
    check_linear(x, weight2_ON, bias2_O, "2", features=len(weight1_NK))
    (x,) = cast(x)
    keep = keep_activation and torch.is_grad_enabled()
    args = x, weight1_NK, bias1_N, weight2_ON, bias2_O, approximate == "tanh", keep
    return BACKENDS.pick(backend, x.device, *args).run(*args)
