"""A transformer's MLP: linear, GELU, linear, with GELU and the bias gradients fused into or next to the products.

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
    ("reference", "passes", "triton", "pallas_hopper", "pallas_tpu"),
    auto={"cuda": ("passes",), "tpu": ("pallas_tpu",)},
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
    """Return gelu(x weight1ᵀ + bias1) weight2ᵀ + bias2: (..., K) -> (..., O).

    For the backward pass the op saves x and the pre-activation, from which it recomputes GELU.

    Args:
        x: floating point, (..., K).
        weight1_NK, bias1_N, weight2_ON, bias2_O: the parameters of two nn.Linear. Omit bias2 if `layer_norm_residual`
            adds it: its gradient then needs no pass of its own.
        approximate: "none", the exact x Φ(x), or "tanh" (Hendrycks and Gimpel 2016, arXiv 1606.08415).
        keep_activation: save the activation and GELU's slope instead of the pre-activation. The backward pass then
            computes no GELU and writes one hidden tensor less, for one more hidden tensor of memory per layer.
        backend: "auto" or a name from BACKENDS.names(); they are the backends of `linear_gelu`, which describes them.

    Returns:
        (..., O) in autocast's dtype if autocast is on, else in x's.

    Raises:
        UsageError (a ValueError): invalid shapes, dtypes, devices or `approximate`, or a named backend that cannot take
            the call. Codes begin with "ops.linear." or "ops.linear_gelu.".
    """
    check_gelu(approximate)
    check_linear(x, weight1_NK, bias1_N, "1")
    check_linear(x, weight2_ON, bias2_O, "2", features=len(weight1_NK))
    (x,) = cast(x)
    keep = keep_activation and torch.is_grad_enabled()
    args = x, weight1_NK, bias1_N, weight2_ON, bias2_O, approximate == "tanh", keep
    return BACKENDS.pick(backend, x.device, *args).run(*args)
