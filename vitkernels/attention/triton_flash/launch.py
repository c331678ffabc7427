"""Which kernel, which tiles, which grid: from tensors to launches of the flash-attention kernels.

Tile sizes are chosen here once and for all, from measurements on one H200 (notes/triton_flash.md): training starts
without a search. Who searches nevertheless names sizes of his own (attn.tiles).

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from triton import JITFunction

from vitkernels.attention.triton_flash.backward import dbias_kernel, dkdv_kernel, dq_kernel
from vitkernels.attention.triton_flash.forward import forward_kernel
from vitkernels.bridge.operator import BoundedCache, aligned
from vitkernels.bridge.triton import bind, cdiv, next_power_of_2, triton_call

Launch = Callable[..., None]  # of tensors, or of their addresses


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

    @cached_property
    def layout(self) -> tuple:
        """All that decides over a launch but the addresses of the tensors."""
        q, k, v = self.q, self.k, self.v
        of_extras = [x if x is None else (x.dtype, x.stride(), x.data_ptr() % 16 == 0) for x in self.extras]
        return (q.shape, k.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, *of_extras,
                self.is_causal, self.scale)  # fmt: skip

    @property
    def constants(self) -> dict:
        D = self.q.shape[3]
        D1, D2 = split(D)
        return {"D": D, "D1": D1, "D2": D2, "PRECISION": "ieee"}


def readable(x_BHND: Tensor) -> Tensor:
    """x itself where a kernel can load 16 bytes at a time from every row of it (any layout of a model), else a copy."""
    b, h, n = strides(x_BHND)
    whole_rows = x_BHND.stride(3) == 1 and (b | h | n) % 8 == 0
    return x_BHND if whole_rows and x_BHND.data_ptr() % 16 == 0 else aligned(x_BHND)


def strides(x_BHND: Tensor) -> tuple[int, int, int]:
    """Strides of batch, heads and tokens; 0 where there is one only, whatever stride the tensor gives it."""
    B, H, N, _ = x_BHND.shape
    b, h, n, _ = x_BHND.stride()
    return b if B > 1 else 0, h if H > 1 else 0, n if N > 1 else 0


def split(D: int) -> tuple[int, int]:
    """The two tiles, powers of two, that hold a head dim: 64 -> 64, 0; 80 -> 64, 16; 88 -> 64, 32; 104 -> 128, 0."""
    power = next_power_of_2(D)
    if power == D:
        return D, 0
    rest = max(16, next_power_of_2(D - power // 2))
    return (power // 2, rest) if power // 2 + rest < power else (power, 0)


def tail(length: int, tile: int) -> int:
    """The tile for what is left of `length` after whole tiles: no smaller than a tensor core's (16); 0 for none."""
    rest = length % tile
    return min(tile, max(16, next_power_of_2(rest))) if rest else 0


def forward(call: Call, out_BHND: Tensor, lse_BHN: Tensor, tiles: Tiles | None = None) -> Launch | None:
    """Fills out and lse. This and each pass below returns its launch, for other tensors; None where interpreted."""
    return _run(call, forward_kernel, "N", (out_BHND,), (lse_BHN,), tiles, forward_tiles)


def backward(
    call: Call, out: Tensor, lse_BHN: Tensor, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, sizes: Sequence[int] = ()
) -> tuple[Tensor, list[Launch | None]]:
    """Fills dq, dk and dv; returns delta, which `bias_gradient` needs, and its launches. sizes: see `asked_for`."""
    out, do, lse_BHN = readable(out), readable(do), aligned(lse_BHN)  # out and lse went through autograd's hooks
    delta_BHN = torch.empty_like(lse_BHN)
    launches = [dq_pass(call, out, lse_BHN, do, delta_BHN, dq, asked_for(call, sizes, 1))]
    if call.k.shape[2]:
        launches.append(dkdv_pass(call, lse_BHN, do, delta_BHN, dk, dv, asked_for(call, sizes, 2)))
    return delta_BHN, launches


def dq_pass(call: Call, out, lse_BHN, do, delta_BHN, dq, tiles: Tiles | None = None) -> Launch | None:
    """Fills dq and delta."""
    return _run(call, dq_kernel, "N", (out, do, dq), (lse_BHN, delta_BHN), tiles, dq_tiles)


def dkdv_pass(call: Call, lse_BHN, do, delta_BHN, dk, dv, tiles: Tiles | None = None) -> Launch | None:
    """Fills dk and dv, from delta; not for calls without keys."""
    return _run(call, dkdv_kernel, "M", (do, dk, dv), (lse_BHN, delta_BHN), tiles, dkdv_tiles)


def asked_for(call: Call, sizes: Sequence[int], which: int) -> Tiles | None:
    """The tiles of pass 0 (forward), 1 (dq) or 2 (dkdv) where sizes, (queries, keys) of each, name them; else None."""
    n, m = sizes[2 * which : 2 * which + 2] or (0, 0)
    if n == 0:
        return None
    return replace((forward_tiles, dq_tiles, dkdv_tiles)[which](call), n=n, m=m, maxnreg=None)


# The layout of a call -> its launch, ready but for the tensors: host time is dear where kernels are short.
_bound = BoundedCache()


def _run(call: Call, kernel, own: str, rows: tuple, statistics: tuple, tiles: Tiles | None, choose) -> Launch | None:
    """Launches a kernel whose programs own tiles of queries (own "N") or of keys ("M") and loop over the others."""
    tensors = call.q, call.k, call.v, *rows, *statistics, *call.extras
    device = call.q.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _run(call, kernel, own, rows, statistics, tiles, choose)
    key = kernel, tiles, call.layout, *(x.stride() for x in rows)
    again = _bound.get(key)
    if again is not None:
        again(*tensors)
        return again
    tiles = tiles or choose(call)
    B, H, N, _ = call.q.shape
    M = call.k.shape[2]
    of_rows = (stride for x in (call.q, call.k, call.v, *rows) for stride in strides(x))
    numbers = *of_rows, *call.extra_strides, H, N, M, call.scale
    programs = B * H * (cdiv(N, tiles.n) if own == "N" else cdiv(M, tiles.m))
    constants = call.constants | _tiling(call, tiles, own) | tiles.options
    if device.type == "cpu" or not isinstance(kernel, JITFunction):  # interpreted
        triton_call(*tensors, *numbers, kernel=kernel, grid=(programs,), **constants)
        return None
    launch = _bound[key] = bind(*tensors, *numbers, kernel=kernel, grid=(programs,), **constants)
    return launch


def _tiling(call: Call, tiles: Tiles, own: str) -> dict:
    """A general call's kernel masks every tile: its own are all ragged, and its loop has no tail."""
    N, M = call.q.shape[2], call.k.shape[2]
    tails = {"TAIL_N": tail(N, tiles.n), "TAIL_M": tail(M, tiles.m)}
    if call.general:
        tails = {"TAIL_N": tiles.n if own == "N" else 0, "TAIL_M": tiles.m if own == "M" else 0}
    return {"TILE_N": tiles.n, "TILE_M": tiles.m, **tails, "GENERAL": call.general, "CAUSAL": call.is_causal}


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
            grid=(bias_B * bias_H * cdiv(N, tiles.n) * cdiv(M, tiles.m),),
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


def _fits_128(length: int) -> bool:
    """Whether tiles of 128 rows leave little of themselves empty."""
    return length > 512 or length % 128 > 64


def forward_tiles(call: Call) -> Tiles:
    """Short sequences want many small programs, long ones large tiles; ragged ones small steps."""
    length, width = _size(call)
    if _is_f32(call):
        return Tiles(32, 32, 4, 1)
    if call.general:
        return Tiles(64, 32, 4, 2)
    if width > 64 and length % 64 == 0:
        return Tiles(64, 64, 4, 2)
    if width > 80:
        return Tiles(128, 64, 8, 3)
    if width > 64:
        return Tiles(128, 64, 8, 3, 128) if _fits_128(length) else Tiles(64, 64, 4, 3, 128)
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
    if width > 64 and length % 64 == 0:
        return Tiles(64, 32, 4, 2)
    if width > 80:
        return Tiles(64, 32, 4, 3)
    if width > 64:
        return Tiles(128, 64, 8, 3, 128) if length > 512 else Tiles(64, 32, 4, 2, 128)
    return Tiles(128, 64, 8, 3, 128) if length > 512 else Tiles(64, 32, 4, 3, 96)


def dkdv_tiles(call: Call) -> Tiles:
    length, width = _size(call)
    if _is_f32(call):
        return Tiles(16, 32, 4, 1)
    if call.general:
        return Tiles(32, 64, 4, 2)
    if width > 64 and length % 64 == 0:
        return Tiles(32, 64, 4, 3)
    if width > 80:
        return Tiles(64, 64, 4, 3)
    if width > 64:
        return Tiles(32, 128, 8, 3, 128) if _fits_128(length) else Tiles(64, 64, 4, 2, 168)
    if length > 2048:
        return Tiles(64, 64, 4, 3)
    return Tiles(64, 64, 4, 3, 168) if length > 512 else Tiles(32, 64, 4, 3, 128)
