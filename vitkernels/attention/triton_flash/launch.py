"""Launch the flash-attention kernels: grids, workspaces, and launches bound once per layout.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from triton import JITFunction
from triton.runtime.errors import OutOfResources

from vitkernels.attention.triton_flash.backward import dkdv_kernel, dq_kernel
from vitkernels.attention.triton_flash.bias_gradient import MOST_SCORES, add_up, new_scores
from vitkernels.attention.triton_flash.forward import forward_kernel
from vitkernels.attention.triton_flash.hopper import launch as hopper
from vitkernels.attention.triton_flash.inputs import FlashInputs
from vitkernels.attention.triton_flash.single_tile import single_tile_backward_kernel, single_tile_forward_kernel
from vitkernels.attention.triton_flash.tiling import (
    TileConfig,
    dkdv_tiles,
    dq_tiles,
    fits_one_tile,
    forward_tiles,
    requested_tiles,
    single_backward_tiles,
    single_forward_tiles,
    single_tile_runs,
    tail_tile,
)
from vitkernels.bridge.operator import BoundedCache, aligned, readable, row_strides
from vitkernels.bridge.triton import bind, cdiv, triton_call

T = TypeVar("T")
Launch = Callable[..., None]  # takes tensors, or their addresses
Bind = Callable[[int, dict], Launch | None]  # launches programs with constexprs and options; returns the launch


def forward(inputs: FlashInputs, out_BHND: Tensor, lse_BHN: Tensor, sizes: Sequence[int] = ()) -> Launch | None:
    """Fill out and lse. Return the launch for reuse with other tensors; None if interpreted.

    sizes: see `requested_tiles`.
    """
    if fits_one_tile(inputs, sizes):
        return _launch_runs(inputs, single_tile_forward_kernel, (out_BHND,), (lse_BHN,), single_forward_tiles)
    tiles = requested_tiles(inputs, sizes, 0)
    rows, statistics = (out_BHND,), (lse_BHN,)
    return _launch_pass(inputs, forward_kernel, "N", rows, statistics, tiles, forward_tiles, hopper.forward)


def backward(
    inputs: FlashInputs,
    out: Tensor,
    lse_BHN: Tensor,
    do: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    sizes: Sequence[int] = (),
    bias_shape: tuple[int, ...] | None = None,
) -> tuple[Tensor | None, list[Launch | None]]:
    """Fill grads: dq, dk and dv. Return the float32 gradient of a bias of `bias_shape` if given, and the launches.

    The launches serve plain calls. With the gradient of a bias, those of dq are not among them.

    sizes: see `requested_tiles`.
    """
    do, lse_BHN = readable(do), aligned(lse_BHN)  # autograd hooks may have replaced out and lse
    bias_shape = bias_shape if bias_shape is None else (1,) * (4 - len(bias_shape)) + bias_shape
    if fits_one_tile(inputs, sizes) and (bias_shape is None or bias_shape[0] == 1):
        return _single_tile_backward(inputs, lse_BHN, do, grads, bias_shape)
    dq, dk, dv = grads
    delta_BHN = lse_BHN.new_empty(inputs.q.shape[:3])
    out, tiles = readable(out), requested_tiles(inputs, sizes, 1)
    dbias, launches = None, []
    if bias_shape is None:
        launches.append(dq_pass(inputs, out, lse_BHN, do, delta_BHN, dq, None, tiles))
    else:
        dbias = _dq_and_bias_gradient(inputs, bias_shape, out, lse_BHN, do, delta_BHN, dq, tiles)
    if inputs.k.shape[2]:
        tiles = requested_tiles(inputs, sizes, 2)
        launches.append(dkdv_pass(inputs.with_keys_first(), lse_BHN, do, delta_BHN, dk, dv, tiles))
    return dbias, launches


def dq_pass(
    inputs: FlashInputs, out, lse_BHN, do, delta_BHN, dq, ds: Tensor | None, tiles: TileConfig | None = None
) -> Launch | None:
    """Fill dq and delta and, unless it is None, ds; see `new_scores`."""
    rows, statistics = (out, do, dq), (lse_BHN, delta_BHN, ds)
    return _launch_pass(inputs, dq_kernel, "N", rows, statistics, tiles, dq_tiles, hopper.dq)


def dkdv_pass(inputs: FlashInputs, lse_BHN, do, delta_BHN, dk, dv, tiles: TileConfig | None = None) -> Launch | None:
    """Fill dk and dv from delta; requires at least one key."""
    rows, statistics = (do, dk, dv), (lse_BHN, delta_BHN)
    return _launch_pass(inputs, dkdv_kernel, "M", rows, statistics, tiles, dkdv_tiles, hopper.dkdv)


# Layout of the inputs -> bound launch that takes only tensors. Short kernels are host-bound otherwise.
_bound = BoundedCache()


def _launch_pass(
    inputs: FlashInputs,
    kernel,
    own: str,
    rows: tuple,
    statistics: tuple,
    tiles: TileConfig | None,
    choose: Callable[[FlashInputs], TileConfig],
    on_hopper: Callable[[FlashInputs, tuple, tuple], Launch | None],
) -> Launch | None:
    """Launch a kernel whose programs own tiles of queries (own="N") or of keys ("M") and loop over the others.

    on_hopper: launches the kernel for Hopper instead; returns None if it does not run the call.
    """

    def first(bind: Bind) -> Launch | None:
        B, H, N, _ = inputs.q.shape
        M = inputs.k.shape[2]

        def launch(tiles: TileConfig) -> Launch | None:
            owned = cdiv(N, tiles.n) if own == "N" else cdiv(M, tiles.m)
            owned = owned if inputs.segment_tiles is None else inputs.segment_tiles.shape[1]
            return bind(B * H * owned, _tiling(inputs, tiles, own) | tiles.options)

        if tiles:
            return launch(tiles)
        bound = None if _is_interpreted(kernel, inputs.q.device) else on_hopper(inputs, rows, statistics)
        return bound or launch_fitting(choose(inputs), launch)

    return _launch(inputs, kernel, rows, statistics, (), tiles, first)


def _launch_runs(
    inputs: FlashInputs,
    kernel,
    rows: tuple,
    statistics: tuple,
    choose: Callable[[FlashInputs], TileConfig],
    numbers: tuple[int, ...] = (),
) -> Launch | None:
    """Launch a single-tile kernel, whose programs own one head in a run of batch entries."""
    B, H, _, _ = inputs.q.shape
    parts, run = single_tile_runs(inputs)

    def first(bind: Bind) -> Launch | None:
        chosen = choose(inputs)  # smaller tiles would not hold all tokens: only their stages may shrink
        _check_padding(inputs, chosen)
        constants = {"TILE_N": chosen.n, "TILE_M": chosen.m, "CAUSAL": inputs.is_causal}
        return launch_fitting(chosen, lambda tiles: bind(parts * H, constants | tiles.options))

    return _launch(inputs, kernel, rows, statistics, (B, run, *numbers), None, first)


def _launch(
    inputs: FlashInputs,
    kernel,
    rows: tuple,
    statistics: tuple,
    numbers: tuple[int, ...],
    tiles: TileConfig | None,
    first: Callable[[Bind], Launch | None],
) -> Launch | None:
    """Launch as `first` does, or as it did for an earlier call with this layout."""
    tensors = inputs.q, inputs.k, inputs.v, *rows, *statistics, *inputs.extras
    device = inputs.q.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(inputs, kernel, rows, statistics, numbers, tiles, first)
    key = kernel, tiles, inputs.layout, numbers, *(x.stride() for x in rows), *(x is None for x in statistics)
    bound = _bound.get(key)
    if bound is not None:
        bound(*tensors)
        return bound
    of_rows = (stride for x in (inputs.q, inputs.k, inputs.v, *rows) for stride in row_strides(x))
    _, H, N, _ = inputs.q.shape
    all_numbers: tuple = *of_rows, *inputs.extra_strides, H, N, inputs.k.shape[2], inputs.scale, *numbers

    def call(programs: int, constants: dict) -> Launch | None:
        run = triton_call if _is_interpreted(kernel, device) else bind
        return run(*tensors, *all_numbers, kernel=kernel, grid=(programs,), **inputs.constants, **constants)

    bound = first(call)
    if bound is not None:
        _bound[key] = bound
    return bound


def _is_interpreted(kernel, device: torch.device) -> bool:
    return device.type == "cpu" or not isinstance(kernel, JITFunction)


def launch_fitting(tiles: TileConfig, launch: Callable[[TileConfig], T]) -> T:
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


def _check_padding(inputs: FlashInputs, tiles: TileConfig) -> None:
    """Make sure that the bias and the mask have all keys, and that no tile reaches beyond their rows."""
    keys = inputs.k.shape[2]
    for x in (inputs.bias, inputs.mask):
        if x is None:
            continue
        rest = x.shape[3] % tiles.m if x.stride(3) == 1 else x.shape[2] % tiles.n
        if rest or x.shape[3] < keys:
            raise ValueError(f"bias and mask must come from padded_keys; got {tuple(x.shape)} for {keys} keys, {tiles}")


def _tiling(inputs: FlashInputs, tiles: TileConfig, own: str) -> dict:
    """Return the tile sizes as constexprs.

    The lengths of packed segments are known only on the device: any number of rows may remain, so a streamed tail is an
    entire tile. In calls that mask every tile, separate tails save time only in the dkdv kernel.
    """
    _check_padding(inputs, tiles)
    N, M = inputs.q.shape[2], inputs.k.shape[2]
    tails = {"TAIL_N": tail_tile(N, tiles.n), "TAIL_M": tail_tile(M, tiles.m)}
    if inputs.segment_tiles is not None:
        tails = {"TAIL_N": 16, "TAIL_M": tiles.m} if own == "N" else {"TAIL_N": tiles.n, "TAIL_M": 16}
    elif inputs.general and own == "N":
        tails = {"TAIL_N": tiles.n, "TAIL_M": 0}
    return {"TILE_N": tiles.n, "TILE_M": tiles.m, **tails, "GENERAL": inputs.general, "CAUSAL": inputs.is_causal}


def _single_tile_backward(
    inputs: FlashInputs,
    lse_BHN: Tensor,
    do: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    bias_shape: tuple[int, ...] | None,
) -> tuple[Tensor | None, list[Launch | None]]:
    def launch(partial: Tensor | None) -> list[Launch | None]:
        kernel, rows, statistics = single_tile_backward_kernel, (do, *grads), (lse_BHN, partial)
        columns = 0 if partial is None else partial.shape[4]
        return [_launch_runs(inputs, kernel, rows, statistics, single_backward_tiles, (columns,))]

    if bias_shape is None:
        return None, launch(None)
    _, H, N, _ = inputs.q.shape
    columns = bias_shape[3]
    filled = single_backward_tiles(inputs).m >= columns
    new = lse_BHN.new_empty if filled else lse_BHN.new_zeros
    partial = new(single_tile_runs(inputs)[0], 1, H, N, columns)
    launches = launch(partial)
    return _summed(partial, bias_shape), launches


def _dq_and_bias_gradient(
    inputs: FlashInputs, bias_shape: tuple[int, ...], out, lse_BHN, do, delta_BHN, dq, tiles: TileConfig | None
) -> Tensor:
    """Fill dq and delta, and return the float32 gradient of a bias of `bias_shape`; 0 for padding.

    For as many batch entries at a time as MOST_SCORES allows.
    """
    B, H, N, _ = inputs.q.shape
    M = inputs.k.shape[2]
    bias_B, bias_H, _, columns = bias_shape
    if 0 in (B, H, N, M):
        dq_pass(inputs, out, lse_BHN, do, delta_BHN, dq, None, tiles)
        return lse_BHN.new_zeros(bias_shape)
    total = lse_BHN.new_empty(bias_B, bias_H, N, columns)
    at_once = max(1, MOST_SCORES // (H * N * columns))
    for first in range(0, B, at_once):
        entries = slice(first, first + at_once)
        some = inputs.of_entries(entries)
        ds = new_scores(some)
        dq_pass(some, out[entries], lse_BHN[entries], do[entries], delta_BHN[entries], dq[entries], ds, tiles)
        add_up(ds, M, total if bias_B == 1 else total[entries], adds=bias_B == 1 and first > 0)
        del ds  # before the next one is allocated
    return _summed(total[None], bias_shape)


def _summed(partial: Tensor, bias_shape: tuple[int, ...]) -> Tensor:
    """Add partial sums (runs, batch or 1, heads, N, M) over the runs and the dimensions that the bias lacks."""
    wanted = (1, *bias_shape)
    axes = [i for i, (size, left) in enumerate(zip(partial.shape, wanted, strict=True)) if size != left]
    return (partial.sum(axes) if axes else partial).reshape(bias_shape)
