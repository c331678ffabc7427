"""Which calls the Hopper kernels of `triton_flash` run, and how they are launched; importable with any Triton.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from vitkernels.attention.triton_flash.inputs import FlashInputs
from vitkernels.attention.triton_flash.tiles import LOG2E
from vitkernels.bridge.operator import row_strides
from vitkernels.bridge.triton import bind, cdiv, multiprocessors

_TRITON = "3.6"  # Gluon is experimental: each release of Triton renames or changes some of what kernels use
_ROWS = 64  # of a warpgroup; see warpgroups.py
_LEAST_USE = 0.6  # of the multiprocessors, each of which runs one program at a time; else they idle in the last turn

Launch = Callable[..., None]  # takes tensors, or their addresses


class _Sizes(NamedTuple):
    warpgroups: int
    tile: int  # rows of a streamed tile
    stages: int


class _Kernel(NamedTuple):
    sizes: dict[int, _Sizes]  # by the head dim to which others are padded
    least_tokens: dict[range, int]  # by head dim: queries and keys from which it is faster than the kernel for all GPUs


FORWARD = _Kernel(
    {64: _Sizes(3, 128, 2), 128: _Sizes(2, 128, 2)},
    {range(40, 49): 897, range(56, 65): 1537, range(88, 97): 2049, range(104, 129): 513},
)
DQ = _Kernel(
    {64: _Sizes(3, 64, 3), 128: _Sizes(2, 64, 3)},
    {range(40, 49): 897, range(72, 81): 777, range(88, 97): 577, range(104, 129): 385},
)
DKDV = _Kernel(
    {64: _Sizes(3, 64, 3), 128: _Sizes(2, 64, 2)},
    {range(40, 49): 897, range(56, 65): 897, range(72, 81): 777, range(88, 97): 313, range(104, 129): 385},
)


# Each of these functions launches its kernel and returns the launch; or None, if the kernel does not run the call.
# rows, statistics, and the arguments of a launch are those of the kernel for all GPUs; see triton_flash/launch.py.


def forward(inputs: FlashInputs, rows: tuple[Tensor, ...], statistics: tuple[Tensor, ...]) -> Launch | None:
    """Fill out and lse."""
    (out,), (lse,) = rows, statistics
    sizes = sizes_if_supported(FORWARD, inputs, inputs.q, out)
    if sizes is None:
        return None
    from vitkernels.attention.triton_flash.hopper.forward import forward_kernel

    blocks = *_blocks(_ROWS, inputs.q), *_blocks(sizes.tile, inputs.k, inputs.v)
    run = _bind(
        forward_kernel, inputs, sizes, inputs.q, (*blocks, out, lse), row_strides(out), inputs.scale * LOG2E.value
    )
    return lambda q, k, v, out, lse, *_: run(q, k, v, out, lse)


def dq(inputs: FlashInputs, rows: tuple[Tensor, ...], statistics: tuple[Tensor | None, ...]) -> Launch | None:
    """Fill dq and delta."""
    (out, do, dq), (lse, delta, _) = rows, statistics
    sizes = sizes_if_supported(DQ, inputs, inputs.q, *rows)
    if sizes is None:
        return None
    from vitkernels.attention.triton_flash.hopper.backward import dq_kernel

    blocks = *_blocks(_ROWS, inputs.q, do), *_blocks(sizes.tile, inputs.k, inputs.v)
    strides = *row_strides(out), *row_strides(dq)
    run = _bind(dq_kernel, inputs, sizes, inputs.q, (*blocks, out, lse, delta, dq), strides, inputs.scale)
    return lambda q, k, v, out, do, dq, lse, delta, *_: run(q, do, k, v, out, lse, delta, dq)


def dkdv(inputs: FlashInputs, rows: tuple[Tensor, ...], statistics: tuple[Tensor, ...]) -> Launch | None:
    """Fill dk and dv."""
    (do, dk, dv), (lse, delta) = rows, statistics
    sizes = sizes_if_supported(DKDV, inputs, inputs.k, *rows)
    if sizes is None:
        return None
    from vitkernels.attention.triton_flash.hopper.backward import dkdv_kernel

    blocks = *_blocks(_ROWS, inputs.k, inputs.v), *_blocks(sizes.tile, inputs.q, do)
    strides = *row_strides(dk), *row_strides(dv)
    run = _bind(dkdv_kernel, inputs, sizes, inputs.k, (*blocks, lse, delta, dk, dv), strides, inputs.scale)
    return lambda q, k, v, do, dk, dv, lse, delta, *_: run(k, v, q, do, lse, delta, dk, dv)


def sizes_if_supported(kernel: _Kernel, inputs: FlashInputs, owned: Tensor, *others: Tensor) -> _Sizes | None:
    """Return the sizes if the kernel can run this call, and does so faster; else None.

    Args:
        owned: q or k, whose rows the kernel's programs own.
        others: the call's further tensors like q.
    """
    q, tokens = inputs.q, min(inputs.q.shape[2], inputs.k.shape[2])
    least = next((least for dims, least in kernel.least_tokens.items() if q.shape[3] in dims), None)
    if least is None or tokens < least or not q.numel():
        return None
    is_plain = not inputs.general and inputs.segment_tiles is None and q.dtype in (torch.bfloat16, torch.float16)
    if not is_plain or not q.is_cuda or not _are_supported(q.get_device()):
        return None
    sizes = kernel.sizes[_padded(q.shape[3])]
    turns = _programs(owned, sizes) / multiprocessors(q.device)
    # The TMA unit does not repeat rows of a tensor that expand() has made.
    has_rows = all(map(_has_rows_of_its_own, (q, inputs.k, inputs.v, *others)))
    return sizes if has_rows and turns >= _LEAST_USE * math.ceil(turns) else None


def _programs(owned: Tensor, sizes: _Sizes) -> int:
    B, H, tokens, _ = owned.shape
    return B * H * cdiv(tokens, _ROWS * sizes.warpgroups)


def _padded(head_dim: int) -> int:
    return 64 if head_dim <= 64 else 128


@cache
def _are_supported(device: int) -> bool:
    return is_hopper(device) and limitation() is None


def is_hopper(device: int | None = None) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def limitation() -> str | None:
    """Return what a Hopper GPU lacks with this version of Triton; None if nothing."""
    if triton.__version__.startswith(f"{_TRITON}."):
        return None
    return f"without kernels for long sequences on Hopper, which need Triton {_TRITON}; found {triton.__version__}"


def _has_rows_of_its_own(x: Tensor) -> bool:
    return all(stride > 0 for stride, size in zip(row_strides(x), x.shape[:-1], strict=True) if size > 1)


def _blocks(rows: int, *tensors: Tensor) -> list:
    """Return descriptors from which the TMA unit copies blocks of rows, padded with zeros to 64 or 128 columns.

    Tensors are (B, H, tokens, D), as `readable` returns them.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [1, 1, rows, _padded(tensors[0].shape[3])]
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[tensors[0].dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    return [TensorDescriptor(x, list(x.shape), _tma_strides(x), block, layout) for x in tensors]


def _tma_strides(x: Tensor) -> list[int]:
    """Return the strides of x; those of dimensions of size 1 are arbitrary, but must be multiples of 16 bytes."""
    return [stride or x.shape[3] for stride in row_strides(x)] + [1]


def _bind(kernel, inputs: FlashInputs, sizes: _Sizes, owned: Tensor, tensors: tuple, strides: tuple, factor: float):
    """Launch a kernel whose programs own the rows of `owned`; return the launch."""
    _, H, N, D = inputs.q.shape
    constants = {"WARPGROUPS": sizes.warpgroups, "TILE": sizes.tile, "D": _padded(D), "STAGES": sizes.stages}
    numbers = *strides, H, N, inputs.k.shape[2], D, factor
    return bind(*tensors, *numbers, kernel=kernel, grid=(_programs(owned, sizes),), num_warps=4, **constants)
