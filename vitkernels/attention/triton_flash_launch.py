"""Which kernel, which tiles, which grid: from tensors to launches of the flash-attention kernels.

Tile sizes are chosen here once and for all, from measurements on one H200 (notes/triton_flash.md): training starts
without a search.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vitkernels.attention.triton_flash_backward import dbias_kernel, dkdv_kernel, dq_kernel
from vitkernels.attention.triton_flash_forward import forward_kernel
from vitkernels.bridge.triton import triton_call


@dataclass(frozen=True)
class Tiles:
    """Queries and keys per tile, warps per program, how many tiles ahead the loads run, registers per thread."""

    n: int
    m: int
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None  # fewer registers: more programs side by side on a multiprocessor

    @property
    def options(self) -> dict[str, int]:
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}


@dataclass(frozen=True)
class Call:
    """One attention call: what every kernel of it is given. Tensors are (B, H, N or M, D) views of any layout."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None  # these three expanded to (B, H, N, M), (B, H, N, M) and (B, N)
    mask: Tensor | None
    segment_ids: Tensor | None
    is_causal: bool
    scale: float

    @classmethod
    def of(cls, q, k, v, bias, mask, segment_ids, is_causal, scale) -> "Call":
        shape = (*q.shape[:3], k.shape[2])
        return cls(
            q=readable(q),
            k=readable(k),
            v=readable(v),
            bias=None if bias is None else bias.expand(shape),
            mask=None if mask is None else mask.expand(shape).view(torch.uint8),
            segment_ids=segment_ids,
            is_causal=is_causal,
            scale=scale,
        )

    @property
    def general(self) -> bool:
        """Whether the kernels must do more than plain softmax(q kᵀ) v. A scale <= 0 would turn max(s) into min(s)."""
        extras = (self.bias, self.mask, self.segment_ids)
        return any(x is not None for x in extras) or self.is_causal or self.scale <= 0 or self.k.shape[2] == 0

    @property
    def extras(self) -> tuple[Tensor | None, ...]:
        return self.bias, self.mask, self.segment_ids

    @property
    def extra_strides(self) -> tuple[int, ...]:
        of_bias = (0,) * 4 if self.bias is None else self.bias.stride()
        of_mask = (0,) * 4 if self.mask is None else self.mask.stride()
        of_segments = (0,) * 2 if self.segment_ids is None else self.segment_ids.stride()
        return *of_bias, *of_mask, *of_segments

    @property
    def constants(self) -> dict:
        D = self.q.shape[3]
        D1, D2 = split(D)
        return {"D": D, "D1": D1, "D2": D2, "PRECISION": "ieee"}


def readable(x_BHND: Tensor) -> Tensor:
    """x itself where a kernel can load 16 bytes at a time from every row of it (any layout of a model), else a copy."""
    b, h, n = strides(x_BHND)
    whole_rows = x_BHND.stride(3) == 1 and (b | h | n) % 8 == 0
    return x_BHND if whole_rows and x_BHND.data_ptr() % 16 == 0 else x_BHND.contiguous()


def strides(x_BHND: Tensor) -> tuple[int, int, int]:
    """Strides of batch, heads and tokens; 0 where there is one only, whatever stride the tensor gives it."""
    B, H, N, _ = x_BHND.shape
    b, h, n, _ = x_BHND.stride()
    return b if B > 1 else 0, h if H > 1 else 0, n if N > 1 else 0


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)  # Triton's own costs microseconds of host time


def _power_of_2(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()


def split(D: int) -> tuple[int, int]:
    """The two tiles, powers of two, that hold a head dim: 64 -> 64, 0; 80 -> 64, 16; 88 -> 64, 32; 104 -> 128, 0."""
    power = _power_of_2(D)
    if power == D:
        return D, 0
    rest = max(16, _power_of_2(D - power // 2))
    return (power // 2, rest) if power // 2 + rest < power else (power, 0)


def tail(length: int, tile: int) -> int:
    """The tile for what is left of `length` after whole tiles: no smaller than a tensor core's (16); 0 for none."""
    rest = length % tile
    return min(tile, max(16, _power_of_2(rest))) if rest else 0


def forward(call: Call, out_BHND: Tensor, lse_BHN: Tensor, tiles: Tiles | None = None) -> None:
    """Fills out and lse."""
    B, H, N, _ = call.q.shape
    M = call.k.shape[2]
    tiles = tiles or forward_tiles(call)
    triton_call(
        call.q, call.k, call.v, out_BHND, lse_BHN, *call.extras,
        *strides(call.q), *strides(call.k), *strides(call.v), *strides(out_BHND), *call.extra_strides,
        H, N, M, call.scale,
        kernel=forward_kernel,
        grid=(B * H * _cdiv(N, tiles.n),),
        **call.constants, **_own_and_loop_tiles(call, N, M, tiles, "N", "M"), **tiles.options,
    )  # fmt: skip


def _own_and_loop_tiles(call: Call, own: int, loop: int, tiles: Tiles, own_name: str, loop_name: str) -> dict:
    """Tiles of a kernel whose program owns one tile and loops over others. The general one masks all."""
    own_tile, loop_tile = (tiles.n, tiles.m) if own_name == "N" else (tiles.m, tiles.n)
    return {
        "TILE_N": tiles.n,
        "TILE_M": tiles.m,
        f"TAIL_{own_name}": own_tile if call.general else tail(own, own_tile),
        f"TAIL_{loop_name}": 0 if call.general else tail(loop, loop_tile),
        "GENERAL": call.general,
        "CAUSAL": call.is_causal,
    }


def backward(call: Call, out: Tensor, lse_BHN: Tensor, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    """Fills dq, dk and dv; returns delta, which `bias_gradient` needs."""
    do = readable(do)
    delta_BHN = torch.empty_like(lse_BHN)
    dq_pass(call, out, lse_BHN, do, delta_BHN, dq)
    dkdv_pass(call, lse_BHN, do, delta_BHN, dk, dv)
    return delta_BHN


def dq_pass(call: Call, out, lse_BHN, do, delta_BHN, dq, tiles: Tiles | None = None) -> None:
    """Fills dq and delta."""
    B, H, N, _ = call.q.shape
    M = call.k.shape[2]
    tiles = tiles or dq_tiles(call)
    triton_call(
        call.q, call.k, call.v, out, do, dq, lse_BHN, delta_BHN, *call.extras,
        *strides(call.q), *strides(call.k), *strides(call.v), *strides(out), *strides(do), *strides(dq),
        *call.extra_strides, H, N, M, call.scale,
        kernel=dq_kernel,
        grid=(B * H * _cdiv(N, tiles.n),),
        **call.constants, **_own_and_loop_tiles(call, N, M, tiles, "N", "M"), **tiles.options,
    )  # fmt: skip


def dkdv_pass(call: Call, lse_BHN, do, delta_BHN, dk, dv, tiles: Tiles | None = None) -> None:
    """Fills dk and dv, from delta."""
    B, H, N, _ = call.q.shape
    M = call.k.shape[2]
    if M == 0:
        return
    tiles = tiles or dkdv_tiles(call)
    triton_call(
        call.q, call.k, call.v, do, dk, dv, lse_BHN, delta_BHN, *call.extras,
        *strides(call.q), *strides(call.k), *strides(call.v), *strides(do), *strides(dk), *strides(dv),
        *call.extra_strides, H, N, M, call.scale,
        kernel=dkdv_kernel,
        grid=(B * H * _cdiv(M, tiles.m),),
        **call.constants, **_own_and_loop_tiles(call, M, N, tiles, "M", "N"), **tiles.options,
    )  # fmt: skip


def bias_gradient(call: Call, bias_shape: tuple[int, ...], lse_BHN, do, delta_BHN) -> Tensor:
    """The gradient, in float32, of a bias of `bias_shape` that was broadcast to (B, H, N, M)."""
    B, H, N, _ = call.q.shape
    M = call.k.shape[2]
    bias_B, bias_H, bias_N, bias_M = (1,) * (4 - len(bias_shape)) + tuple(bias_shape)
    tiles = Tiles(16, 16) if call.q.dtype == torch.float32 and call.q.is_cuda else Tiles(64, 64)
    do = readable(do)
    dbias_BHNM = lse_BHN.new_empty(bias_B, bias_H, N, M)
    if dbias_BHNM.numel():
        triton_call(
            call.q, call.k, call.v, do, dbias_BHNM, lse_BHN, delta_BHN, *call.extras,
            *strides(call.q), *strides(call.k), *strides(call.v), *strides(do), *call.extra_strides,
            B, H, N, M, bias_H, bias_B, bias_H, call.scale,
            kernel=dbias_kernel,
            grid=(bias_B * bias_H * _cdiv(N, tiles.n) * _cdiv(M, tiles.m),),
            **call.constants, TILE_N=tiles.n, TILE_M=tiles.m, CAUSAL=call.is_causal, **tiles.options,
        )  # fmt: skip
    summed = [axis for axis, size in ((2, bias_N), (3, bias_M)) if size == 1 != dbias_BHNM.shape[axis]]
    return (dbias_BHNM.sum(summed, keepdim=True) if summed else dbias_BHNM).reshape(bias_shape)


def _is_f32(call: Call) -> bool:
    """float32 products run on the ordinary units, which hold few of a tile's operands."""
    return call.q.dtype == torch.float32 and call.q.is_cuda


def _size(call: Call) -> tuple[int, int]:
    """The longer of queries and keys, and how many columns a head's tiles have."""
    return max(call.q.shape[2], call.k.shape[2]), sum(split(call.q.shape[3]))


def forward_tiles(call: Call) -> Tiles:
    """Short sequences want many small programs, long ones large tiles; ragged ones small steps."""
    length, width = _size(call)
    if _is_f32(call):
        return Tiles(32, 32, 4, 1)
    if call.general:
        return Tiles(64, 32, 4, 2)
    if width > 64:
        return Tiles(64, 64, 4, 2) if length % 64 == 0 else Tiles(128, 64, 8, 3)
    if length > 2048:
        return Tiles(128, 64, 8, 3, 128)
    if length > 512:
        return Tiles(128, 64, 8, 3, 104)
    return Tiles(64, 64, 4, 3) if length % 64 == 0 else Tiles(64, 32, 4, 3, 80)


def dq_tiles(call: Call) -> Tiles:
    length, width = _size(call)
    if _is_f32(call):
        return Tiles(32, 16, 4, 1)
    if call.general:
        return Tiles(64, 32, 4, 2)
    if width > 64:
        return Tiles(64, 32, 4, 2) if length % 64 == 0 else Tiles(64, 32, 4, 3)
    return Tiles(128, 64, 8, 3, 128) if length > 512 else Tiles(64, 32, 4, 3, 96)


def dkdv_tiles(call: Call) -> Tiles:
    length, width = _size(call)
    if _is_f32(call):
        return Tiles(16, 32, 4, 1)
    if call.general:
        return Tiles(32, 64, 4, 2)
    if width > 64:
        return Tiles(32, 64, 4, 3) if length % 64 == 0 else Tiles(64, 64, 4, 3)
    if length > 2048:
        return Tiles(64, 64, 4, 3)
    return Tiles(64, 64, 4, 3, 168) if length > 512 else Tiles(32, 64, 4, 3, 128)
