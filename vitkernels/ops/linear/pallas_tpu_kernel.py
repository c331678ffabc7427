"""A plain matrix product for TPU that reads and writes (B, N, C) as the other kernels do.

XLA's products run as fast. If N is not a multiple of 8, XLA gives their results a layout with N outermost, and copies
them for the next kernel; this product needs no copy.

Shape suffixes: B images, N tokens, K summed, F output features.
"""

from functools import partial

from vitkernels.bridge.pallas_schedule import pipelined
from vitkernels.ops.tpu_rows import RowBlocks, call, column_cuts, product, row_bytes, shared


def rows_product(x_BNK, weight, *, axis: int):
    """Return x times a matrix (1, F, K), or (1, K, F) with axis 0, summed in float32, in x's dtype."""
    B, N, K = x_BNK.shape
    F, dtype = weight.shape[2 - axis], x_BNK.dtype
    resident = weight.shape[1] * row_bytes((weight.shape[2], dtype))
    blocks = RowBlocks.of(B, N, row_bytes((K, dtype), (F, dtype)), resident)
    kernel = partial(_kernel, blocks=blocks, axis=axis)
    outputs = [(blocks.spec(F), (B, N, F), dtype)]
    return call(kernel, blocks, (x_BNK, weight), [blocks.spec(K), shared(weight)], outputs, "rows_product")[0]


def _kernel(x_ref, weight_ref, y_ref, *, blocks: RowBlocks, axis: int):
    def multiply(item):
        (image, rows), cut = item
        weight = weight_ref[0, cut] if axis == 1 else weight_ref[0, :, cut]
        return product(x_ref[image, rows], weight, axis)

    def store(item, y):
        (image, rows), cut = item
        y_ref[image, rows, cut] = y.astype(y_ref.dtype)

    pipelined([(piece, cut) for cut in column_cuts(y_ref.shape[2]) for piece in blocks.pieces()], multiply, store)
