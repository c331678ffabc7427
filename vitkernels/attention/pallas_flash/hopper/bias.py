"""A bias and a mask as the Hopper kernels of `pallas_flash` read them: in units of q k, padded and in groups.

The kernels start the product of scores, q k, from the bias. So it is divided by the scale, which must be positive (see
contract.folded_scale), and stored in the order in which the threads hold the product (see bias_groups.py).

Shape suffixes: B batch, H heads, N query tokens, M key tokens.
"""

import math

import torch
from torch import Tensor

from vitkernels.attention.pallas_flash.hopper import bias_groups
from vitkernels.attention.pallas_flash.hopper.tiles import stored_bias_shape
from vitkernels.bridge.operator import differentiable_once, operator


def padded_bias(
    bias: Tensor | None, mask: Tensor | None, queries: int, keys: int, scale: float, hides_keys: bool = False
) -> Tensor | None:
    """Return the sum of bias and mask (-inf where it is False) as the kernels read it, or None for neither.

    It has the shape stored_bias_shape. This runs outside the operators of attention: a model computes it once for all
    layers that share a bias.

    In float32, each row is shifted by its maximum, which does not change its softmax and keeps the sums of q k and the
    bias small. A huge bias absorbs its score there, so SDPA averages the keys of a row of -1e9 or finfo.min. To match
    that, rows whose maximum is 2^29 or more in size are shifted so that it becomes LOW: far from every score, but
    finite. Their other keys get weights of 0. The padding is -inf.

    The result is in bfloat16 for a mask alone, and for a bias in bfloat16 if the scale is a power of two and no keys
    are hidden in other ways. The kernels then read half as many bytes. Only rows whose maximum is 1024 or more in size
    are shifted there, and the differences of keys that have a weight remain exact.

    Args:
        hides_keys: whether causality, segments or ids also hide keys. The maximum of a row may then be hidden, and
            differences to it would be rounded.
    """
    if bias is None and mask is None:
        return None
    if bias is None:  # 0 and -inf have no unit, and are not rounded
        assert mask is not None
        bias, scale, hides_keys = torch.zeros((), device=mask.device, dtype=torch.bfloat16), 1.0, False
    if mask is not None:
        bias = torch.where(mask, bias if bias.dtype == torch.bfloat16 else bias.float(), -torch.inf)
    bias = bias[(None,) * (4 - bias.ndim)]
    is_exact = bias.dtype == torch.bfloat16 and math.frexp(scale)[0] == 0.5 and not hides_keys
    return _stored(bias.expand(*bias.shape[:2], queries, keys), scale, is_exact)


@operator("pallas_flash_hopper_bias(Tensor bias, float scale, bool in_bfloat16) -> Tensor")
def _stored(bias_BHNM: Tensor, scale: float, in_bfloat16: bool) -> Tensor:
    return bias_groups.stored(bias_BHNM, scale, _dtype(in_bfloat16))


def _dtype(in_bfloat16: bool) -> torch.dtype:
    return torch.bfloat16 if in_bfloat16 else torch.float32


@_stored.register_fake
def _(bias, scale, in_bfloat16):
    B, H, N, M = bias.shape
    return bias.new_empty(stored_bias_shape((B, H), N, M), dtype=_dtype(in_bfloat16))


@operator(
    "pallas_flash_hopper_bias_backward(Tensor gradient, SymInt N, SymInt M, float scale, ScalarType dtype) -> Tensor"
)
def _in_rows(gradient: Tensor, N: int, M: int, scale: float, dtype: torch.dtype) -> Tensor:
    return bias_groups.in_rows(gradient.contiguous(), N, M, 1 / scale, dtype)


@_in_rows.register_fake
def _(gradient, N, M, scale, dtype):
    return gradient.new_empty(*gradient.shape[:2], N, M, dtype=dtype)


def _save(ctx, inputs, output):
    bias, ctx.scale, _ = inputs
    ctx.size, ctx.dtype = bias.shape[2:], bias.dtype
    ctx.set_materialize_grads(False)


@differentiable_once("pallas_flash")
def _differentiate(ctx, gradient):
    # A bias that was raised gets a weight of 0, and so a gradient of 0, either way.
    return None if gradient is None else _in_rows(gradient, *ctx.size, ctx.scale, ctx.dtype), None, None


_stored.register_autograd(_differentiate, setup_context=_save)
