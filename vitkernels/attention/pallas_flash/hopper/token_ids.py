"""Masks of keys and packed segments as ids, which the Hopper kernels of `pallas_flash` compare.

A query attends to the keys with its id. Queries and keys are divided into chunks of 64 rows, each with a record of the
chunks that it needs. Chunks of packed segments start where segments start, so most tiles lie within one segment, and
need no comparison.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim, C chunks, Q and K chunks of queries and of
keys.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.attention.pallas_flash.hopper.chunks import FIELDS, MASKED, PADDING
from vitkernels.attention.pallas_flash.hopper.packed_segments import LONGEST, packed_chunks
from vitkernels.attention.pallas_flash.hopper.schedule import ROWS
from vitkernels.attention.pallas_flash.hopper.tiles import padded

Ids = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def token_ids(
    shape: tuple[int, ...], keys: int, mask: Tensor | None, segment_ids: Tensor | None, moves_chunks: bool = False
) -> Ids:
    """Encode mask and segments as ids: a query attends to the keys with its id. All ids are None if there are neither.

    This runs outside the operators, so a compiled model computes the ids once for all layers.

    Args:
        shape: of q, (B, H, N, D).
        keys: the number of keys, M.
        mask: boolean, (B or 1, 1, 1, M or 1) or with leading ones left out; True keeps.
        segment_ids: (B, N), for as many keys as queries.
        moves_chunks: let chunks start where segments start. The kernels then know no positions, so a call with a bias
            or causality must not.

    Returns, in int32, the ids of queries (B, 64 Q) and of keys (B, 64 K), in the order of their chunks; the chunks of
    queries (B, Q, 8) and of keys (B, K, 8), see chunks.py; and how many of them are used, (2,).
    """
    if mask is None and segment_ids is None:
        return None, None, None, None, None
    B, _, N, _ = shape
    if segment_ids is not None and mask is None and moves_chunks and ROWS < N <= LONGEST:
        ids, chunks, used = packed_chunks(segment_ids)
        return ids, ids, chunks, chunks, used
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
    used = [torch.full((1,), -(-n // ROWS), dtype=torch.int32, device=device) for n in (N, keys)]
    chunks = _chunks(of_queries, of_keys, N), _chunks(of_keys, of_queries, keys)
    return of_queries, of_keys, *chunks, torch.cat(used)


def given(ids: Ids) -> tuple[Tensor, ...]:
    """Return the ids as arguments of a kernel; an empty tuple if there are none."""
    return tuple(x for x in ids if x is not None)


def _chunks(own_ids: Tensor, other_ids: Tensor, own_rows: int) -> Tensor:
    """Return the chunks of own rows, in the order of the rows.

    The chunks that a chunk needs follow from the smallest and largest ids, so they are few if segments are contiguous
    and ordered, as packing produces them.
    """
    own, other = own_ids.unflatten(1, (-1, ROWS)), other_ids.unflatten(1, (-1, ROWS))
    (own_low, own_high), (low, high) = _extremes(own, own > PADDING), _extremes(other, other > PADDING)
    meets = (own_low[:, :, None] <= high[:, None]) & (low[:, None] <= own_high[:, :, None])
    count = other.shape[1]
    at = torch.arange(count, dtype=torch.int32, device=own.device)
    first, end = torch.where(meets, at, count).amin(-1), torch.where(meets, at + 1, 0).amax(-1)

    # Own rows of one id need no comparison with chunks that have it everywhere. Own padding is never stored.
    own_low, own_high = _extremes(own, own != PADDING)
    is_full = other.amin(-1) == other.amax(-1)
    same = (own_low == own_high)[:, :, None] & is_full[:, None] & (own_low[:, :, None] == other[:, None, :, 0])
    compared = torch.where(~same & (at >= first[:, :, None]), at, count).amin(-1)

    row = ROWS * torch.arange(own.shape[1], dtype=torch.int32, device=own.device)
    fields = [first, end, compared, row.expand_as(first), torch.where(row < own_rows, ROWS, 0).expand_as(first)]
    return torch.stack(fields + [torch.zeros_like(first)] * (FIELDS - len(fields)), -1).to(torch.int32)


def _extremes(ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest id in each chunk, of the rows that count."""
    limits = torch.iinfo(torch.int32)
    return torch.where(counts, ids, limits.max).amin(-1), torch.where(counts, ids, limits.min).amax(-1)
