"""Run the Hopper kernels on torch tensors, compiled once per shape.

Shape suffixes: M rows (tokens), K the inner dimension of a product, N its columns.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from vitkernels.bridge.mosaic_gpu import Kernel
from vitkernels.bridge.operator import aligned
from vitkernels.ops.linear.pallas_hopper_kernel import LinearProduct


def linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return x weightᵀ + bias, rounded after the bias is added."""
    y_MN = x_MK.new_empty(x_MK.shape[0], weight_NK.shape[0])
    launch_forward(LinearProduct, x_MK, weight_NK, bias_N, (y_MN,))
    return y_MN


def start(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> None:
    """Start to compile the kernel of `linear` for x (..., K), before the call or while it is traced."""
    forward_kernel(LinearProduct, x, weight_NK, bias_N).start(x.device)


def launch_forward(
    kind: type[LinearProduct],
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    outputs: tuple[Tensor, ...],
    *options,
) -> None:
    """Fill the outputs, (M, N) each. options: the fields of `kind` beyond LinearProduct's."""
    biases = () if bias_N is None else (bias_N.float().contiguous(),)
    kernel = forward_kernel(kind, x_MK, weight_NK, bias_N, *options)
    kernel(aligned(x_MK), aligned(weight_NK), *biases, *outputs)


def forward_kernel(kind: type[LinearProduct], x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *options) -> Kernel:
    """Return the kernel for x (..., K) and the weight. options: the fields of `kind` beyond LinearProduct's."""
    N, K = weight_NK.shape
    M = x.shape[:-1].numel()
    return kernel_of(kind, M, K, N, x.dtype, x.device, bias_N is not None, *options)  # type: ignore[arg-type]


@cache
def kernel_of(kind: Any, M: int, K: int, N: int, dtype: torch.dtype, device, *options) -> Kernel:
    """Return the kernel of one shape. options: the fields of `kind` beyond HopperProduct's."""
    product: Any = kind(M, N, K, name_of(dtype), pairs_on(device), *options)
    return Kernel(product, product.inputs())


def pairs_on(device) -> int:
    """Return the number of pairs of thread blocks, with one block per multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count // 2


def name_of(dtype: torch.dtype) -> str:
    """Return JAX's name of the dtype."""
    return str(dtype).removeprefix("torch.")
