"""Kernels of `pallas_flash` on Hopper that process a head at once: their loop over heads, and where the rows lie."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import groups, tiles
from vitkernels.attention.pallas_flash.hopper.chunks import (
    FIELDS,
    QUAD,
    QUAD_COUNT,
    QUAD_ENTRY,
    QUAD_FIELDS,
    QUAD_FIRST,
    QUAD_ROW,
    QUADS,
)
from vitkernels.attention.pallas_flash.hopper.row_registers import store_first_rows
from vitkernels.attention.pallas_flash.hopper.schedule import ROWS

NARROW = 16  # columns as which a segment's last tile in a quad is processed if it has no more rows
WARPGROUPS = 4  # that compute, at most; more would leave each thread fewer than 128 registers
_RECORDS = 4  # of quads in shared memory: the next one's, and those that a warpgroup may still read


class Place(NamedTuple):
    """A head of a batch entry, or of a quad of its chunks."""

    batch: Any
    head: Any
    chunk: Any = 0  # the quad's first
    record: Any = None  # that lists the quad, in shared memory; see QUAD_ENTRY
    listed: Any = None  # the same in device memory

    def of_chunk(self, chunk, field: int):
        return self.record[QUAD_ENTRY + chunk * QUAD_FIELDS + field]


class PerHeadKernel(tiles.HopperKernel):
    """A kernel whose persistent thread blocks loop over heads, of batch entries or, in packed segments, of quads.

    The record that lists a quad is copied to shared memory an iteration ahead, since each of its fields would be waited
    for if it were read from device memory.
    """

    @property
    def has_quads(self) -> bool:
        return tiles.has_packed_segments(self.queries, self.chunks)

    @property
    def compares_ids(self) -> bool:
        """Return whether ids tell which keys a query attends to; in quads, the chunks do."""
        return self.has_ids and not self.has_quads

    @property
    def queries_at_once(self) -> int:
        """Return the number of queries that are processed at once."""
        return QUAD * ROWS if self.has_quads else self.queries

    @property
    def keys_at_once(self) -> int:
        return QUAD * ROWS if self.has_quads else self.keys

    @property
    def query_tiles(self) -> int:
        """Return the number of a head's tiles of queries."""
        return pl.cdiv(self.queries_at_once, ROWS)

    @property
    def key_tiles(self) -> int:
        """Return the number of a head's tiles of keys."""
        return pl.cdiv(self.keys_at_once, ROWS)

    @property
    def heads_at_once(self) -> int:
        """Return how many groups of warpgroups a thread block has; each processes a head at a time."""
        return WARPGROUPS // max(self.query_tiles, self.key_tiles)

    @property
    def blocks(self) -> int:
        quads = self.chunks[0] // QUAD if self.chunks is not None and self.has_quads else 1
        return min(self.multiprocessors, pl.cdiv(self.batch * self.heads * quads, self.heads_at_once))

    def iterations(self, ids: tuple, group=0):
        """Return the number of heads that a group of this block processes."""
        count = ids[4][QUADS] * self.heads if self.has_quads else self.batch * self.heads
        groups = self.blocks * self.heads_at_once
        return lax.div(count + groups - 1 - self._first_index(group), groups)

    def _first_index(self, group):
        return lax.axis_index("block") * self.heads_at_once + group

    def _index(self, iteration, group) -> tuple:
        """Return the batch entry, or the number of the quad, and the head of an iteration."""
        index = self._first_index(group) + iteration * (self.blocks * self.heads_at_once)
        return lax.div(index, self.heads), lax.rem(index, self.heads)

    def bias_scratch(self, warpgroups: int) -> dict:
        """Return scratch for a tile of the bias per compute warpgroup, which copy_bias fills."""
        return {
            "bias_smem": self.bias_tiles(warpgroups, columns=ROWS),
            "bias_arrived": plgpu.Barrier(num_arrivals=1, num_barriers=warpgroups),
        }

    def copy_bias(self, bias, warpgroup, scratch: dict) -> None:
        """Start copying groups of the bias to a warpgroup's tile, once the previous ones are in its registers."""
        smem = scratch["bias_smem"].at[warpgroup, pl.ds(0, bias.shape[0])]
        groups.copy(bias, smem, scratch["bias_arrived"].at[warpgroup])

    def copied_bias(self, warpgroup, columns: int, scratch: dict):
        """Wait for the bias that a warpgroup requested last; return its first columns in registers."""
        plgpu.barrier_wait(scratch["bias_arrived"].at[warpgroup])
        smem = scratch["bias_smem"].at[warpgroup, pl.ds(0, columns // groups.COLUMNS)]
        return groups.load(smem, self.interpret)

    def quad_scratch(self) -> dict:
        if not self.has_quads:
            return {}
        return {
            "quad_smem": plgpu.SMEM((_RECORDS, FIELDS), jnp.int32),
            "quad_arrived": plgpu.Barrier(num_arrivals=1, num_barriers=_RECORDS),
        }

    def _listed(self, iteration, ids: tuple):
        """Return the record, in device memory, that lists an iteration's quad."""
        number, _ = self._index(iteration, 0)
        assert self.chunks is not None
        chunks = self.chunks[0]
        return ids[2].at[lax.div(number, chunks), lax.rem(number, chunks)]

    def request_place(self, iteration, iterations, ids: tuple, scratch: dict) -> None:
        """Request what wait_for_place waits for, if there is such an iteration."""
        if self.has_quads:
            slot = lax.rem(iteration, _RECORDS)
            smem, arrived = scratch["quad_smem"].at[slot], scratch["quad_arrived"].at[slot]
            request = lambda: plgpu.copy_gmem_to_smem(self._listed(iteration, ids), smem, arrived)  # noqa: E731
            pl.when(iteration < iterations)(request)

    def wait_for_place(self, iteration, scratch: dict) -> None:
        """Wait until place_of can be called; each warpgroup that calls it must wait once per iteration."""
        if self.has_quads:
            plgpu.barrier_wait(scratch["quad_arrived"].at[lax.rem(iteration, _RECORDS)])

    def place_of(self, iteration, ids: tuple, scratch: dict, group=0) -> Place:
        batch, head = self._index(iteration, group)
        if not self.has_quads:
            return Place(batch, head)
        assert self.chunks is not None
        place = Place(0, head, 0, scratch["quad_smem"].at[lax.rem(iteration, _RECORDS)], self._listed(iteration, ids))
        first, chunks = place.of_chunk(0, QUAD_FIRST), self.chunks[0]
        return place._replace(batch=lax.div(first, chunks), chunk=lax.rem(first, chunks))

    def row_of(self, place: Place, tile):
        """Return the first row of a tile."""
        return place.of_chunk(tile, QUAD_ROW) if self.has_quads else tile * ROWS

    def store_tiles(self, parts: tuple, index, values: list[tuple], ref, place: Place, head, first_tile) -> None:
        """Start storing consecutive tiles, through parts[index] and the following."""

        def store(chosen):
            for i in chosen:
                for part, x in zip(tiles.at(parts, index + i), values[i], strict=True):
                    part[...] = x.astype(part.dtype)
            plgpu.commit_smem()
            for i in chosen:
                row = self.row_of(place, first_tile + i)
                tiles.store_rows(parts, index + i, ref, place.batch, row, head, self.interpret)

        if not self.has_quads:
            store(range(len(values)))
            return
        for i, value in enumerate(values):
            tile = first_tile + i
            is_full = place.of_chunk(tile, QUAD_COUNT) == ROWS
            pl.when(is_full)(functools.partial(store, [i]))

            @pl.when(~is_full)
            def _(value=value, tile=tile):
                rows = ref.at[place.batch, :, head]
                of_chunk = place.listed.at[pl.ds(QUAD_ENTRY + tile * QUAD_FIELDS, QUAD_FIELDS)]
                store_first_rows(rows, value, self.row_of(place, tile), of_chunk, QUAD_COUNT, self.interpret)
