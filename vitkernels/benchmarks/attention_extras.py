"""Time what bias, masks, segments, causality and rope add to an attention call, next to SDPA and flex_attention.

Shape suffixes: B batch, H heads, N tokens, D head dim, E = H * D, 3 = q, k, v.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitkernels import attention
from vitkernels.benchmarks.attention import flex
from vitkernels.benchmarks.tables import markdown
from vitkernels.benchmarks.timing import Replays, Timing

SEGMENTS = 4  # of equal length in a row
KEPT = 0.75  # of the keys of a padded image


def extras(shape: tuple[int, int, int, int]) -> dict[str, dict[str, Any]]:
    """Return the keywords of each kind of call at the shape (B, H, N, D)."""
    B, H, N, D = shape
    device = "cuda"
    bias_1HNN = torch.randn(1, H, N, N, device=device)
    angles_ND = torch.arange(N - 1, device=device)[:, None] / torch.arange(1, D + 1, device=device)
    return {
        "plain": {},
        "bias (1, H, N, N)": {"bias": bias_1HNN},
        "and its gradient": {"bias": bias_1HNN.clone().requires_grad_()},
        "bias in bfloat16": {"bias": bias_1HNN.bfloat16()},
        "and its gradient in bfloat16": {"bias": bias_1HNN.bfloat16().requires_grad_()},
        "padding mask": {"mask": (torch.arange(N, device=device) < KEPT * N).expand(B, 1, 1, N)},
        f"{SEGMENTS} segments": {"segment_ids": (torch.arange(N, device=device) * SEGMENTS // N).expand(B, N)},
        "causal": {"is_causal": True},
        "rope": {"rope": torch.cat([angles_ND.sin(), angles_ND.cos()], 1)},
    }


def measure_extras(shape: tuple[int, int, int, int], backends: tuple[str, ...]) -> str:
    """Return a table of forward + backward in ms at the shape (B, H, N, D), and the ratios to the plain call.

    Each call is timed in turns with the plain one. sdpa gets its masks and biases dense, and rotates q and k in
    separate operations. A call that fails shows its error.
    """
    calls = extras(shape)
    cells = []
    contenders: dict[str, Callable] = {name: attention.get(name).qkvpacked for name in (*backends, "sdpa")}
    for name, attend in [*contenders.items(), ("flex compiled", _flex_call)]:
        plain = _replays(attend, {}, shape)
        cells.append((name, *(_cell(_replays(attend, keywords, shape), plain) for keywords in calls.values())))
    _block_mask.cache_clear()  # frees the masks and the tensors that they are made from
    return markdown.table(("contender", *calls), cells)


def _cell(call: Replays | str, plain: Replays | str) -> str:
    """Return the time of a call, and its ratio to the plain one; of a call that failed, the error."""
    if isinstance(call, str):
        return call
    if isinstance(plain, str):
        return f"{Timing.in_turns([call])[0].median:.3f}"
    times = Timing.in_turns([call, plain])
    return f"{times[0].median:.3f} ({times[0].median / times[1].median:.2f})"


def _replays(attend: Callable, keywords: dict, shape: tuple[int, int, int, int]) -> Replays | str:
    """Return the call, ready to be timed; if it fails, the error."""
    B, H, N, D = shape
    qkv_BN3HD = torch.randn(B, N, 3, H, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    do_BNE = torch.randn(B, N, H * D, device="cuda", dtype=torch.bfloat16)
    leaves = [qkv_BN3HD, *(x for x in keywords.values() if isinstance(x, Tensor) and x.requires_grad)]

    def both():
        gradients = torch.autograd.grad(attend(qkv_BN3HD, **keywords), leaves, do_BNE)
        gradients[0].contiguous()

    try:
        return Replays(both)
    except Exception as error:  # a contender without a kernel for this call
        return " ".join(f"{type(error).__name__}: {error}".split())[:60].replace("|", "/")


def _flex_call(qkv_BN3HD: Tensor, bias=None, mask=None, segment_ids=None, is_causal=False, rope=None) -> Tensor:
    """Call flex_attention with the extra as a score_mod or a block mask, as its documentation advises."""
    if rope is not None:
        raise NotImplementedError("flex_attention does not rotate")
    q_BHND, k_BHND, v_BHND = qkv_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
    block_mask = None
    if mask is not None or segment_ids is not None or is_causal:
        block_mask = _block_mask(q_BHND.shape, mask, segment_ids)

    bias_HNM = None if bias is None else bias[0]  # flex_attention takes no numbers among the indices

    def add_bias(score, _b, h, n, m):
        return score + bias_HNM[h, n, m]

    out_BHND = flex()(q_BHND, k_BHND, v_BHND, score_mod=None if bias is None else add_bias, block_mask=block_mask)
    return out_BHND.transpose(1, 2).flatten(2)


@functools.cache
def _block_mask(shape: tuple[int, ...], mask: Tensor | None, segment_ids: Tensor | None):
    """Return the block mask of a padding mask, of segments, or of causality."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask_BM = None if mask is None else mask[:, 0, 0]

    def keeps(b, _h, n, m):
        if mask_BM is not None:
            return mask_BM[b, m]
        return segment_ids[b, n] == segment_ids[b, m] if segment_ids is not None else n >= m

    B, _, N, _ = shape
    return create_block_mask(keeps, B, None, N, N, device="cuda")
