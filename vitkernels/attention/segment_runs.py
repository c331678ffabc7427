"""Runs of equal segment ids, found on the device by one program per batch entry (Triton)."""

import triton
import triton.language as tl

BINS = 1024  # of ids, by which `runs_of_ids` finds those that recur


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def runs_of_ids(ids_ptr, ids_n, i, N, BINS: tl.constexpr):
    """Return, for tokens i = 0, 1, ...: id, whether a run begins, the run's start and end; and whether ids may recur.

    i holds more tokens than N or as many. An id recurs if tokens with other ids lie between tokens with this id. Two
    runs whose ids are equal modulo BINS count as recurring, so up to BINS runs with consecutive ids do not.
    """
    ids = tl.load(ids_ptr + i * ids_n, mask=i < N, other=0)
    before = tl.load(ids_ptr + (i - 1) * ids_n, mask=(i > 0) & (i < N), other=0)
    after = tl.load(ids_ptr + (i + 1) * ids_n, mask=i < N - 1, other=0)
    begins = (i < N) & ((i == 0) | (ids != before))
    start = tl.associative_scan(tl.where(begins, i, 0), 0, _larger)
    last = (i >= N - 1) | (ids != after)
    end = tl.associative_scan(tl.where(last, i + 1, N), 0, _smaller, reverse=True)
    recurs = tl.max(tl.histogram((ids & (BINS - 1)).to(tl.int32), BINS, mask=begins), 0) > 1
    return ids, begins, start, end, recurs
