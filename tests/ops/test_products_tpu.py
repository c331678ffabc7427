"""Compile the Pallas products for TPU, at model sizes and odd sizes, by libtpu's compiler, without a TPU."""

from functools import partial

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

from vitkernels.ops.cross_entropy.pallas_tpu_kernel import loss_and_gradient
from vitkernels.ops.eight_bit_linear.pallas_tpu_kernel import weight_gradient
from vitkernels.ops.layer_norm_residual.pallas_tpu_kernel import norm_backward, norm_forward
from vitkernels.ops.linear.pallas_tpu_kernel import rows_product
from vitkernels.ops.linear_gelu import pallas_tpu_kernel as kernel
from vitkernels.tpu_estimate import compiler

pytestmark = pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))

bf16, f32 = jnp.bfloat16, jnp.float32
NORM = ("x", "branch", "gamma", "beta", "branch_bias", "layer_scale", "sample_scale", "weight", "bias")
GRADIENT = ("total", "gamma", "beta", "branch", "branch_bias", "layer_scale", "sample_scale", "dtotal", "dy", "weight")


def weight_dtype(C, F, dtype):
    """Return float32, which the kernels round in VMEM, if the weight fits, as ops/tpu_arrays.py decides."""
    return f32 if 4 * C * F <= 24 * 2**20 else dtype


def shapes(names, B, N, C, F, dtype):
    """Return the shapes of a kernel's arrays by their names."""
    vector, rows = ((1, 1, C), f32), ((B, N, C), f32)
    found = {
        "x": rows, "total": rows, "dtotal": rows, "branch": ((B, N, C), dtype), "sample_scale": ((B,), f32),
        "weight": ((1, F, C), weight_dtype(C, F, dtype)), "bias": ((1, 1, F), f32), "dy": ((B, N, F), dtype),
    }  # fmt: skip
    return [jax.ShapeDtypeStruct(*found.get(name, vector)) for name in names]


def on_chips(*problems):
    """Parametrize "problem, chip": the first, the largest, on v5p, the others on v5e, and the last one on all.

    A TensorCore of v5p has 64 MiB of VMEM, those of v5e and v6e have 128.
    """
    pairs = [(problems[0], "v5p")] + [(problem, "v5e") for problem in problems[1:]]
    pairs += [(problems[-1], chip) for chip in ("v5p", "v6e")]
    return pytest.mark.parametrize("problem, chip", pairs, ids=str)


@pytest.mark.slow
@on_chips(
    (2, 257, 1280, 5120, bf16), (2, 197, 1024, 4096, bf16), (4, 256, 384, 1152, bf16), (2, 577, 192, 768, f32),
    (3, 5, 24, 72, f32), (4, 197, 384, 1152, bf16),
)  # fmt: skip
def test_norm_products_tpu__compile(problem, chip):
    B, N, C, F, dtype = problem
    forward = partial(norm_forward, given=NORM, eps=1e-6, out=jnp.dtype(dtype).name, gelu="none")
    compiler.compile_jax(forward, shapes(NORM, B, N, C, F, dtype), chip=chip)
    given = ("x", *GRADIENT[1:])  # the sum of x and the branch, taken again
    backward = partial(norm_backward, given=given, eps=1e-6, branch_dtype=jnp.dtype(dtype).name)
    compiler.compile_jax(backward, shapes(given, B, N, C, F, dtype), chip=chip)
    rows = [jax.ShapeDtypeStruct((B, N, width), dtype) for width in (C, F)]
    weight = jax.ShapeDtypeStruct((1, C, F), weight_dtype(C, F, dtype))
    compiler.compile_jax(partial(kernel.gelu_backward, tanh=False, kept=False), [rows[0], weight, rows[1]], chip=chip)
    compiler.compile_jax(partial(rows_product, axis=0), [rows[0], weight], chip=chip)


@pytest.mark.slow
@on_chips((2, 197, 1024, 3072), (4, 256, 384, 1536), (3, 5, 32, 48), (2, 197, 384, 1536))
def test_eight_bit_products_tpu__compile(problem, chip):
    B, N, C, F = problem
    eight = ("weight_scale",)
    found = {
        "weight": jax.ShapeDtypeStruct((1, C, F), jnp.int8), "weight_scale": jax.ShapeDtypeStruct((1, 1, F), f32),
    }  # fmt: skip

    def arrays(names):
        return [found.get(name, x) for name, x in zip(names, shapes(names, B, N, C, F, bf16), strict=True)]

    names = (*NORM, *eight)
    compiler.compile_jax(
        partial(norm_forward, given=names, eps=1e-6, out="bfloat16", gelu="none"), arrays(names), chip=chip
    )
    product = ("x", "weight", *eight)
    compiler.compile_jax(partial(norm_forward, given=product, eps=0.0, out="bfloat16"), arrays(product), chip=chip)
    found["weight"] = jax.ShapeDtypeStruct((1, F, C), jnp.int8)
    found["weight_scale"] = jax.ShapeDtypeStruct((1, 1, C), f32)
    names = (*GRADIENT, *eight)
    compiler.compile_jax(
        partial(norm_backward, given=names, eps=1e-6, branch_dtype="bfloat16"), arrays(names), chip=chip
    )
    rows = [jax.ShapeDtypeStruct((B, N, width), bf16) for width in (C, F)]
    weight = [jax.ShapeDtypeStruct((1, C, F), jnp.int8), rows[1], jax.ShapeDtypeStruct((1, 1, F), f32)]
    compiler.compile_jax(partial(kernel.gelu_backward, tanh=False, kept=False), [rows[0], *weight], chip=chip)
    compiler.compile_jax(weight_gradient, rows, chip=chip)


@pytest.mark.parametrize(
    "B, N, K, F, dtype, tanh",
    [(4, 197, 1024, 2048, bf16, False), (1, 33, 2560, 640, bf16, True), (1, 7, 5, 3, f32, True)],
)
def test_linear_gelu_tpu__compiles(B, N, K, F, dtype, tanh):
    arrays = [jax.ShapeDtypeStruct(*x) for x in (((B, N, K), dtype), ((1, F, K), dtype), ((1, 1, F), f32))]
    given = ("x", "weight", "bias")
    compiler.compile_jax(partial(kernel.linear_gelu_of_images, given=given, tanh=tanh, keep=False), arrays)


@pytest.mark.parametrize("soft", [False, True], ids=["classes", "distributions"])
@pytest.mark.parametrize("B, C", [(128, 1000), (7, 21843)])
def test_cross_entropy_tpu__compiles(B, C, soft):
    targets = jax.ShapeDtypeStruct((B, C), f32) if soft else jax.ShapeDtypeStruct((B, 1), jnp.int32)
    function = partial(loss_and_gradient, smoothing=0.1, ignore_index=-100)
    compiler.compile_jax(function, [jax.ShapeDtypeStruct((B, C), f32), targets])
