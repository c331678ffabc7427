"""Masks of keys and packed segments as ids, which the Hopper kernels of `pallas_flash` compare.

A query attends to the keys with its id. Queries and keys are divided into chunks of 64 rows, each with a record of the
chunks that it needs. Chunks of packed segments start where segments start, so most tiles lie within one segment, and
need no comparison.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim, C chunks, Q and K chunks of queries and of
keys.
"""

from torch import Tensor

from vitkernels.attention.pallas_flash.hopper.masked_ids import masked_ids
from vitkernels.attention.pallas_flash.hopper.packed_segments import LONGEST, packed_chunks
from vitkernels.attention.pallas_flash.hopper.schedule import ROWS, fewest_chunks, takes_quads

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
    queries (B, Q, 32) and of keys (B, K, 32); and counts (7,); see chunks.py.
    """
    if mask is None and segment_ids is None:
        return None, None, None, None, None
    B, H, N, head_dim = shape
    if segment_ids is not None and mask is None and moves_chunks and ROWS < N <= LONGEST:
        ids, chunks, used = packed_chunks(segment_ids, takes_quads(head_dim), fewest_chunks(B * H))
        return ids, ids, chunks, chunks, used
    of_keys = None if mask is None else mask[(None,) * (4 - mask.ndim)][:, 0, 0]
    return masked_ids(of_keys, segment_ids, B, N, keys)


def given(ids: Ids) -> tuple[Tensor, ...]:
    """Return the ids as arguments of a kernel; an empty tuple if there are none."""
    return tuple(x for x in ids if x is not None)
