"""The gradient of a bias on Hopper: the scores' gradients, summed over the images and heads that share the bias.

A work item is a tile of the bias and a part of the (image, head) pairs that share it. The pairs' queries, keys, values
and output gradients stream through the ring; the sum stays in registers until it is written to device memory. The sums
of all parts are then added in a fixed order.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim, P parts.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import groups, tiles
from vitkernels.attention.pallas_flash.hopper.ring import OwnRows, RingKernel
from vitkernels.attention.pallas_flash.hopper.schedule import Schedule
from vitkernels.attention.pallas_flash.hopper.tiles import (
    BY_COLUMN,
    BY_ROW,
    ROWS,
    WGMMA,
    along_rows,
    at,
    filled,
)
from vitkernels.attention.pallas_flash.hopper.work_items import Side, WorkItem


@dataclass(frozen=True)
class BiasGradient(RingKernel):
    """The kernel of a call; batch and heads are those of q. parts: P."""

    schedule: Schedule
    parts: int = 1

    def __call__(self, q_BNHD, k_BMHD, v_BMHD, do_BNHD, lse_BHN, delta_BHN, bias, *ids):
        """Return the parts' sums, in float32 and of P times the bias's shape.

        ids: see Forward. The chunks lie at multiples of 64.
        """
        rows = self.schedule.stages * self.schedule.warpgroups
        own, dtype = (lambda: tiles.tile(ROWS, self.head_dim, dtype, rows)), jnp.dtype(self.dtype)
        scratch = {
            "q_smem": own(),
            "do_smem": own(),
            "k_smem": self.ring(),
            "v_smem": self.ring(),
            "lse_smem": plgpu.SMEM((rows, ROWS), jnp.float32),
            "delta_smem": plgpu.SMEM((rows, ROWS), jnp.float32),
            "own_consumed": self.own_consumed(),
            "arrived": self.arrived(
                2 * self.copies
                + self.schedule.warpgroups * (2 * self.copies + 2)
                + self.has_ids * (1 + self.schedule.warpgroups)
            ),
            "consumed": self.consumed(),
        }
        if self.has_ids:
            scratch |= {"q_ids_smem": plgpu.SMEM((rows, ROWS), jnp.int32), "k_ids_smem": self.ring_of_ids()}
        assert self.bias_shape is not None
        images, heads = self.sharing
        # An item without steps would let the compute warpgroups outrun the loader.
        assert (self.parts - 1) * self.per_part < images * heads, "a part is empty"
        shape = (self.parts, *self.bias_array(self.queries, self.keys).shape)
        sums = (jax.ShapeDtypeStruct(shape, jnp.float32),)
        return self.kernel(self._body, self.queries, sums, scratch)(
            q_BNHD, k_BMHD, v_BMHD, do_BNHD, lse_BHN, delta_BHN, bias, *ids
        )[0]

    # --- work items: (part, image of the bias, head of the bias, tile of queries, tile of keys) -----------------------

    @property
    def key_tiles(self) -> int:
        return pl.cdiv(self.keys, self.schedule.tile)

    def tiles(self, own_rows: int) -> int:
        return super().tiles(own_rows) * self.key_tiles

    def work_items(self, own_rows: int) -> int:
        assert self.bias_shape is not None
        return self.parts * self.bias_shape[0] * self.bias_shape[1] * self.tiles(own_rows)

    def divided(self, index, own_rows: int) -> tuple:
        """Return an item's batch (part and image of the bias), head of the bias and tile, for its index."""
        assert self.bias_shape is not None
        head, tile = lax.div(index, self.tiles(own_rows)), lax.rem(index, self.tiles(own_rows))
        return lax.div(head, self.bias_shape[1]), lax.rem(head, self.bias_shape[1]), tile

    def tile_of_rows(self, item: WorkItem):
        return lax.div(item.tile, self.key_tiles)

    def first_key(self, item: WorkItem):
        return lax.rem(item.tile, self.key_tiles) * self.schedule.tile

    @property
    def sharing(self) -> tuple[int, int]:
        """Return how many images and heads share one bias."""
        assert self.bias_shape is not None
        images, heads = self.bias_shape
        return self.batch // images, self.heads // heads

    @property
    def per_part(self) -> int:
        """Return the largest number of (image, head) pairs that a part sums."""
        images, heads = self.sharing
        return pl.cdiv(images * heads, self.parts)

    def _part_and_image(self, item: WorkItem) -> tuple:
        assert self.bias_shape is not None
        return lax.div(item.batch, self.bias_shape[0]), lax.rem(item.batch, self.bias_shape[0])

    def _with_pairs(self, item: WorkItem) -> WorkItem:
        """Return the item with the pairs that it sums, in place of streamed tiles."""
        images, heads = self.sharing
        first = self._part_and_image(item)[0] * self.per_part
        return item._replace(first=first, steps=lax.clamp(0, images * heads - first, self.per_part))

    def _pair(self, item: WorkItem, number) -> tuple:
        """Return the image and the head of q of the item's pair with this number."""
        images, heads = self.sharing
        _, image = self._part_and_image(item)
        return (
            lax.div(number, heads) if images > 1 else image,
            lax.rem(number, heads) if heads > 1 else item.head,
        )

    # --- roles --------------------------------------------------------------------------------------------------------

    def _body(self, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, *refs, **scratch):
        bias_ref, ids, (sums_ref,) = self.extras(refs)
        q_first, k_first, v_first = self.first_heads

        def load_pair(item, number, slot):
            image, head = self._pair(item, number)
            arrived = scratch["arrived"].at[slot]
            for warpgroup in range(self.schedule.warpgroups):
                first, place = self.first_row(item, warpgroup), slot * self.schedule.warpgroups + warpgroup
                for ref, of, name in ((q_ref, head + q_first, "q_smem"), (do_ref, head, "do_smem")):
                    tiles.load_rows(ref, image, first, of, scratch[name], place, arrived, self.interpret)
                for ref, name in ((lse_ref, "lse_smem"), (delta_ref, "delta_smem")):
                    rows = ref.at[image, head, pl.ds(first, ROWS)]
                    plgpu.copy_gmem_to_smem(rows, scratch[name].at[place], arrived)
                if ids:
                    rows = ids[0].at[image, pl.ds(first, ROWS)]
                    plgpu.copy_gmem_to_smem(rows, scratch["q_ids_smem"].at[place], arrived)
            first = self.first_key(item)
            for ref, of, name in ((k_ref, head + k_first, "k_smem"), (v_ref, head + v_first, "v_smem")):
                tiles.load_rows(ref, image, first, of, scratch[name], slot, arrived, self.interpret)
            if ids:
                rows = ids[1].at[image, pl.ds(first, self.schedule.tile)]
                plgpu.copy_gmem_to_smem(rows, scratch["k_ids_smem"].at[slot], arrived)

        self.divide_roles(
            Side(self.queries),
            self._with_pairs,
            OwnRows(lambda item, warpgroup: None, (), scratch["own_consumed"]),
            [self.stream(load_pair, scratch["arrived"], scratch["consumed"])],
            lambda *where: self._sum(*where, bias_ref, sums_ref, scratch),
            scratch,
        )

    def _sum(self, item, warpgroup, after_first_tile, bias_ref, sums_ref, scratch):
        after_first_tile()  # an item has no buffers of its own
        first_row, first_key, columns = self.first_row(item, warpgroup), self.first_key(item), self.schedule.tile
        part, image = self._part_and_image(item)
        of_bias = self.bias_at(bias_ref, image, item.head, first_row, first_key, columns)
        bias = groups.load(of_bias, self.interpret)  # the images stream past it

        def add(step, total):
            slot = self.slot(item, step)
            place = slot * self.schedule.warpgroups + warpgroup
            plgpu.barrier_wait(scratch["arrived"].at[slot])
            q, do = at(scratch["q_smem"], place), at(scratch["do_smem"], place)
            k, v = at(scratch["k_smem"], slot), at(scratch["v_smem"], slot)
            scores, dp = tiles.products((bias, q, k), (None, do, v), interpret=self.interpret)
            lse, delta = (plgpu.load(scratch[name].at[place], layout=BY_ROW) for name in ("lse_smem", "delta_smem"))
            weights = jnp.exp2(self.exponents(scores) - along_rows(lse, scores.shape))
            keep = self._keeps(place, slot, first_row, first_key, scores.shape, scratch)
            weights = weights if keep is None else jnp.where(keep, weights, 0.0)
            ds = weights * (dp - along_rows(delta, dp.shape))
            tiles.release_after_reads(scratch["consumed"].at[slot], self.interpret)
            return total + ds

        total = lax.fori_loop(0, item.steps, add, filled((ROWS, columns), 0, WGMMA))
        where = groups.at(sums_ref, (part, image, item.head), first_row, first_key, columns)
        groups.store(where, total * self.scale, self.interpret)

    def _keeps(self, place, slot, first_row, first_key, shape, scratch):
        """Return where a query attends to a key, as far as ids and causality decide; None if they do not."""
        keep = None
        if self.has_ids:
            of_queries = plgpu.load(scratch["q_ids_smem"].at[place], layout=BY_ROW)
            keep = tiles.same_id(of_queries, plgpu.load(scratch["k_ids_smem"].at[slot], layout=BY_COLUMN))
        if self.is_causal:
            sees = tiles.position(shape, 1) + first_key <= tiles.position(shape, 0) + first_row
            keep = sees if keep is None else keep & sees
        return keep
