"""A head's rows in the short backward kernel of `pallas_flash` on Hopper, as one of its warpgroups sees them.

A warpgroup owns a tile of the head's queries, one of its keys, or both. It requests its rows of the next head, and
computes their rowsum(dO O).
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles
from vitkernels.attention.pallas_flash.hopper.per_head import Place
from vitkernels.attention.pallas_flash.hopper.row_registers import CHUNK, load_chunk, store_row_sums
from vitkernels.attention.pallas_flash.hopper.tiles import ROWS, at

if TYPE_CHECKING:
    from vitkernels.attention.pallas_flash.hopper.short_backward import ShortBackward


@dataclass(frozen=True)
class HeadRows:
    """The rows of one head, and of the next, as a warpgroup sees them.

    Addresses would not fit in registers. Each is computed anew from the warpgroup's number, which stays in a register.

    iteration: the head's number among those that the warpgroup processes, of which there are `iterations`.
    """

    kernel: "ShortBackward"
    refs: dict
    scratch: dict
    warpgroup: jax.Array
    iteration: jax.Array
    iterations: jax.Array

    @property
    def more(self):
        """Return whether there is a next head."""
        return self.iteration + 1 < self.iterations

    @property
    def own(self):
        """Return which tile of the head's keys, and which of its queries, this warpgroup owns."""
        kernel = self.kernel
        if kernel.per_head == 1:
            return kernel.opaque(0)
        warpgroup = kernel.opaque(self.warpgroup)
        return warpgroup if kernel.heads_at_once == 1 else lax.rem(warpgroup, kernel.per_head)

    @property
    def group(self):
        return self.kernel.group_of(self.kernel.opaque(self.warpgroup))

    def if_owns(self, count: int, function) -> None:
        """Call a function in the warpgroups that own one of `count` tiles of the head."""
        if count == self.kernel.per_head:
            function()
        else:
            pl.when(self.own < count)(function)

    def place(self, ahead: int = 0) -> Place:
        return self._place_of(self.kernel.opaque(self.iteration) + ahead)

    def _place_of(self, iteration) -> Place:
        return self.kernel.place_of(iteration, self.refs["ids"], self.scratch, self.group)

    def index(self, tile):
        """Return the index in shared memory of a tile of the group's head."""
        return self.group * self.kernel.per_head + tile

    def smem(self, name: str, tile) -> tuple:
        return at(self.scratch[f"{name}_smem"], self.index(tile))

    def vector(self, name: str, tile):
        return self.scratch[f"{name}_smem"].at[self.index(tile)]

    def barrier(self, name: str, tile):
        return self.scratch[name].at[self.index(tile)]

    # --- the own rows of the next head --------------------------------------------------------------------------------

    def request_first(self) -> None:
        """Request the first head, and compute its delta. Called for iteration -1."""
        kernel = self.kernel
        for ahead in (1, 2):
            self.request_place(ahead)
        kernel.wait_for_place(jnp.int32(0), self.scratch)
        self.if_owns(kernel.key_tiles, self.request_keys)
        self.if_owns(kernel.key_tiles, partial(self.request, "v"))
        if kernel.copies_bias:
            self.if_owns(kernel.key_tiles, partial(self.request_bias, jnp.int32(0), 1))
        self.if_owns(kernel.query_tiles, self.request_queries)
        self.if_owns(kernel.query_tiles, lambda: self.put_delta(self.load_factors()))

    def request_place(self, ahead: int) -> None:
        """Have the first warpgroup request which quad a later iteration processes."""
        if self.kernel.has_quads:
            where = self.iteration + ahead, self.iterations, self.refs["ids"], self.scratch
            pl.when(self.warpgroup == 0)(lambda: self.kernel.request_place(*where))

    def request(self, name: str, arrived: str | None = None, first: int = 0) -> None:
        """Request the own tile of an array, to the tiles from `first` on."""
        kernel, place, own = self.kernel, self.place(1), self.own
        head = place.head + (kernel.first_heads["qkv".index(name)] if name in "qkv" else 0)
        index = first + self.index(own)
        where = place.batch, kernel.row_of(place, own), head, self.scratch[f"{name}_smem"], index
        tiles.load_rows(self.refs[name], *where, self.barrier(arrived or f"{name}_arrived", own), kernel.interpret)

    def request_keys(self) -> None:
        self.request("k", first=self._first_key_tile(1))
        if self.kernel.compares_ids:
            self._request_ids(1, "k", self._first_key_tile(1))

    def _first_key_tile(self, ahead: int = 0):
        """Return the first tile in shared memory of the buffer that holds a head's keys."""
        if self.kernel.key_buffers == 1:
            return 0
        return lax.rem(self.kernel.opaque(self.iteration) + ahead, 2) * self.kernel.warpgroups

    def k(self, tile) -> tuple:
        """Return a tile of the head's keys."""
        return at(self.scratch["k_smem"], self._first_key_tile() + self.index(tile))

    def own_key_ids(self):
        return self.scratch["k_ids_smem"].at[self._first_key_tile() + self.index(self.own)]

    def request_queries(self) -> None:
        """Request the own queries, and their dO, log-sum-exp and ids."""
        self.request("q")
        self.request("do", arrived="q_arrived")
        own, place = self.own, self.place(1)
        source = self.refs["lse"].at[place.batch, place.head, pl.ds((place.chunk + own) * ROWS, ROWS)]
        plgpu.copy_gmem_to_smem(source, self.vector("lse", own), self.barrier("q_arrived", own))
        if self.kernel.compares_ids:
            self._request_ids(0, "q")

    def _request_ids(self, side: int, name: str, first: int = 0) -> None:
        own = self.own
        source = self.refs["ids"][side].at[self.place(1).batch, pl.ds(own * ROWS, ROWS)]
        smem = self.scratch[f"{name}_ids_smem"].at[first + self.index(own)]
        plgpu.copy_gmem_to_smem(source, smem, self.barrier(f"{name}_arrived", own))

    # --- delta, rowsum(dO O), of the own queries of the next head -----------------------------------------------------

    def prefetch_factors(self) -> None:
        """Have the own rows of O and dO fetched to the L2 cache; device memory would take too long later."""
        place = self.place(1)
        for name in ("out", "do"):
            row = self.kernel.row_of(place, self.own)
            tiles.prefetch_rows(self.refs[name], place.batch, row, place.head, self.kernel.interpret)

    def load_factors(self) -> list[tuple]:
        """Return chunks of the own rows of O and dO of the next head, in registers.

        For the last head, they are its own rows, which nobody uses.
        """
        kernel = self.kernel
        place = self._place_of(lax.min(kernel.opaque(self.iteration) + 1, self.iterations - 1))
        factors = [self.refs[name].at[place.batch, :, place.head] for name in ("out", "do")]
        first = kernel.row_of(place, self.own)
        rows = range(0, ROWS, CHUNK)
        return [tuple(load_chunk(x, first + row, kernel.interpret) for x in factors) for row in rows]

    def put_delta(self, factors: list[tuple]) -> None:
        """Store delta and announce it. It is 0 past the last query, where it could make dS infinite in float16."""
        kernel, delta = self.kernel, self.vector("delta", self.own)
        for i, (out, do) in enumerate(factors):
            rows = kernel.queries_at_once - self.own * ROWS - i * CHUNK if kernel.queries_at_once % ROWS else CHUNK
            store_row_sums(out, do, rows, delta.at[pl.ds(i * CHUNK, CHUNK)], kernel.interpret)
        plgpu.barrier_arrive(self.barrier("delta_ready", self.own))

    # --- a bias -------------------------------------------------------------------------------------------------------

    def bias(self, place: Place, tile, columns: int):
        """Return the bias, in device memory, of the own keys and the first `columns` queries of a tile."""
        kernel = self.kernel
        where = kernel.opaque(place.batch), kernel.opaque(place.head), self.own * ROWS, tile * ROWS
        return kernel.bias_at(self.refs["bias"], *where, columns)

    def request_bias(self, tile, ahead: int) -> None:
        """Start copying the bias of the own keys and a tile of queries to shared memory."""
        kernel = self.kernel
        kernel.copy_bias(self.bias(self.place(ahead), tile, ROWS), lax.axis_index("warpgroup"), self.scratch)

    def request_next_bias(self, tile) -> None:
        """Request the bias of the own keys and the tile of queries after this one, if it belongs in shared memory."""
        if not self.kernel.copies_bias:
            return
        was_last = tile == self.kernel.query_tiles - 1
        pl.when(~was_last)(lambda: self.request_bias(tile + 1, 0))
        pl.when(was_last & self.more)(lambda: self.request_bias(jnp.int32(0), 1))
