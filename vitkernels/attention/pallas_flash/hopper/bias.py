"""A bias and a mask as the Hopper kernels of `pallas_flash` read them: float32 in log2 units, padded.

Shape suffixes: B batch, H heads, N query tokens, M key tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.attention.pallas_flash.hopper.tiles import LOG2E, LOW, padded

# The least finite score that the kernels compute from a bias, in log2 units; the bias LOW + _LEAST gives it. Both are
# above the start of the kernels' running maximum, so that a row of them is not mistaken for one without keys.
_LEAST = 4 * LOW


def padded_bias(bias: Tensor | None, mask: Tensor | None, queries: int, keys: int) -> Tensor | None:
    """Return the sum of bias and mask (-inf where it is False): (B or 1, H or 1, padded N, padded M); None for neither.

    It is contiguous, as the kernels assume: elementwise operations would keep the layout of a permuted bias.
    This runs outside the operators: a compiled model computes it once for all layers that share a bias, and autograd
    differentiates it.

    In float32 a very negative bias absorbs its score, so a row of finfo.min averages its keys in SDPA. To match that,
    the kernels replace the score by -LOW where the bias is at most LOW. Rows whose maximum is below LOW are shifted so
    that it equals LOW, which does not change their softmax.
    """
    if bias is None and mask is None:
        return None
    if bias is None:
        assert mask is not None
        bias = torch.zeros((), device=mask.device)
    total = bias.float()
    if mask is not None:
        total = torch.where(mask, total, -torch.inf)
    total = total[(None,) * (4 - total.ndim)]
    total = total.expand(*total.shape[:2], queries, keys)
    top = total.detach().amax(-1, keepdim=True)
    is_low = (top < LOW) & ~top.isinf()
    # Few steps over arrays of this size: without a compiler, each takes memory, and some is kept for the gradient.
    shifted = (total - torch.where(is_low, top, 0.0)) * LOG2E + torch.where(is_low, LOW, 0.0)
    raised = shifted.clamp(min=_LEAST + LOW)
    raised = torch.where(total == -torch.inf, total, raised)
    return F.pad(raised, (0, padded(keys) - keys, 0, padded(queries) - queries)).contiguous()
