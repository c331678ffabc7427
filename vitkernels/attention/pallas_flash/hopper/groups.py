"""Tiles of 64 rows in the registers of a product, and their way from and to device memory in groups of 8 columns.

A group is 512 consecutive values in the order (warp, lane, register). A thread's four values of a group are then 16
bytes (8 in bfloat16), and a warp accesses 512 (256) consecutive bytes at once. Row by row, it would access 32 bytes of
each of 8 rows, with twice as many instructions.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper.schedule import ROWS

COLUMNS = 8
_VALUES = 4  # of a thread in a group
# The order of a group's values in memory: warp, row, pair of columns, half of 16 rows, column.
_ORDER = 4, 8, 4, 2, 2


def at(ref, leading: tuple, first_row, first_column, columns: int):
    """Return the groups of ROWS × columns of `ref` (*leading, tiles of ROWS rows, groups, ROWS * COLUMNS)."""
    first = lax.div(jnp.int32(first_column), COLUMNS)
    return ref.at[(*leading, lax.div(first_row, ROWS), pl.ds(first, columns // COLUMNS))]


def copy(groups_ref, smem_ref, barrier) -> None:
    """Start copying groups to shared memory; the barrier gets one arrival."""
    # In bounds, the copy is one instruction without a tensor map, whose boxes hold at most 256 elements in a row.
    in_bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS  # type: ignore[attr-defined]
    plgpu.copy_gmem_to_smem(groups_ref, smem_ref, barrier, oob_mode=in_bounds)  # type: ignore[call-arg]


def summed(x: jax.Array, count: int) -> jax.Array:
    """Return the sum of x's first `count` groups, (ROWS, 8); each thread adds up its own values, group after group.

    Added in pairs instead, the forward kernels take up to 6 % longer.
    """
    return added(x[:, :COLUMNS], x[:, : count * COLUMNS], 1)


def added(total: jax.Array, x: jax.Array, first: int) -> jax.Array:
    """Return total (ROWS, 8) and x's groups from `first` on, added up like `summed`."""
    for column in range(first * COLUMNS, x.shape[1], COLUMNS):
        total = total + x[:, column : column + COLUMNS]
    return total


@plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,))
def pin(_ctx, totals):
    """Have sums of weights (ROWS, 8) computed before the next wait for products; half of the rows suffice.

    Otherwise ptxas may move the weights behind the wait, where it would not overlap with the products. It does
    not move stores, and does not know that this one is never executed, as no sum is negative. totals must include the
    sum of a tile before: of a sum of exponentials alone, the compiler knows its sign, and removes the store.
    """
    store = "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $0, 0f00000000; @p st.shared.f32 [a], $0; }"
    sums_of_first_rows = totals.registers[register(0, 0)]  # of each warp's 16 rows, 8
    for column in range(2):
        value = mgpu.utils.vector.extract(sums_of_first_rows, [], [column])
        mgpu.utils.inline_ptx(store, value, has_side_effects=True)


def load(groups_ref, interpret: bool) -> jax.Array:
    """Return groups of float32 or bfloat16 values, (n, ROWS * COLUMNS), as (ROWS, 8 n) in a product's layout."""
    count, dtype = groups_ref.shape[0], groups_ref.dtype
    shape = ROWS, count * COLUMNS
    if interpret:  # the interpreter does not run Mosaic GPU code
        return groups_ref[...].reshape(count, *_ORDER).transpose(1, 4, 2, 0, 3, 5).reshape(shape)

    result = plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load(_ctx, ref):
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        for group, address in enumerate(_addresses(ref, count)):
            for half, pair in enumerate((_load_bfloat16 if dtype == jnp.bfloat16 else _load_float32)(address)):
                registers[register(group, half)] = pair
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return load(groups_ref)


# With side effects, the loads are not moved across a wait, unlike ordinary ones.


def _load_float32(address):
    """Return a thread's two pairs of values of a group."""
    f32 = mgpu.utils.ir.F32Type.get()
    pair = mgpu.utils.ir.VectorType.get((2,), f32)
    ptx = f"ld.{_space(address)}.v4.f32 {{$0, $1, $2, $3}}, [$4];"
    values = mgpu.utils.inline_ptx(ptx, address, result_types=[f32] * 4, has_side_effects=True)
    return [mgpu.utils.vector.from_elements(pair, values[i : i + 2]) for i in (0, 2)]


def _load_bfloat16(address):
    """Return a thread's two pairs of values of a group, each in one register."""
    i32 = mgpu.utils.ir.IntegerType.get_signless(32)
    pair = mgpu.utils.ir.VectorType.get((2,), mgpu.utils.ir.BF16Type.get())
    ptx = f"ld.{_space(address)}.v2.b32 {{$0, $1}}, [$2];"
    values = mgpu.utils.inline_ptx(ptx, address, result_types=[i32] * 2, has_side_effects=True)
    return [mgpu.utils.bitcast(x, pair) for x in values]


def _space(address) -> str:
    return "shared" if address.type.address_space == 3 else "global"


def store(groups_ref, x: jax.Array, interpret: bool) -> None:
    """Store (ROWS, 8 n) float32 values, in the layout of a product, as groups (n, ROWS * COLUMNS)."""
    count = groups_ref.shape[0]
    if interpret:
        values = x.reshape(4, 2, 8, count, 4, 2).transpose(3, 0, 2, 4, 1, 5)
        groups_ref[...] = values.reshape(groups_ref.shape)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(_ctx, ref, x):
        for group, address in enumerate(_addresses(ref, count)):
            values = [
                mgpu.utils.vector.extract(x.registers[register(group, half)], [], [i])
                for half in range(2)
                for i in range(2)
            ]
            ptx = f"st.{_space(address)}.v4.f32 [$0], {{$1, $2, $3, $4}};"
            mgpu.utils.inline_ptx(ptx, address, *values, has_side_effects=True)

    store(groups_ref, x)


def register(group: int, half: int) -> tuple[int, ...]:
    """Return the index of a register, two adjacent columns, in an array of the layout WGMMA."""
    return 0, group, 0, 0, half, 0, 0, 0, 0


def _addresses(ref, count: int) -> list:
    """Return the addresses of a thread's values in each group."""
    utils = mgpu.utils
    element, i32 = ref.type.element_type, utils.ir.IntegerType.get_signless(32)
    thread = utils.arith.remui(utils.thread_idx(), utils.c(128, i32))
    first = utils.getelementptr(utils.memref_ptr(ref), [utils.arith.muli(thread, utils.c(_VALUES, i32))], element)
    return [utils.getelementptr(first, [group * ROWS * COLUMNS], element) for group in range(count)]
