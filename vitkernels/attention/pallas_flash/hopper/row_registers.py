"""Rows in registers, thread by thread: copies to and from device memory that bypass shared memory, and a mask."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import groups
from vitkernels.attention.pallas_flash.hopper.schedule import ROWS

CHUNK = 16  # rows that a warpgroup loads at once
WIDTH = 64  # columns, at most
_COLUMNS = 8  # of a thread
_PER_ROW = WIDTH // _COLUMNS  # threads
_STRIDED = plgpu.Layout.WG_STRIDED((CHUNK, WIDTH), vec_size=_COLUMNS)


def load_chunk(rows_ref, first, interpret: bool) -> jax.Array:
    """Return CHUNK rows of a head, from row `first` on, as (CHUNK, WIDTH): a thread holds 8 columns of one row.

    rows_ref: all rows of a head, (N, D), with D <= WIDTH. Rows past the last repeat it; columns past D are zeros.
    """
    tokens, head_dim = rows_ref.shape
    if interpret:  # the interpreter does not run Mosaic GPU code
        rows = jnp.minimum(first + jnp.arange(CHUNK), tokens - 1)
        return jnp.pad(rows_ref[...][rows], ((0, 0), (0, WIDTH - head_dim)))

    result = plgpu.ShapeDtypeStruct((CHUNK, WIDTH), rows_ref.dtype, layout=_STRIDED)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())), return_type=result)
    def load(_ctx, rows, first):
        utils, i32 = mgpu.utils, mgpu.utils.ir.IntegerType.get_signless(32)
        row, place = _place_in_chunk()
        column = utils.arith.muli(place, _number(_COLUMNS))
        row = utils.arith.minsi(utils.arith.addi(first.registers.item(), row), _number(tokens - 1))
        has_columns = utils.arith.cmpi(utils.arith.CmpIPredicate.slt, column, _number(head_dim))
        column = utils.arith.select(has_columns, column, _number(0))
        # 16 bytes at once; in the layout of a product, a thread would get 4.
        values = utils.inline_ptx(
            "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
            _address(rows, row, column),
            result_types=[i32] * 4,
            has_side_effects=True,
        )
        element = utils.ir.MemRefType(rows.type).element_type
        values = [utils.arith.select(has_columns, x, _number(0)) for x in values]
        vector = utils.vector.from_elements(utils.ir.VectorType.get((4,), i32), values)
        vector = utils.bitcast(vector, utils.ir.VectorType.get((_COLUMNS,), element))
        strided = mgpu.WGStridedFragLayout((CHUNK, WIDTH), _COLUMNS)
        return mgpu.FragmentedArray(_registers=np.array([vector], dtype=object), _layout=strided, _is_signed=None)

    return load(rows_ref, jnp.int32(first))


def store_row_sums(x: jax.Array, y: jax.Array, rows, sums_ref, interpret: bool) -> None:
    """Store the row sums of x * y, which load_chunk returned, to shared memory, (CHUNK,) in float32.

    rows: how many of the rows to sum; the sums of the others are zeros.
    """
    rows = jnp.int32(rows)
    if interpret:
        sums = (x.astype(jnp.float32) * y.astype(jnp.float32)).sum(axis=1)
        sums_ref[...] = jnp.where(jnp.arange(CHUNK) < rows, sums, 0)
        return

    @plgpu.inline_mgpu(arg_types=(_STRIDED, _STRIDED, plgpu.Layout.WG_SPLAT(()), plgpu.RefType()))
    def store(_ctx, x, y, rows, sums):
        utils, f32 = mgpu.utils, mgpu.utils.ir.F32Type.get()
        wide = utils.ir.VectorType.get((_COLUMNS,), f32)
        product = utils.arith.mulf(*(utils.arith.extf(wide, z.registers.item()) for z in (x, y)))
        total = utils.vector.extract(product, [], [0])
        for i in range(1, _COLUMNS):
            total = utils.arith.addf(total, utils.vector.extract(product, [], [i]))
        distance = 1
        while distance < _PER_ROW:
            total = utils.arith.addf(total, utils.shfl_bfly(total, distance))
            distance *= 2
        row, place = _place_in_chunk()
        counts = utils.arith.cmpi(utils.arith.CmpIPredicate.slt, row, rows.registers.item())
        total = utils.arith.select(counts, total, utils.c(0.0, f32))
        is_first = utils.arith.cmpi(utils.arith.CmpIPredicate.eq, place, _number(0))
        address = utils.getelementptr(utils.memref_ptr(sums), [row], f32)
        utils.inline_ptx("st.shared.f32 [$0], $1;", address, total, predicate=is_first, has_side_effects=True)

    store(x, y, rows, sums_ref)


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
        element, i32 = utils.ir.MemRefType(rows.type).element_type, utils.ir.IntegerType.get_signless(32)
        address = utils.getelementptr(utils.memref_ptr(record), [count_field], i32)
        count = utils.inline_ptx("ld.global.b32 $0, [$1];", address, result_types=i32, has_side_effects=True)
        thread = _thread_read_anew()
        for half in range(2):
            row = _row(thread, half)
            keeps = utils.arith.cmpi(utils.arith.CmpIPredicate.slt, row, count)
            start, column = _address(rows, row, _first_column(thread)), 0
            for part in parts:
                for group in range(min(part.shape[1], head_dim - column) // groups.COLUMNS):
                    address = utils.getelementptr(start, [column + group * groups.COLUMNS], element)
                    value = utils.bitcast(part.registers[groups.register(group, half)], i32)
                    utils.inline_ptx("st.global.b32 [$0], $1;", address, value, predicate=keeps, has_side_effects=True)
                column += part.shape[1]

    store(rows_ref.at[pl.ds(first + 0 * lax.axis_index("warpgroup"), ROWS)], record_ref, parts)


def first_columns(x: jax.Array, count, interpret: bool) -> jax.Array:
    """Return scores, (64, columns) in the layout of a product, with -inf from column `count` on."""
    if interpret:  # the interpreter does not run Mosaic GPU code
        return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 1) < count, x, -jnp.inf)

    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT(())), return_type=result)
    def mask(_ctx, x, count):
        utils = mgpu.utils
        # Compared with constants: a number per column would take as many registers, or spill them.
        limit = utils.arith.subi(count.registers.item(), _first_column(_thread_read_anew()))
        lowest, registers = utils.c(-float("inf"), utils.ir.F32Type.get()), np.empty_like(x.registers)
        for group in range(x.shape[1] // groups.COLUMNS):
            keeps = [
                utils.arith.cmpi(utils.arith.CmpIPredicate.sgt, limit, _number(group * groups.COLUMNS + i))
                for i in range(2)
            ]
            for half in range(2):
                index = groups.register(group, half)
                pair = [utils.vector.extract(x.registers[index], [], [i]) for i in range(2)]
                kept = [utils.arith.select(*which, lowest) for which in zip(keeps, pair, strict=True)]
                registers[index] = utils.vector.from_elements(x.registers[index].type, kept)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return mask(x, jnp.int32(count))


def _number(n: int):
    return mgpu.utils.c(n, mgpu.utils.ir.IntegerType.get_signless(32))


def _place_in_chunk() -> tuple:
    """Return a thread's row of a chunk, and its number among the row's threads."""
    arith = mgpu.utils.arith
    thread, per_row = arith.remui(mgpu.utils.thread_idx(), _number(128)), _number(_PER_ROW)
    return arith.divui(thread, per_row), arith.remui(thread, per_row)


def _thread_read_anew():
    """Return the thread's number in its warpgroup, in a way that the compiler cannot move out of a loop.

    It would keep what depends on the number in registers, and spill it to local memory. Loads from there take hundreds
    of cycles.
    """
    utils = mgpu.utils
    i32 = utils.ir.IntegerType.get_signless(32)
    thread = utils.inline_ptx("mov.u32 $0, %tid.x;", result_types=i32, has_side_effects=True)
    return utils.arith.remui(thread, _number(128))


def _row(thread, half: int):
    """Return the row of a thread's values in one half of the 16 rows of its warp."""
    arith = mgpu.utils.arith
    warp, lane = arith.divui(thread, _number(32)), arith.remui(thread, _number(32))
    first = arith.addi(arith.muli(warp, _number(16)), arith.divui(lane, _number(4)))
    return arith.addi(first, _number(8 * half))


def _first_column(thread):
    """Return the first column of a thread's values in the layout of a product."""
    arith = mgpu.utils.arith
    return arith.muli(arith.remui(thread, _number(4)), _number(2))


def _address(rows, row, column):
    utils = mgpu.utils
    rows_type = utils.ir.MemRefType(rows.type)
    (stride, _), _ = rows_type.get_strides_and_offset()
    place = utils.arith.addi(utils.arith.muli(row, _number(stride)), column)
    return utils.getelementptr(utils.memref_ptr(rows), [place], rows_type.element_type)
