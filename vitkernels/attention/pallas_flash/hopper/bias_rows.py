"""The bias that the ring kernels of `pallas_flash` on Hopper request a step ahead."""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl

from vitkernels.attention.pallas_flash.hopper.ring import WorkItem


class BiasRows(NamedTuple):
    """The bias of own rows of a work item and of the tiles that stream past them.

    What is requested waits in registers: 32 per thread and 64 columns, or 16 in bfloat16.
    """

    kernel: Any  # a RingKernel
    ref: Any
    item: WorkItem
    first_row: Any
    streamed: int  # tokens

    def requested(self, step) -> jax.Array | None:
        """Request the bias of a step's tile; return None without a bias.

        Behind the item's last tile, another tile of the array is requested, and not used.
        """
        if self.kernel.bias_shape is None:
            return None
        columns = self.kernel.schedule.tile
        tile = lax.min(self.item.first + step, pl.cdiv(self.streamed, columns) - 1)
        item = self.item
        return self.kernel.bias_tile(self.ref, item.batch, item.head, self.first_row, tile * columns, columns)

    def requested_after(self, step, columns: int) -> jax.Array | None:
        """Request the bias of the tile behind a step's, unless that is narrowed to `columns`, as only the last is."""
        return self.requested(step + 1) if columns == self.kernel.schedule.tile else None


def first_columns(requested: jax.Array | None, columns: int) -> jax.Array | None:
    """Return what a product of scores of so many columns starts from."""
    return None if requested is None else requested[:, :columns]
