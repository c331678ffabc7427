"""The Pallas quickstart's kernels as torch ops: each JAX function is plain Pallas, registered as an op in one line.

    from vitkernels.bridge.examples.quickstart import add_vectors, iota, matmul
    add_vectors(x, y)                                # tensors on the CPU, on torch_xla or on CUDA
    iota(length=8, device="xla")                     # no tensor argument to infer the device from
    matmul(x, y, activation="gelu")                  # blocked, with an activation epilogue
    torch.func.vmap(add_vectors)(xs, ys)             # JAX's vmap adds a grid dimension

Shape suffixes: M, K, N the dimensions of a matrix product.
Source: https://docs.jax.dev/en/latest/pallas/quickstart.html
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vitkernels.bridge.pallas import pallas_op
from vitkernels.errors import UsageError

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": lambda x: jnp.maximum(x, 0),
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),  # Mosaic has tanh but no erf
    "silu": lambda x: x * jax.nn.sigmoid(x),
}


def _add_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


def add_vectors_jax(x, y):
    """Return x + y, elementwise, with both arrays entirely in VMEM."""
    return pl.pallas_call(_add_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)


# A bare pallas_call has no derivative, so `vjp` supplies it.
add_vectors = pallas_op(
    add_vectors_jax, name="add_vectors", vjp=lambda primals, outputs, cotangents: (cotangents[0], cotangents[0])
)


def _iota_kernel(o_ref, *, block):
    start = pl.program_id(0) * block
    o_ref[...] = start + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)


def iota_jax(*, length: int, block: int = 128):
    """Return 0, 1, ... length - 1 as int32; each grid step writes one block.

    `length` need not be a multiple of `block`: elements beyond the end are not written.
    """
    row = pl.pallas_call(
        functools.partial(_iota_kernel, block=block),
        out_shape=jax.ShapeDtypeStruct((1, length), jnp.int32),
        grid=(pl.cdiv(length, block),),
        out_specs=pl.BlockSpec((1, block), lambda i: (0, i)),
    )()
    return row[0]


iota = pallas_op(iota_jax, name="iota")


def _matmul_kernel(x_ref, y_ref, o_ref, sum_ref, *, steps, activation):
    @pl.when(pl.program_id(2) == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    # Full float32 precision: by default the MXU rounds float32 inputs to bfloat16.
    precision = jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
    sum_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32, precision=precision)

    @pl.when(pl.program_id(2) == steps - 1)
    def _():
        o_ref[...] = ACTIVATIONS[activation](sum_ref[...]).astype(o_ref.dtype)


def matmul_jax(x_MK, y_KN, *, activation: str = "none", block: tuple[int, int, int] = (256, 256, 256)):
    """Return activation(x y), accumulated over K and activated in float32, block by block.

    block: (rows, columns, depth), each clipped to the matrix, which must then divide into blocks.
    Raises UsageError (a ValueError) for shapes that do not divide and for an activation not in ACTIVATIONS.
    """
    if activation not in ACTIVATIONS:
        message = f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}"
        raise UsageError(message, code="bridge.example_activation", activation=activation)
    (M, K), N = x_MK.shape, y_KN.shape[1]
    m, n, k = min(block[0], M), min(block[1], N), min(block[2], K)
    if y_KN.shape[0] != K or M % m or N % n or K % k:
        message = f"x {x_MK.shape} and y {y_KN.shape} must chain and divide into blocks of {(m, n, k)}"
        raise UsageError(message, code="bridge.example_shape")
    return pl.pallas_call(
        functools.partial(_matmul_kernel, steps=K // k, activation=activation),
        out_shape=jax.ShapeDtypeStruct((M, N), x_MK.dtype),
        grid=(M // m, N // n, K // k),
        in_specs=[
            pl.BlockSpec((m, k), lambda i, j, s: (i, s)),
            pl.BlockSpec((k, n), lambda i, j, s: (s, j)),
        ],
        out_specs=pl.BlockSpec((m, n), lambda i, j, s: (i, j)),
        scratch_shapes=[pltpu.VMEM((m, n), jnp.float32)],
    )(x_MK, y_KN)


def _matmul_vjp(primals, outputs, cotangents, *, activation: str = "none", block=(256, 256, 256)):
    """Run the gradient's products on the same kernel; JAX differentiates the activation."""
    x_MK, y_KN = primals
    (g_MN,) = cotangents
    m, n, k = block
    if activation != "none":
        _, pull = jax.vjp(ACTIVATIONS[activation], matmul_jax(x_MK, y_KN, block=block))
        (g_MN,) = pull(g_MN)
    return matmul_jax(g_MN, y_KN.T, block=(m, k, n)), matmul_jax(x_MK.T, g_MN, block=(k, n, m))


matmul = pallas_op(matmul_jax, vjp=_matmul_vjp, name="matmul")
