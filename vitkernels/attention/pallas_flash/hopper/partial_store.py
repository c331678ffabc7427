"""Stores of the first rows of a tile, from the registers of a product: the rows behind belong to another chunk."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import groups
from vitkernels.attention.pallas_flash.hopper.schedule import ROWS


def store_first_rows(
    rows_ref, parts: tuple[jax.Array, ...], first, record_ref, count_field: int, interpret: bool
) -> None:
    """Store the first rows of `parts`, (64, width) in the layout of a product, from row `first` on.

    rows_ref: all rows of a head, (N, D); columns of the parts beyond D are dropped.
    record_ref: the record of the rows' chunk, which holds their number in the field count_field.
    """
    _, head_dim = rows_ref.shape
    parts = tuple(x.astype(rows_ref.dtype) for x in parts)
    if interpret:  # the interpreter does not run Mosaic GPU code
        x = jnp.concatenate(parts, axis=1)[:, :head_dim]

        @pl.loop(0, record_ref[count_field])
        def _(i):
            rows_ref[pl.ds(first + i, 1)] = lax.dynamic_slice_in_dim(x, i, 1)

        return

    types = tuple(plgpu.Layout.WGMMA for _ in parts)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), types))
    def store(_ctx, rows, record, parts):
        utils = mgpu.utils
        arith, i32 = utils.arith, utils.ir.IntegerType.get_signless(32)
        rows_type = utils.ir.MemRefType(rows.type)
        (stride, _), _ = rows_type.get_strides_and_offset()

        def number(n: int):
            return utils.c(n, i32)

        address = utils.getelementptr(utils.memref_ptr(record), [count_field], i32)
        count = utils.inline_ptx("ld.global.b32 $0, [$1];", address, result_types=i32, has_side_effects=True)
        thread = arith.remui(utils.thread_idx(), number(128))
        warp, lane = arith.divui(thread, number(32)), arith.remui(thread, number(32))
        first_row = arith.addi(arith.muli(warp, number(16)), arith.divui(lane, number(4)))
        first_column = arith.muli(arith.remui(lane, number(4)), number(2))
        for half in range(2):
            row = arith.addi(first_row, number(8 * half))
            keeps = arith.cmpi(arith.CmpIPredicate.slt, row, count)
            place = arith.addi(arith.muli(row, number(stride)), first_column)
            start, column = utils.getelementptr(utils.memref_ptr(rows), [place], rows_type.element_type), 0
            for part in parts:
                for group in range(min(part.shape[1], head_dim - column) // groups.COLUMNS):
                    offset = column + group * groups.COLUMNS
                    address = utils.getelementptr(start, [offset], rows_type.element_type)
                    value = utils.bitcast(part.registers[groups.register(group, half)], i32)
                    utils.inline_ptx("st.global.b32 [$0], $1;", address, value, predicate=keeps, has_side_effects=True)
                column += part.shape[1]

    store(rows_ref.at[pl.ds(first + 0 * lax.axis_index("warpgroup"), ROWS)], record_ref, parts)
