"""A plain matrix product for TPU that reads and writes (B, N, C) as the other kernels do.

XLA's products run as fast. If N is not a multiple of 8, XLA gives their results a layout with N outermost, and copies
them for the next kernel; this product needs no copy.

Shape suffixes: B images, N tokens, K summed, F output features.
"""

from functools import partial

from vitkernels.bridge.pallas_schedule import pipelined
from vitkernels.ops.tpu_rows import Matrix, RowBlocks, call, column_cuts, product, row_bytes, shared, size_to_round


def rows_product(x_BNK, weight, *, axis: int):
    """Return x times a matrix (1, F, K), or (1, K, F) with axis 0, summed in float32, in x's dtype.

    The matrix is rounded to x's dtype in VMEM.
    """
    B, N, K = x_BNK.shape
    F, dtype = weight.shape[2 - axis], x_BNK.dtype
    resident = weight.shape[1] * row_bytes((weight.shape[2], weight.dtype))
    blocks = RowBlocks.of(B, N, row_bytes((K, dtype), (F, dtype)), resident)
    kernel = partial(_kernel, blocks=blocks, axis=axis)
    outputs = [(blocks.spec(F), (B, N, F), dtype)]
    specs = [blocks.spec(K), shared(weight)]
    return call(kernel, blocks, (x_BNK, weight), specs, outputs, "rows_product", rounds=size_to_round(weight, dtype))[0]


def _kernel(x_ref, weight_ref, y_ref, *, blocks: RowBlocks, axis: int):
    x, y = Matrix(x_ref, blocks), Matrix(y_ref, blocks)

    def multiply(item):
        rows, cut = item
        weight = weight_ref[0, cut] if axis == 1 else weight_ref[0, :, cut]
        return product(x[rows], weight, axis)

    items = [(rows, cut) for cut in column_cuts(y.shape[1]) for rows in blocks.pieces()]
    pipelined(items, multiply, y.__setitem__)
