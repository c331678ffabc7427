"""Triton kernels of linear layers and 8-bit products are compiled once for all batch sizes."""

from unittest import mock

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from vitkernels.ops.int8_matmul import triton_long, triton_product
from vitkernels.ops.linear import gradients
from vitkernels.ops.rowwise_quantization import triton as quantization

ROWS = (96, 128, 1000, 4096, 12_345, 50_432)
LARGE = (16_384, 25_216, 50_432, 50_433)  # products of one tiling
C = 64


def variant(args, kernel, grid, constexprs) -> tuple:
    """Return what Triton compiles a kernel for: constants, dtypes, and integers that are 1 or multiples of 16."""
    of_arguments = []
    for parameter, arg in zip(kernel.params, args, strict=False):
        if isinstance(arg, torch.Tensor):
            of_arguments.append(arg.dtype)
        elif isinstance(arg, TensorDescriptor):
            of_arguments.append((arg.base.dtype, tuple(arg.block_shape)))
        elif isinstance(arg, int) and not parameter.do_not_specialize:
            of_arguments.append((arg == 1, arg % 16 == 0))
        else:
            of_arguments.append(type(arg))
    return kernel.fn.__name__, tuple(of_arguments), tuple(sorted((k, str(v)) for k, v in constexprs.items()))


def sums(rows):
    gradients.sums_over_rows(torch.empty(rows, 1, C))


def quantize(rows):
    x, scales = torch.empty(rows, C), torch.empty(rows)
    quantization.quantize_rows(x, None, torch.int8, False)
    quantization.transpose_rows(torch.empty(rows, C, dtype=torch.int8), scales, True)
    quantization.quantize_columns(x, scales, scales, torch.int8, True)


def multiply(rows):
    x, w = torch.empty(rows, 256, dtype=torch.int8), torch.empty(C, 256, dtype=torch.int8)
    triton_product.product(x, w.T, torch.float32, torch.empty(rows), torch.empty(C))


def weight_gradient(rows):
    padded = -(-rows // 128) * 128
    triton_long.product(*(torch.empty(128, padded, dtype=torch.int8) for _ in range(2)), torch.float32, None, None)


@pytest.mark.parametrize("call, module, sizes", [
    (sums, gradients, ROWS), (quantize, quantization, ROWS), (multiply, triton_product, LARGE),
    (weight_gradient, triton_long, LARGE),
])  # fmt: skip
def test_kernels__are_the_same_for_all_batch_sizes(call, module, sizes):
    found = []
    for rows in sizes:
        seen = set()

        def record(*args, kernel, grid, seen=seen, **constexprs):
            seen.add(variant(args, kernel, grid, constexprs))

        with mock.patch.object(module, "triton_call", record):
            call(rows)
        found.append(seen)
    assert all(seen == found[0] for seen in found) and found[0]
