"""The tensors of one attention call, in the form that the flash-attention kernels read.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from vitkernels.attention.triton_flash.keys_first import keys_first
from vitkernels.bridge.operator import readable, row_strides
from vitkernels.bridge.triton import next_power_of_2

LARGEST_STEP = 64  # the most keys in a tile of a call with a bias or mask, unless its tiles are requested


@dataclass(frozen=True)
class FlashInputs:
    """The inputs that all kernels of one attention call share. Tensors are (B, H, N or M, D) views of any layout."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None  # bias and mask come from padded_keys and are expanded to (B, H, N, M or more)
    mask: Tensor | None
    segment_ids: Tensor | None  # (B, N)
    is_causal: bool
    scale: float  # greater than 0
    segment_tiles: Tensor | None = None  # (B, tiles, 4); see segments.py

    @classmethod
    def of(cls, q, k, v, bias, mask, segment_ids, is_causal, scale, segment_tiles=None) -> "FlashInputs":
        if scale <= 0:
            raise ValueError(f"scale must be positive, got {scale}: multiply q by it, and pass 1")
        return cls(
            q=readable(q),
            k=readable(k),
            v=readable(v),
            bias=None if bias is None else bias.expand(*q.shape[:3], -1),
            mask=None if mask is None else mask.expand(*q.shape[:3], -1).view(torch.uint8),
            segment_ids=segment_ids,
            is_causal=is_causal,
            scale=scale,
            segment_tiles=segment_tiles,
        )

    @property
    def general(self) -> bool:
        """Return whether every tile masks its scores."""
        compares = self.segment_ids is not None and self.segment_tiles is None
        hides = self.bias is not None or self.mask is not None or compares or self.is_causal
        return hides or self.k.shape[2] == 0

    @property
    def skips_tiles(self) -> bool:
        """Return whether programs may skip tiles in which no query attends to a key."""
        hides_keys = self.mask is not None and row_strides(self.mask)[2] == 0
        return hides_keys or self.is_causal or self.segment_ids is not None

    def of_entries(self, entries: slice) -> "FlashInputs":
        """Return the inputs of some batch entries, of a call without segment_tiles."""
        assert self.segment_tiles is None
        bias, mask, segment_ids = (x if x is None else x[entries] for x in (self.bias, self.mask, self.segment_ids))
        q, k, v = self.q[entries], self.k[entries], self.v[entries]
        return replace(self, q=q, k=k, v=v, bias=bias, mask=mask, segment_ids=segment_ids)

    def with_keys_first(self) -> "FlashInputs":
        """Return these inputs with bias and mask as the dkdv kernel reads them fastest."""
        bias, mask = (
            x if x is None or row_strides(x)[2] == 0 else keys_first(x, self.k.shape[2]) for x in (self.bias, self.mask)
        )
        return replace(self, bias=bias, mask=mask)

    @property
    def extras(self) -> tuple[Tensor | None, ...]:
        return self.bias, self.mask, self.segment_ids, self.segment_tiles

    @property
    def extra_strides(self) -> tuple[int | None, ...]:
        """Return the strides of the extras, and the number of tiles per batch entry.

        See `_matrix_strides` for those of bias and mask.
        """
        of_segments = (0,) * 2 if self.segment_ids is None else self.segment_ids.stride()
        tiles = 0 if self.segment_tiles is None else self.segment_tiles.shape[1]
        return *_matrix_strides(self.bias), *_matrix_strides(self.mask), *of_segments, tiles

    @cached_property
    def layout(self) -> tuple:
        """Return everything that a launch depends on, except for the addresses of the tensors."""
        q, k, v = self.q, self.k, self.v
        of_extras = [x if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16 == 0) for x in self.extras]
        return (q.shape, k.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, *of_extras,
                self.is_causal, self.scale)  # fmt: skip

    @property
    def constants(self) -> dict:
        D = self.q.shape[3]
        D1, D2 = split_head_dim(D)
        return {"D": D, "D1": D1, "D2": D2, "PRECISION": "ieee"}

    def new_statistics(self) -> Tensor:
        """Return an uninitialized tensor for the log-sum-exps; see forward_kernel."""
        return self.q.new_empty(statistics_shape(self.q, self.bias), dtype=torch.float32)


def statistics_shape(q_BHND: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """Return the shape of the saved log-sum-exps: (B, H, N), or with a bias (B, H, 2, N)."""
    B, H, N, _ = q_BHND.shape
    return (B, H, N) if bias is None else (B, H, 2, N)


def _matrix_strides(x_BHNM: Tensor | None) -> tuple[int | None, ...]:
    """Return the strides of batch, heads, queries and keys of an expanded bias or mask.

    None stands for adjacent elements: of the keys or, after `keys_first`, of the queries. If all queries share a row,
    both are None.
    """
    if x_BHNM is None:
        return 0, 0, None, None
    b, h, n = row_strides(x_BHNM)
    m = x_BHNM.stride(3)
    return (b, h, n or None, None) if m == 1 else (b, h, None, m)


def padded_keys(x: Tensor | None, keys: int, sizes: Sequence[int], fill: float | bool) -> Tensor | None:
    """Return a bias or mask (B or 1, H or 1, N or 1, M) whose rows are whole tiles of contiguous keys.

    Kernels can then load 16 bytes at a time and need not compare key numbers: `fill` (-inf or False) hides the added
    keys. This runs outside the operators of attention. So a model does it once for all layers that share a mask, and a
    compiled model does it together with what makes the bias.

    Args:
        x: broadcastable to (B, H, N, M), or None.
        sizes: the requested tiles; see `requested_tiles`.
    """
    if x is None:
        return None
    x = x[(None,) * (4 - x.ndim)]
    x = x.expand(*x.shape[:3], keys)
    if not x.requires_grad:  # heads and queries that share rows share them after padding, too
        x = x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride()[:3])]
    tile = max((LARGEST_STEP, *sizes[1::2]))
    added = -keys % tile if keys else tile
    if isinstance(added, torch.SymInt) or added:  # traced with a dynamic length, padding must not depend on the length
        return functional.pad(x, (0, added), value=fill)
    return x if x.stride(3) == 1 else x.contiguous()


def split_head_dim(D: int) -> tuple[int, int]:
    """Return the two power-of-two tiles of a head dim: 64 -> 64, 0; 80 -> 64, 16; 88 -> 64, 32; 104 -> 128, 0.

    A second tile of 16 or 32 columns next to one of 128 spills 1.4 KB per thread, so it has 64 there.
    """
    power = next_power_of_2(D)
    if power == D:
        return D, 0
    rest = max(64 if power == 256 else 16, next_power_of_2(D - power // 2))
    return (power // 2, rest) if power // 2 + rest < power else (power, 0)
