"""Join two sublayers and start the next: residual add, LayerNorm and a linear layer.

Shape suffixes: B images, C channels, F output features; "..." any dimensions between images and channels (tokens).
"""

import torch
from torch import Tensor

from vitkernels.autocast import dtype_of
from vitkernels.ops.eight_bit_linear import check_eight_bit
from vitkernels.ops.layer_norm_residual import check_norm
from vitkernels.ops.linear import check_linear, check_qkv
from vitkernels.registry.op import Op

BACKENDS = Op.in_folder(__name__, ("reference", "pallas_tpu"), auto={"tpu": ("pallas_tpu",)})


def norm_linear(
    x: Tensor,
    branch: Tensor | None,
    norm_weight_C: Tensor,
    norm_bias_C: Tensor,
    weight_FC: Tensor,
    bias_F: Tensor | None = None,
    eps: float = 1e-6,
    *,
    branch_bias_C: Tensor | None = None,
    layer_scale_C: Tensor | None = None,
    sample_scale_B: Tensor | None = None,
    is_qkv: bool = False,
    eight_bit: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return sum = x + sample_scale · layer_scale · (branch + branch_bias) and LayerNorm(sum) weightᵀ + bias.

    In one kernel, the LayerNorm and the sums hide behind the matrix product, which is limited by arithmetic and not by
    memory. So does LayerNorm's gradient, whose input then never reaches memory.

    Args:
        x, branch, norm_weight_C, norm_bias_C, eps, branch_bias_C, layer_scale_C, sample_scale_B: as in
            `layer_norm_residual`.
        weight_FC, bias_F, is_qkv: as in `linear`.
        eight_bit: torch.int8 or torch.float8_e4m3fn for products in 8 bits, as in `eight_bit_linear`.
        backend: "auto" or a name from BACKENDS.names(). The reference is layer_norm_residual, then linear or
            eight_bit_linear.

    Returns:
        sum in x's dtype, and (B, ..., F) in autocast's dtype if autocast is on, else in x's.

    Raises:
        UsageError (a ValueError): as `layer_norm_residual` and `linear` do, with their codes.
    """
    check_norm(x, branch, norm_weight_C, norm_bias_C, branch_bias_C, layer_scale_C, sample_scale_B)
    check_linear(x, weight_FC, bias_F, mixed=True)
    check_qkv(weight_FC, is_qkv)
    if eight_bit is not None:
        check_eight_bit(eight_bit, weight_FC)
    norm = x, branch, norm_weight_C, norm_bias_C, branch_bias_C, layer_scale_C, sample_scale_B
    args = norm, weight_FC, bias_F, eps, is_qkv, dtype_of(x), eight_bit
    return BACKENDS.pick(backend, x.device, *args).run(*args)
