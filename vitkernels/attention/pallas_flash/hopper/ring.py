"""Thread blocks of the Hopper kernels of `pallas_flash` that stay on their multiprocessor and go from piece to piece.

A piece is a few own rows of one head, which the computing warpgroups keep, and all the tiles of that head that stream
by. A warpgroup of its own requests both: the tiles through a ring that runs on from piece to piece, own rows into
rooms, so that the next piece's are there when one ends.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles as parts
from vitkernels.attention.pallas_flash.hopper.schedule import ROWS


class Piece(NamedTuple):
    """What a thread block works on at a time: own rows of a head, 64 for each computing warpgroup. All are numbers."""

    batch: Any
    head: Any
    tile: Any
    number: Any  # of pieces that this block had before
    streamed: Any  # tiles that came by for those


class Stream(NamedTuple):
    """Tiles that come by through a ring."""

    load: Callable  # (piece, step, slot): requests a tile
    arrived: Any  # barriers, one per slot
    consumed: Any  # by which the computing warpgroups give a slot back


class OwnRows(NamedTuple):
    """Of a piece, for a warpgroup to keep."""

    load: Callable  # (piece, warpgroup): requests them
    arrived: tuple  # of barriers, one per owner
    consumed: Any  # by which a warpgroup gives their room back


class Ring(parts.Problem):
    """An attention call with a Schedule, and the thread blocks that work on it."""

    def own_tiles(self) -> tuple:
        """Scratch for the rows that each warpgroup keeps."""
        return parts.tile(ROWS, self.head_dim, jnp.dtype(self.dtype), self.owners)

    @property
    def owners(self) -> int:
        """How many times 64 own rows there is room for."""
        return self.schedule.rooms * self.schedule.warpgroups

    def ring(self) -> tuple:
        """Scratch for the tiles that stream by."""
        return parts.tile(self.schedule.tile, self.head_dim, jnp.dtype(self.dtype), self.schedule.stages)

    def arrived(self, arrivals: int) -> plgpu.Barrier:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.schedule.stages)

    def consumed(self) -> plgpu.Barrier:
        return plgpu.Barrier(num_arrivals=self.schedule.warpgroups, num_barriers=self.schedule.stages)

    def own_arrived(self, arrivals: int) -> plgpu.Barrier:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.owners)

    def own_consumed(self) -> plgpu.Barrier:
        return plgpu.Barrier(num_arrivals=1, num_barriers=self.owners)

    def kernel(self, body, own_rows: int, out_type: tuple, scratch: dict):
        """`body` as a kernel for pieces of `warpgroups` times 64 of `own_rows`."""
        return self.launch(body, {"block": self.blocks(own_rows)}, self.schedule.warpgroups + 1, out_type, scratch)

    # --- where --------------------------------------------------------------------------------------------------------

    def tiles(self, own_rows: int) -> int:
        """Pieces that a head's own rows make."""
        return pl.cdiv(own_rows, ROWS * self.schedule.warpgroups)

    def pieces(self, own_rows: int) -> int:
        return self.batch * self.heads * self.tiles(own_rows)

    def blocks(self, own_rows: int) -> int:
        return min(self.multiprocessors, self.pieces(own_rows))

    def heads_of(self, piece: Piece) -> tuple:
        """Where its head of q, of k and of v lies."""
        return tuple(piece.head + first for first in self.first_heads)

    def first_row(self, piece: Piece, warpgroup):
        """The first of a warpgroup's own rows."""
        return (piece.tile * self.schedule.warpgroups + warpgroup) * ROWS

    def owner(self, number, warpgroup):
        """The index of a warpgroup's own rows in shared memory, of a block's piece of that number."""
        return lax.rem(number, self.schedule.rooms) * self.schedule.warpgroups + warpgroup

    def slot(self, piece: Piece, step):
        """Where a tile that streams by lies in shared memory."""
        return lax.rem(piece.streamed + step, self.schedule.stages)

    def over_tiles(self, tokens: int, step_of, carry, meanwhile, steps=None):
        """step_of(step, carry, tokens) for each tile that streams by; the last one's tokens are only those that there
        are, unless it is given how many steps there are: then all tiles are treated as whole ones.

        meanwhile(): called after the first step.
        """
        whole, last = (steps, 0) if steps is not None else divmod(tokens, self.schedule.tile)

        def body(step, carry):
            carry = step_of(step, carry, self.schedule.tile)
            pl.when(step == 0)(meanwhile)
            return carry

        carry = lax.fori_loop(0, whole, body, carry)
        if steps is None and not whole:
            meanwhile()
        return step_of(jnp.int32(whole), carry, last) if last else carry

    # --- who does what ------------------------------------------------------------------------------------------------

    def divide_roles(self, rows: int, steps_of, own: OwnRows, streams: list[Stream], compute) -> None:
        """Runs compute(piece, warpgroup, meanwhile) on the computing warpgroups while own rows and streams arrive.

        rows: that all pieces of a head have together. steps_of(piece): how many tiles come by. meanwhile(): to be
        called some work after the beginning, when what the piece before left to be stored has gone.
        """
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < self.schedule.warpgroups)
        def _():
            plgpu.set_max_registers(self.schedule.registers[0], action="increase")

            def give_back(number):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(own.consumed.at[self.owner(number, warpgroup)])

            def turn(piece):
                def meanwhile():
                    if self.schedule.rooms > 1:
                        pl.when(piece.number > 0)(lambda: give_back(piece.number - 1))

                has_rows = self.first_row(piece, warpgroup) < rows
                pl.when(has_rows)(lambda: compute(piece, warpgroup, meanwhile))
                pl.when(~has_rows)(lambda: self._pass(piece, warpgroup, meanwhile, steps_of(piece), own, streams))
                if self.schedule.rooms == 1:
                    give_back(piece.number)

            pieces, _ = self._for_each_piece(rows, steps_of, turn)
            if self.schedule.rooms > 1:
                give_back(pieces - 1)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == self.schedule.warpgroups)
        def _():
            plgpu.set_max_registers(self.schedule.registers[1], action="decrease")
            self._request(rows, steps_of, own, streams)

    def _for_each_piece(self, rows: int, steps_of, turn) -> tuple:
        """turn(piece) for all of this block's. Pieces of one head are different blocks' at one time, so that they find
        each other's tiles in the L2 cache; each block has first and last ones of a head in turns.

        Returns how many pieces there were, and how many tiles came by.
        """
        tiles, blocks, pieces = self.tiles(rows), self.blocks(rows), self.pieces(rows)
        share = pieces // blocks

        def index(number):
            return number * blocks + lax.rem(lax.axis_index("block") + number, blocks)

        def body(number, streamed):
            head, tile = lax.div(index(number), tiles), lax.rem(index(number), tiles)
            piece = Piece(lax.div(head, self.heads), lax.rem(head, self.heads), tile, number, streamed)
            turn(piece)
            return streamed + steps_of(piece)

        count = share + (index(jnp.int32(share)) < pieces).astype(jnp.int32)
        return count, lax.fori_loop(0, count, body, jnp.int32(0))

    def _pass(self, piece: Piece, warpgroup, meanwhile, steps, own: OwnRows, streams: list[Stream]) -> None:
        """What a warpgroup does that has no rows."""
        meanwhile()
        for arrived in own.arrived:
            plgpu.barrier_wait(arrived.at[self.owner(piece.number, warpgroup)])

        @pl.loop(0, steps)
        def _(step):
            slot = self.slot(piece, step)
            for stream in streams:
                plgpu.barrier_wait(stream.arrived.at[slot])
                plgpu.barrier_arrive(stream.consumed.at[slot])

    def _request(self, rows: int, steps_of, own: OwnRows, streams: list[Stream]) -> None:
        """The loader's part."""
        s = self.schedule

        def wait_for_room(number, warpgroup):
            consumed = own.consumed.at[self.owner(number, warpgroup)]
            pl.when(number >= s.rooms)(lambda: plgpu.barrier_wait(consumed))

        def wait_for_slot(stream, step):
            consumed = stream.consumed.at[lax.rem(step, s.stages)]
            pl.when(step >= s.stages)(lambda: plgpu.barrier_wait(consumed))

        def turn(piece):
            for warpgroup in range(s.warpgroups):
                wait_for_room(piece.number, warpgroup)
                own.load(piece, warpgroup)

            @pl.loop(0, steps_of(piece))
            def _(step):
                for stream in streams:
                    wait_for_slot(stream, piece.streamed + step)
                    stream.load(piece, step, self.slot(piece, step))

        pieces, streamed = self._for_each_piece(rows, steps_of, turn)
        # Whoever waits for a barrier must wait for each of its turns.
        for i in range(s.stages):
            for stream in streams:
                wait_for_slot(stream, streamed + i)
        for i in range(s.rooms):
            for warpgroup in range(s.warpgroups):
                wait_for_room(pieces + i, warpgroup)
