"""Masks of keys and packed segments as ids, which the Hopper kernels of `pallas_flash` compare.

A query attends to the keys with its id.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.attention.pallas_flash.hopper.schedule import ROWS
from vitkernels.attention.pallas_flash.hopper.tiles import padded

_LEAST = torch.iinfo(torch.int32).min
MASKED, PADDING = _LEAST, _LEAST + 1  # ids of masked keys, and of padded queries

Ids = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def token_ids(shape: tuple[int, ...], keys: int, mask: Tensor | None, segment_ids: Tensor | None) -> Ids:
    """Encode mask and segments as ids: a query attends to the keys with its id. All ids are None if there are neither.

    This runs outside the operators, so a compiled model computes the ids once for all layers.

    Args:
        shape: of q, (B, H, N, D).
        keys: the number of keys, M.
        mask: boolean, (B or 1, 1, 1, M or 1) or with leading ones left out; True keeps.
        segment_ids: (B, N), for as many keys as queries.

    Returns the ids of queries (B, padded N) and of keys (B, padded M), int32; for each block of 64 queries the span of
    keys it needs (B, 2, padded N / 64), and for each block of 64 keys the span of queries: see RingKernel.span_of.
    """
    if mask is None and segment_ids is None:
        return None, None, None, None
    B, _, N, _ = shape
    device = mask.device if mask is not None else segment_ids.device  # type: ignore[union-attr]  # one is given
    if segment_ids is None:
        of_queries, of_keys = torch.zeros(2, B, max(N, keys), dtype=torch.int32, device=device).unbind(0)
    else:
        of_queries = of_keys = segment_ids.to(torch.int32)
    of_queries, of_keys = of_queries[:, :N], of_keys[:, :keys]
    if mask is not None:
        keep = mask[(None,) * (4 - mask.ndim)][:, 0, 0]
        of_keys = torch.where(keep, of_keys, MASKED)
    of_queries, of_keys = (
        F.pad(x, (0, padded(x.shape[1]) - x.shape[1]), value=value).contiguous()
        for x, value in ((of_queries, PADDING), (of_keys, MASKED))
    )
    return of_queries, of_keys, _spans(of_queries, of_keys), _spans(of_keys, of_queries)


def by_queries(ids: Ids) -> tuple[Tensor, ...]:
    """Return the ids in the order of the forward and dq kernels' arguments; an empty tuple if there are no ids."""
    return tuple(x for x in ids[:3] if x is not None)


def by_keys(ids: Ids) -> tuple[Tensor, ...]:
    """Return the ids in the order of the dkdv kernel's arguments; an empty tuple if there are no ids."""
    return tuple(x for x in (ids[0], ids[1], ids[3]) if x is not None)


def _spans(own_ids: Tensor, other_ids: Tensor) -> Tensor:
    """Return the range (first, end) of other rows that each block of 64 own rows needs, in blocks of 64.

    The range follows from the smallest and largest id of each block, so it is tight if segments are contiguous and
    ordered, as packing produces them.
    """
    (own_low, own_high), (low, high) = _extremes(own_ids), _extremes(other_ids)
    meets = (own_low[:, :, None] <= high[:, None]) & (low[:, None] <= own_high[:, :, None])
    at = torch.arange(low.shape[1], dtype=torch.int32, device=low.device)
    first, end = torch.where(meets, at, low.shape[1]).amin(-1), torch.where(meets, at + 1, 0).amax(-1)
    return torch.stack([first, end], 1)


def _extremes(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest id in each block of 64 rows, ignoring masked keys and padding."""
    ids = ids.unflatten(1, (-1, ROWS))
    counts = ids > PADDING
    return torch.where(counts, ids, -_LEAST - 1).amin(-1), torch.where(counts, ids, _LEAST).amax(-1)
