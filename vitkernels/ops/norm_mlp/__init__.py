"""Join two sublayers and compute the MLP: residual add, LayerNorm, linear, GELU, linear.

Shape suffixes: B images, C channels, F hidden features, O output features; "..." any dimensions between images and
channels (tokens).
"""

import torch
from torch import Tensor

from vitkernels.autocast import dtype_of
from vitkernels.errors import UsageError
from vitkernels.ops.eight_bit_linear import check_eight_bit
from vitkernels.ops.layer_norm_residual import check_norm
from vitkernels.ops.linear import check_linear
from vitkernels.ops.linear_gelu import check_gelu
from vitkernels.registry.op import Op

BACKENDS = Op.in_folder(__name__, ("reference", "pallas_tpu"), auto={"tpu": ("pallas_tpu",)})


def norm_mlp(
    x: Tensor,
    branch: Tensor | None,
    norm_weight_C: Tensor,
    norm_bias_C: Tensor,
    weight1_FC: Tensor,
    bias1_F: Tensor | None,
    weight2_OF: Tensor,
    approximate: str = "none",
    eps: float = 1e-6,
    *,
    branch_bias_C: Tensor | None = None,
    layer_scale_C: Tensor | None = None,
    sample_scale_B: Tensor | None = None,
    keep_activation: bool = False,
    eight_bit: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return sum = x + sample_scale · layer_scale · (branch + branch_bias) and the MLP of LayerNorm(sum).

    The MLP is gelu(norm weight1ᵀ + bias1) weight2ᵀ: the next `layer_norm_residual` adds its last bias.

    Args:
        x, branch, norm_weight_C, norm_bias_C, eps, branch_bias_C, layer_scale_C, sample_scale_B: as in
            `layer_norm_residual`.
        weight1_FC, bias1_F, weight2_OF, approximate, keep_activation: as in `mlp`.
        eight_bit: torch.int8 or torch.float8_e4m3fn for products in 8 bits, as in `eight_bit_linear`, with the exact
            GELU and without keep_activation.
        backend: "auto" or a name from BACKENDS.names(). The reference is layer_norm_residual, then mlp.

    Returns:
        sum in x's dtype, and (B, ..., O) in autocast's dtype if autocast is on, else in x's.

    Raises:
        UsageError (a ValueError): as `layer_norm_residual` and `mlp` do, with their codes.
    """
    check_norm(x, branch, norm_weight_C, norm_bias_C, branch_bias_C, layer_scale_C, sample_scale_B)
    check_gelu(approximate)
    check_linear(x, weight1_FC, bias1_F, "1", mixed=True)
    check_linear(x, weight2_OF, None, "2", features=len(weight1_FC), mixed=True)
    if eight_bit is not None:
        check_eight_bit(eight_bit, weight1_FC, weight2_OF)
        if approximate != "none" or keep_activation:
            raise UsageError(
                "8-bit products need approximate='none' and keep_activation=False",
                code="ops.norm_mlp.eight_bit", approximate=approximate, keep_activation=keep_activation,
            )  # fmt: skip
    norm = x, branch, norm_weight_C, norm_bias_C, branch_bias_C, layer_scale_C, sample_scale_B
    keep = keep_activation and torch.is_grad_enabled()
    args = norm, weight1_FC, bias1_F, weight2_OF, eps, approximate == "tanh", keep, dtype_of(x), eight_bit
    return BACKENDS.pick(backend, x.device, *args).run(*args)
