"""Launch the Hopper kernel of scaled int8 products on torch tensors. Importable without jax.

Shape suffixes: M rows (tokens), K the inner dimension of a product, N its columns.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from vitkernels.bridge import hopper
from vitkernels.bridge.operator import aligned

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of results and biases


def takes(
    a_MK: Tensor,
    b_NK: Tensor,
    a_scale_M: Tensor | None,
    b_scale_N: Tensor | None,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
) -> bool:
    """Return whether the kernel supports this product, and it has at least one tile per multiprocessor.

    Triton's smaller tiles are faster for fewer.
    """
    if not a_MK.is_cuda or a_MK.dtype != torch.int8 or a_scale_M is None or b_scale_N is None:
        return False
    (M, K), N = a_MK.shape, len(b_NK)
    tiles = M * N // (128 * 128)
    return (
        not (M % 8 or N % 128 or K % 128)
        and 0 not in (K, N)
        and tiles >= torch.cuda.get_device_properties(a_MK.device).multi_processor_count
        and out_dtype in DTYPES
        and (bias_N is None or bias_N.dtype in DTYPES)
        and a_MK.is_contiguous()
        and b_NK.is_contiguous()
        and _unavailable() is None
    )


@cache
def _unavailable() -> str | None:
    return hopper.unavailable()


def product(
    a_MK: Tensor,
    b_NK: Tensor,
    a_scale_M: Tensor,
    b_scale_N: Tensor,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    tiling=None,
) -> Tensor:
    """Return (a · a_scale[:, None]) (b · b_scale[:, None])ᵀ + bias, (M, N), for int8 arguments that `takes` accepts.

    Compiles at the first call with these sizes and dtypes. Scales are float32. tiling: None for the best one.
    """
    (M, K), N = a_MK.shape, len(b_NK)
    vectors = (a_scale_M, b_scale_N) if bias_N is None else (a_scale_M, b_scale_N, bias_N)
    out_MN = a_MK.new_empty(M, N, dtype=out_dtype)
    bias_dtype = None if bias_N is None else bias_N.dtype
    kernel = _compiled(M, N, K, out_dtype, bias_dtype, a_MK.device, tiling)
    kernel(*map(aligned, (a_MK, b_NK, *vectors)), out_MN)
    return out_MN


@cache
def _compiled(M: int, N: int, K: int, out_dtype: torch.dtype, bias_dtype: torch.dtype | None, device, tiling):
    from vitkernels.bridge.mosaic_gpu import Kernel
    from vitkernels.ops.int8_matmul.pallas_hopper_kernel import ScaledProduct
    from vitkernels.ops.linear.pallas_hopper_launch import name_of, pairs_on

    fields: Any = M, N, K, "int8", pairs_on(device), name_of(out_dtype), bias_dtype and name_of(bias_dtype)
    kind: Any = ScaledProduct
    product = kind.best(*fields) if tiling is None else kind(*fields, tiling)
    return Kernel(product, product.inputs())
