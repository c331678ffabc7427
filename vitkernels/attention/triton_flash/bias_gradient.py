"""The gradient of a bias: the scores' gradients ds, which the dq kernel stores, summed over the heads that share it.

A kernel of its own, which computed the scores again, took 265 µs for a bias of 12 × 577 × 577 and a batch of 32, and
read q, k, v and dout once more for each tile (notes/triton_flash.md).

Shape suffixes: B batch, H heads, N query tokens, M key tokens.
"""

import triton
import triton.language as tl
from torch import Tensor

from vitkernels.attention.triton_flash.inputs import FlashInputs
from vitkernels.attention.triton_flash.tiles import GROUP, row_length
from vitkernels.bridge.triton import cdiv, triton_call

MOST_SCORES = 2**29  # that are stored at a time, 1 GB in bfloat16; but at least those of one batch entry
_ELEMENTS = 512  # of a program
_UNROLLED = 8  # heads whose loads are in flight at a time


@triton.jit
def _sum_kernel(
    ds_ptr, out_ptr, bias_stride, head_stride, count, N, M, columns,
    ADDS: tl.constexpr, ELEMENTS: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Fill out (biases, N, columns), contiguous, with sums of ds over `count` heads each; 0 from column M on.

    Consecutive biases start `bias_stride` heads apart, and heads that share a bias are `head_stride` apart. With ADDS,
    out already has sums of other heads.
    """
    programs = tl.cdiv(N * columns, ELEMENTS)
    bias = (tl.program_id(0) // programs).to(tl.int64)
    element = tl.program_id(0) % programs * ELEMENTS + tl.arange(0, ELEMENTS)
    n, m, width = element // columns, element % columns, row_length(M)
    size = N * width
    ds_ptr += bias * bias_stride * size + n * width + m
    out_ptr += bias * N * columns + element
    total = tl.zeros((ELEMENTS,), tl.float32)
    if ADDS:
        total += tl.load(out_ptr, mask=n < N, other=0.0)
    for first in range(0, count, UNROLLED):
        for i in tl.static_range(UNROLLED):
            head = count - 1 - first - i  # the last ones may still be in the L2 cache
            # Not m < M: a mask that ends within a vector would let the compiler load elements one by one.
            stored = (n < N) & (m < width) & (head >= 0)
            x = tl.load(ds_ptr + head * tl.cast(head_stride, tl.int64) * size, mask=stored, other=0.0)
            total += x.to(tl.float32)
    tl.store(out_ptr, tl.where(m < M, total, 0.0), mask=n < N)


def new_scores(inputs: FlashInputs) -> Tensor:
    """Return a tensor for ds: uninitialized if the dq kernel fills it, and 0 if it skips tiles."""
    B, H, N, _ = inputs.q.shape
    new = inputs.q.new_zeros if inputs.skips_tiles else inputs.q.new_empty
    return new(B, H, N, cdiv(inputs.k.shape[2], GROUP.value) * GROUP.value)


def add_up(ds_BHNM: Tensor, keys: int, out: Tensor, adds: bool) -> None:
    """Fill out (B or 1, H or 1, N, columns), contiguous and float32, with the sums of ds, in a fixed order.

    adds: add them to what out has.
    """
    B, H, N, _ = ds_BHNM.shape
    biases, columns = out.shape[0] * out.shape[1], out.shape[3]
    count = B * H // biases
    # The heads that share a bias are H apart if it has all heads, else consecutive.
    apart, stride = (1, H) if out.shape[:2] == (1, H) else (count, 1)
    triton_call(
        ds_BHNM, out, apart, stride, count, N, keys, columns,
        kernel=_sum_kernel, grid=(biases * cdiv(N * columns, _ELEMENTS),),
        ADDS=adds, ELEMENTS=_ELEMENTS, UNROLLED=_UNROLLED, num_warps=4,
    )  # fmt: skip
