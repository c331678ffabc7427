"""Launch the flash-attention kernels: choose tiles and grid, and bind launches once per layout.

Tile sizes are fixed here from measurements on one H200 (notes/triton_flash.md), so training starts without autotuning.
A backend can be configured with other sizes (`TritonFlash.configured(tiles=...)`).

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from triton import JITFunction
from triton.runtime.errors import OutOfResources

from vitkernels.attention.triton_flash.backward import dbias_kernel, dkdv_kernel, dq_kernel
from vitkernels.attention.triton_flash.forward import forward_kernel
from vitkernels.bridge.operator import BoundedCache, aligned
from vitkernels.bridge.triton import bind, cdiv, next_power_of_2, triton_call

Launch = Callable[..., None]  # takes tensors, or their addresses


@dataclass(frozen=True)
class TileConfig:
    """Queries (n) and keys (m) per tile, warps per program, software-pipeline stages, registers per thread."""

    n: int
    m: int
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None  # fewer registers: more resident programs per multiprocessor

    @property
    def options(self) -> dict[str, int]:
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}

    def smaller(self) -> "TileConfig | None":
        """Return the next configuration that needs less shared memory: fewer stages, then half the tile."""
        if self.num_stages > 1:
            return replace(self, num_stages=self.num_stages - 1)
        if max(self.n, self.m) == 16:
            return None
        return replace(self, n=self.n // 2) if self.n > self.m else replace(self, m=self.m // 2)


@dataclass(frozen=True)
class FlashInputs:
    """The inputs that all kernels of one attention call share. Tensors are (B, H, N or M, D) views of any layout."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None  # bias and mask expanded to (B, H, N, M); segment_ids is (B, N)
    mask: Tensor | None
    segment_ids: Tensor | None
    rope: Tensor | None  # sines and cosines, expanded to (B, H, rotated tokens, 2 D)
    rope_half: bool
    is_causal: bool
    scale: float

    @classmethod
    def of(cls, q, k, v, bias, mask, segment_ids, rope, rope_half, is_causal, scale) -> "FlashInputs":
        shape = (*q.shape[:3], k.shape[2])
        return cls(
            q=readable(q),
            k=readable(k),
            v=readable(v),
            bias=None if bias is None else bias.expand(shape),
            mask=None if mask is None else mask.expand(shape).view(torch.uint8),
            segment_ids=segment_ids,
            rope=None if rope is None else _expanded_rope(rope, q.shape),
            rope_half=rope_half,
            is_causal=is_causal,
            scale=scale,
        )

    @property
    def general(self) -> bool:
        """Return whether the call is more than softmax(q kᵀ) v. A scale <= 0 counts: it turns max(s) into min(s)."""
        return any(x is not None for x in self.extras[:3]) or self.is_causal or self.scale <= 0 or self.k.shape[2] == 0

    @property
    def extras(self) -> tuple[Tensor | None, ...]:
        return self.bias, self.mask, self.segment_ids, self.rope

    @property
    def extra_strides(self) -> tuple[int, ...]:
        """Return the strides of the extras, and the number of first tokens that are not rotated."""
        of_bias = (0,) * 4 if self.bias is None else self.bias.stride()
        of_mask = (0,) * 4 if self.mask is None else self.mask.stride()
        of_segments = (0,) * 2 if self.segment_ids is None else self.segment_ids.stride()
        rope, N = self.rope, self.q.shape[2]
        of_rope = (0,) * 4 if rope is None else (*rope.stride()[:3], N - rope.shape[2])
        return *of_bias, *of_mask, *of_segments, *of_rope

    @cached_property
    def layout(self) -> tuple:
        """Return everything that a launch depends on except the tensors' addresses."""
        q, k, v = self.q, self.k, self.v
        of_extras = [x if x is None else (x.dtype, x.stride(), x.data_ptr() % 16 == 0) for x in self.extras]
        of_rope = self.rope_half, None if self.rope is None else self.rope.shape[2]
        return (q.shape, k.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, *of_extras, *of_rope,
                self.is_causal, self.scale)  # fmt: skip

    @property
    def constants(self) -> dict:
        D = self.q.shape[3]
        D1, D2 = split_head_dim(D)
        halves = self.rope is not None and self.rope_half
        QK1, QK2 = (max(16, next_power_of_2(D // 2)),) * 2 if halves else (D1, D2)
        return {"D": D, "D1": D1, "D2": D2, "QK1": QK1, "QK2": QK2, "PRECISION": "ieee"}

    def new_statistics(self) -> Tensor:
        """Return an uninitialized tensor for the log-sum-exps; see forward_kernel."""
        return self.q.new_empty(statistics_shape(self.q, self.bias), dtype=torch.float32)


def statistics_shape(q_BHND: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """Return the shape of the saved log-sum-exps: (B, H, N), or with a bias (B, H, 2, N)."""
    B, H, N, _ = q_BHND.shape
    return (B, H, N) if bias is None else (B, H, 2, N)


def _expanded_rope(rope: Tensor, shape: tuple[int, ...]) -> Tensor:
    rope = rope if rope.stride(-1) == 1 else rope.contiguous()
    return rope.expand(*shape[:2], *rope.shape[-2:])


def readable(x_BHND: Tensor) -> Tensor:
    """Return x if kernels can load 16 bytes at a time from its rows (as in model layouts), else a copy."""
    b, h, n = strides(x_BHND)
    aligned_rows = x_BHND.stride(3) == 1 and (b | h | n) % 8 == 0
    return x_BHND if aligned_rows and x_BHND.data_ptr() % 16 == 0 else aligned(x_BHND)


def strides(x_BHND: Tensor) -> tuple[int, int, int]:
    """Return the strides of batch, heads and tokens; 0 for a dimension of size 1, whose stride is arbitrary."""
    B, H, N, _ = x_BHND.shape
    b, h, n, _ = x_BHND.stride()
    return b if B > 1 else 0, h if H > 1 else 0, n if N > 1 else 0


def split_head_dim(D: int) -> tuple[int, int]:
    """Return the two power-of-two tiles of a head dim: 64 -> 64, 0; 80 -> 64, 16; 88 -> 64, 32; 104 -> 128, 0.

    A second tile of 16 or 32 columns next to one of 128 spills 1.4 KB per thread, so it has 64 there.
    """
    power = next_power_of_2(D)
    if power == D:
        return D, 0
    rest = max(64 if power == 256 else 16, next_power_of_2(D - power // 2))
    return (power // 2, rest) if power // 2 + rest < power else (power, 0)


def tail_tile(length: int, tile: int) -> int:
    """Return the tile for the remainder of `length` after full tiles: at least 16, for tensor cores; 0 if none."""
    rest = length % tile
    return min(tile, max(16, next_power_of_2(rest))) if rest else 0


def forward(inputs: FlashInputs, out_BHND: Tensor, lse_BHN: Tensor, tiles: TileConfig | None = None) -> Launch | None:
    """Fill out and lse. Like each pass below, return the launch for reuse with other tensors; None if interpreted."""
    return _launch_pass(inputs, forward_kernel, "N", (out_BHND,), (lse_BHN,), tiles, forward_tiles)


def backward(
    inputs: FlashInputs,
    out: Tensor,
    lse_BHN: Tensor,
    do: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    sizes: Sequence[int] = (),
) -> tuple[Tensor, list[Launch | None]]:
    """Fill dq, dk and dv. Return delta, which `bias_gradient` needs, and the launches. sizes: see `requested_tiles`."""
    out, do, lse_BHN = readable(out), readable(do), aligned(lse_BHN)  # autograd hooks may have replaced out and lse
    delta_BHN = lse_BHN.new_empty(inputs.q.shape[:3])
    launches = [dq_pass(inputs, out, lse_BHN, do, delta_BHN, dq, requested_tiles(inputs, sizes, 1))]
    if inputs.k.shape[2]:
        launches.append(dkdv_pass(inputs, lse_BHN, do, delta_BHN, dk, dv, requested_tiles(inputs, sizes, 2)))
    return delta_BHN, launches


def dq_pass(inputs: FlashInputs, out, lse_BHN, do, delta_BHN, dq, tiles: TileConfig | None = None) -> Launch | None:
    """Fill dq and delta."""
    return _launch_pass(inputs, dq_kernel, "N", (out, do, dq), (lse_BHN, delta_BHN), tiles, dq_tiles)


def dkdv_pass(inputs: FlashInputs, lse_BHN, do, delta_BHN, dk, dv, tiles: TileConfig | None = None) -> Launch | None:
    """Fill dk and dv from delta; requires at least one key."""
    return _launch_pass(inputs, dkdv_kernel, "M", (do, dk, dv), (lse_BHN, delta_BHN), tiles, dkdv_tiles)


def requested_tiles(inputs: FlashInputs, sizes: Sequence[int], which: int) -> TileConfig | None:
    """Return the tiles requested for pass 0 (forward), 1 (dq) or 2 (dkdv), or None to choose by shape.

    sizes: (queries, keys) of each pass in turn, 0 if not requested; or empty.
    """
    n, m = sizes[2 * which : 2 * which + 2] or (0, 0)
    if n == 0:
        return None
    return replace((forward_tiles, dq_tiles, dkdv_tiles)[which](inputs), n=n, m=m, maxnreg=None)


# Layout of the inputs -> bound launch that takes only tensors. Short kernels are host-bound otherwise.
_bound = BoundedCache()


def _launch_pass(
    inputs: FlashInputs, kernel, own: str, rows: tuple, statistics: tuple, tiles: TileConfig | None, choose
) -> Launch | None:
    """Launch a kernel whose programs own tiles of queries (own="N") or of keys ("M") and loop over the others."""
    tensors = inputs.q, inputs.k, inputs.v, *rows, *statistics, *inputs.extras
    device = inputs.q.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch_pass(inputs, kernel, own, rows, statistics, tiles, choose)
    key = kernel, tiles, inputs.layout, *(x.stride() for x in rows)
    bound = _bound.get(key)
    if bound is not None:
        bound(*tensors)
        return bound
    B, H, N, _ = inputs.q.shape
    M = inputs.k.shape[2]
    of_rows = (stride for x in (inputs.q, inputs.k, inputs.v, *rows) for stride in strides(x))
    numbers = *of_rows, *inputs.extra_strides, H, N, M, inputs.scale

    def launch(tiles: TileConfig) -> Launch | None:
        programs = B * H * (cdiv(N, tiles.n) if own == "N" else cdiv(M, tiles.m))
        constants = inputs.constants | _tiling(inputs, tiles, own) | tiles.options
        call = triton_call if _is_interpreted(kernel, device) else bind
        return call(*tensors, *numbers, kernel=kernel, grid=(programs,), **constants)

    bound = launch(tiles) if tiles else launch_fitting(choose(inputs), launch)
    if bound is not None:
        _bound[key] = bound
    return bound


def _is_interpreted(kernel, device: torch.device) -> bool:
    return device.type == "cpu" or not isinstance(kernel, JITFunction)


def launch_fitting(tiles: TileConfig, launch: Callable[[TileConfig], Launch | None]) -> Launch | None:
    """Launch with `tiles`, or with the first smaller ones that fit into this GPU's shared memory.

    The tiles were measured on Hopper, which has 227 KB for a thread block; Ada and consumer Ampere have 99 KB.
    """
    while True:
        try:
            return launch(tiles)
        except OutOfResources:
            smaller = tiles.smaller()
            if smaller is None:
                raise
            tiles = smaller


def _tiling(inputs: FlashInputs, tiles: TileConfig, own: str) -> dict:
    """Return the tile sizes as constexprs.

    A general kernel masks every tile, so all tiles that it owns count as ragged and its loop needs no tail.
    """
    N, M = inputs.q.shape[2], inputs.k.shape[2]
    tails = {"TAIL_N": tail_tile(N, tiles.n), "TAIL_M": tail_tile(M, tiles.m)}
    if inputs.general:
        tails = {"TAIL_N": tiles.n if own == "N" else 0, "TAIL_M": tiles.m if own == "M" else 0}
    return {"TILE_N": tiles.n, "TILE_M": tiles.m, **tails, "GENERAL": inputs.general, "CAUSAL": inputs.is_causal}


def bias_gradient(inputs: FlashInputs, bias_shape: tuple[int, ...], lse_BHN, do, delta_BHN) -> Tensor:
    """Return the float32 gradient of a bias of `bias_shape` that was broadcast to (B, H, N, M)."""
    B, H, N, _ = inputs.q.shape
    M = inputs.k.shape[2]
    bias_B, bias_H, bias_N, bias_M = (1,) * (4 - len(bias_shape)) + tuple(bias_shape)
    do = readable(do)
    dbias_BHNM = lse_BHN.new_empty(bias_B, bias_H, N, M)

    def launch(tiles: TileConfig) -> None:
        triton_call(
            inputs.q, inputs.k, inputs.v, do, dbias_BHNM, lse_BHN, delta_BHN, *inputs.extras,
            *strides(inputs.q), *strides(inputs.k), *strides(inputs.v), *strides(do), *inputs.extra_strides,
            B, H, N, M, bias_H, bias_B, bias_H, inputs.scale,
            kernel=dbias_kernel,
            grid=(bias_B * bias_H * cdiv(N, tiles.n) * cdiv(M, tiles.m),),
            **inputs.constants, TILE_N=tiles.n, TILE_M=tiles.m, CAUSAL=inputs.is_causal, **tiles.options,
        )  # fmt: skip

    if dbias_BHNM.numel():
        launch_fitting(_dbias_tiles(inputs), launch)
    summed = [axis for axis, size in ((2, bias_N), (3, bias_M)) if size == 1 != dbias_BHNM.shape[axis]]
    return (dbias_BHNM.sum(summed, keepdim=True) if summed else dbias_BHNM).reshape(bias_shape)


def _dbias_tiles(inputs: FlashInputs) -> TileConfig:
    """Return the tiles of a bias's gradient: with four warps instead of eight the kernel spills."""
    if _is_f32(inputs):
        return TileConfig(16, 16)
    if inputs.rope is not None:  # sines and cosines take twice the shared memory of the rows that they rotate
        return TileConfig(32, 32, 4, 1)
    return TileConfig(64, 64, 8, 3 if _size(inputs)[1] <= 64 else 1)


def _is_f32(inputs: FlashInputs) -> bool:
    """Return whether products run in float32 on CUDA cores, where registers hold few of a tile's operands."""
    return inputs.q.dtype == torch.float32 and inputs.q.is_cuda


def _size(inputs: FlashInputs) -> tuple[int, int]:
    """Return the longer of queries and keys, and the number of columns of a head's tiles."""
    return max(inputs.q.shape[2], inputs.k.shape[2]), sum(split_head_dim(inputs.q.shape[3]))


def _fits_128(length: int) -> bool:
    """Return whether tiles of 128 rows leave few rows empty."""
    return length > 512 or length % 128 > 64


def forward_tiles(inputs: FlashInputs) -> TileConfig:
    """Choose many small programs for short sequences, large tiles for long ones, small steps for ragged ones."""
    length, width = _size(inputs)
    if _is_f32(inputs):
        return TileConfig(32, 32, 4, 1) if width <= 128 else TileConfig(16, 16, 8, 1)
    if width > 128:
        return TileConfig(64, 32, 8, 1)
    if inputs.general or inputs.rope is not None:
        return TileConfig(64, 32, 4, 2)
    if width > 96 and length > 512:
        return TileConfig(128, 64, 8, 3)
    if width > 64 and length % 64 == 0:
        return TileConfig(64, 64, 4, 2)
    if width == 96 and not _fits_128(length):
        return TileConfig(64, 32, 4, 3)
    if width > 80:
        return TileConfig(128, 64, 8, 3)
    if width > 64:
        return TileConfig(128, 64, 8, 3, 128) if _fits_128(length) else TileConfig(64, 64, 4, 3, 128)
    if length > 2048:
        return TileConfig(128, 64, 8, 3, 128)
    if length > 512:
        return TileConfig(128, 64, 8, 3, 104)
    return TileConfig(64, 64, 4, 3) if length % 64 == 0 else TileConfig(64, 32, 4, 3, 80)


def dq_tiles(inputs: FlashInputs) -> TileConfig:
    """Choose the tiles of the dq pass, measured like `forward_tiles`."""
    length, width = _size(inputs)
    if _is_f32(inputs):
        return TileConfig(32, 16, 4, 1) if width <= 128 else TileConfig(16, 16, 8, 1)
    if width > 128:
        return TileConfig(64, 32, 8, 1)
    if inputs.general or inputs.rope is not None:
        return TileConfig(64, 32, 4, 2)
    if width > 96 and length > 512:
        return TileConfig(128, 32, 8, 3)
    if width > 64 and length % 64 == 0:
        return TileConfig(64, 32, 4, 2)
    if width > 80:
        return TileConfig(64, 32, 4, 3)
    if width > 64:
        return TileConfig(128, 64, 8, 3, 128) if length > 512 else TileConfig(64, 32, 4, 2, 128)
    return TileConfig(128, 64, 8, 3, 128) if length > 512 else TileConfig(64, 32, 4, 3, 96)


def dkdv_tiles(inputs: FlashInputs) -> TileConfig:
    """Choose the tiles of the dkdv pass, measured like `forward_tiles`."""
    length, width = _size(inputs)
    if _is_f32(inputs):
        return TileConfig(16, 32, 4, 1) if width <= 128 else TileConfig(16, 16, 8, 1)
    if width > 128:
        return TileConfig(32, 64, 8, 1)
    if inputs.general or inputs.rope is not None:
        return TileConfig(32, 64, 4, 2)
    if width > 96 and length > 512:
        return TileConfig(64, 64, 4, 2)
    if width > 64 and length % 64 == 0:
        return TileConfig(32, 64, 4, 3)
    if width == 96 and not _fits_128(length):
        return TileConfig(32, 64, 4, 3)
    if width > 80:
        return TileConfig(64, 64, 4, 3)
    if width > 64:
        return TileConfig(32, 128, 8, 3, 128) if _fits_128(length) else TileConfig(64, 64, 4, 2, 168)
    if length > 2048:
        return TileConfig(64, 64, 4, 3)
    return TileConfig(64, 64, 4, 3, 168) if length > 512 else TileConfig(32, 64, 4, 3, 128)
