"""Conformance suite of int8_matmul, for any sizes and strides, against an int64 product; and of the scaled products."""

import itertools
from functools import partial

import pytest
import torch
from expecting import error
from refused import skip_if_refused

from vitkernels.ops import int8_matmul
from vitkernels.ops.int8_matmul import BACKENDS, LARGEST_K
from vitkernels.tpu_estimate import compiler

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ON_GPU = pytest.param("triton", "cuda", marks=pytest.mark.gpu)
# Empty, one element, less than a tile, full tiles, one more than full tiles, and odd sizes.
SIZES = [
    (0, 4, 5),
    (3, 0, 4),
    (3, 4, 0),
    (1, 1, 1),
    (1, 40, 1),
    (5, 7, 3),
    (64, 256, 64),
    (65, 257, 129),
    (130, 33, 70),
]
LARGE = [(1000, 1000, 1000), (1024, 1024, 1024), (2049, 2000, 2047), (197, 3000, 1025)]


def draw(rows, columns, device, transposed=False):
    shape = (columns, rows) if transposed else (rows, columns)
    x = torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
    return x.T if transposed else x


def exact(x, w):
    """Return the product in int64, or on a GPU, which has no int64 product, in float64 (exact for these sums)."""
    return x.long() @ w.long() if x.device.type == "cpu" else (x.double() @ w.double()).long()


def check(backend, x, w):
    skip_if_refused(BACKENDS, backend, (x, w), lambda: int8_matmul(x, w, backend=backend))
    out = int8_matmul(x, w, backend=backend)
    assert out.dtype == torch.int32 and out.is_contiguous() and out.device == x.device
    assert torch.equal(out.long(), exact(x, w))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS.names())
@pytest.mark.parametrize("size", LARGE, ids=str)
def test_int8_matmul__is_exact_for_large_sizes(backend, size):
    M, K, N = size
    check(backend, draw(M, K, "cuda"), draw(K, N, "cuda", transposed=True))


@pytest.mark.parametrize("backend", BACKENDS.names())
@pytest.mark.parametrize("device", DEVICES)
class TestEveryBackend:
    @pytest.mark.parametrize("size", SIZES, ids=str)
    def test_int8_matmul__is_exact_for_each_size(self, backend, device, size):
        M, K, N = size
        check(backend, draw(M, K, device), draw(K, N, device))

    @pytest.mark.parametrize("x_transposed", [False, True])
    @pytest.mark.parametrize("w_transposed", [False, True])
    def test_int8_matmul__is_exact_for_transposed_operands(self, backend, device, x_transposed, w_transposed):
        check(backend, draw(70, 150, device, x_transposed), draw(150, 50, device, w_transposed))

    def test_int8_matmul__is_exact_for_slices_and_repeated_rows(self, backend, device):
        check(backend, draw(80, 160, device)[3:40:2, 5:85], draw(160, 90, device)[5:85, ::3])
        check(backend, draw(1, 48, device).expand(20, 48), draw(48, 9, device))

    def test_int8_matmul__is_exact_for_the_largest_sums(self, backend, device):
        interpreted = (backend, device) == ("triton", "cpu")  # LARGEST_K is too slow to interpret
        K = 2000 if interpreted else LARGEST_K
        x, w = (torch.full(shape, -128, dtype=torch.int8, device=device) for shape in ((2, K), (K, 3)))
        check(backend, x, w)
        check(backend, x, torch.full_like(w, 127))


@pytest.mark.parametrize("backend, device", [("reference", "cpu"), ("triton", "cpu"), ("pallas_tpu", "cpu"), ON_GPU])
def test_int8_matmul__refuses_no_supported_call(backend, device):
    """The suite above skips what a backend refuses, so it must not refuse these."""
    pytest.importorskip({"triton": "triton", "pallas_tpu": "jax"}.get(backend, "torch"))
    for size in SIZES + LARGE:
        M, K, N = size
        for x, w in itertools.product(
            *([draw(*shape, device, t) for t in (False, True)] for shape in ((M, K), (K, N)))
        ):
            if backend != "pallas_tpu" or 0 not in size:
                assert BACKENDS.unsupported(backend, x, w) is None


@pytest.mark.parametrize("device", DEVICES)
def test_int8_matmul__auto_chooses_the_backend_of_the_device(device):
    x, w = draw(20, 30, device), draw(30, 10, device)
    assert torch.equal(int8_matmul(x, w).long(), exact(x, w))
    chosen = BACKENDS.pick("auto", x.device, x, w)
    assert chosen is BACKENDS.get("triton" if device == "cuda" else "reference")


def test_int8_matmul__is_exact_on_xla():
    """In a lazy graph, by the same bridge and HLO as on a TPU."""
    torch_xla = pytest.importorskip("torch_xla")
    x, w = draw(20, 30, "cpu"), draw(30, 10, "cpu")
    on_xla = x.to(torch_xla.device()), w.to(torch_xla.device())
    for backend in ("reference", "pallas_tpu"):
        assert torch.equal(int8_matmul(*on_xla, backend=backend).cpu().long(), exact(x, w))


@pytest.mark.parametrize("device", DEVICES)
def test_int8_matmul__compiles_to_one_graph(device):
    torch._dynamo.reset()
    x, w = draw(40, 64, device), draw(64, 24, device)

    def model(x, w):
        return int8_matmul(x, w, backend="triton") + 1

    backend = "aot_eager" if device == "cpu" else "inductor"
    assert torch.equal(torch.compile(model, fullgraph=True, backend=backend)(x, w).long(), exact(x, w) + 1)


def zeros(*shape, dtype=torch.int8, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    "x, w, code, fields",
    [
        (zeros(3, 4, dtype=torch.float32), zeros(4, 5), "dtype", {"argument": "x", "dtype": torch.float32}),
        (zeros(2, 3, 4), zeros(4, 5), "shape", {"argument": "x", "shape": (2, 3, 4)}),
        (zeros(3, 4), zeros(5, 4), "shape", {"argument": "w", "shape": (5, 4)}),
        (zeros(1, 131072), zeros(131072, 1), "overflow", {"K": 131072, "limit": LARGEST_K}),
        (zeros(3, 4), zeros(4, 5, device="meta"), "device", {"argument": "w", "device": "meta"}),
    ],
)
def test_int8_matmul__refuses_invalid_arguments(x, w, code, fields):
    with error(f"ops.int8_matmul.{code}", **fields):
        int8_matmul(x, w)


def test_int8_matmul__suggests_a_backend_for_an_unknown_name():
    with error("unknown_name", name="trition", near=["triton"]):
        int8_matmul(zeros(2, 2), zeros(2, 2), backend="trition")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "size", [(70, 200, 50), (5, 0, 7), pytest.param((2050, 2000, 2060), marks=pytest.mark.gpu)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_scaled_product__matches_float64(device, size, dtype):
    """The product of quantized layers: scales of rows and columns, a bias, int8 and fp8; K = 0 leaves the bias."""
    pytest.importorskip("triton")
    from vitkernels.ops.int8_matmul.triton_product import product

    if device == "cpu" and size[0] > 100:
        pytest.skip("takes too long to interpret; runs on a GPU")
    M, K, N = size
    x, w = ((20 * torch.randn(shape, device=device)).clamp(-128, 127).to(dtype) for shape in ((M, K), (N, K)))
    x_scale, w_scale = torch.rand(M, device=device), torch.rand(N, device=device)
    bias = torch.randn(N, device=device)
    reference = x.double() @ w.double().T * x_scale[:, None] * w_scale + bias
    # float32: sums of 2000 fp8 products, to about 14 bits on Hopper's tensor cores. bfloat16: 2⁻⁹ each.
    for out_dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 3e-3)):
        if device == "cpu" and out_dtype == torch.bfloat16:
            continue  # not supported by Triton's interpreter
        out = product(x, w.T, out_dtype, x_scale, w_scale, bias_N=bias)
        assert out.dtype == out_dtype
        assert (out.double() - reference).norm() < tolerance * reference.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_scaled_product__reads_a_bias_with_any_strides(device):
    pytest.importorskip("triton")
    from vitkernels.ops.int8_matmul.scaled import product

    x, w = draw(8, 32, device), draw(16, 32, device)
    scales = torch.rand(8, device=device), torch.rand(16, device=device)
    for bias in (torch.randn(16, 2, device=device)[:, 0], torch.randn(1, device=device).expand(16)):
        results = [product(x, w, *scales, b, torch.float32) for b in (bias, bias.contiguous())]
        assert torch.equal(*results)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_stream_k__matches_float64_for_any_number_of_programs(device, dtype):
    """Runs of steps that end inside tiles, 6 tiles of 5 steps divided among 4 and 7 programs, and a single run."""
    pytest.importorskip("triton")
    from vitkernels.ops.int8_matmul.triton_long import product

    x, w = ((20 * torch.randn(shape, device=device)).clamp(-128, 127).to(dtype) for shape in ((40, 320), (90, 320)))
    x_scale, w_scale = torch.rand(40, device=device), torch.rand(90, device=device)
    tile = (32, 32, 64) if device == "cpu" else (64, 64, 64)
    sums = x.double() @ w.double().T
    for scales, exact in (((x_scale, w_scale), sums * x_scale[:, None] * w_scale), ((None, None), sums)):
        for programs in (4, 7, 1):
            out = product(x, w, torch.float32, *scales, tile, programs)
            # Integers are exact up to the scales; fp8 sums of 320 products have about 14 bits on Hopper.
            assert (out.double() - exact).norm() < (1e-6 if dtype == torch.int8 else 1e-3) * exact.norm()


@pytest.mark.parametrize("persistent", [False, True])
def test_triton_product__is_exact_for_each_tiling(persistent):
    pytest.importorskip("triton")
    from vitkernels.ops.int8_matmul.triton_product import ProductTiling, product

    x, w = draw(70, 200, "cpu"), draw(200, 50, "cpu", transposed=True)
    out = product(x, w, torch.int32, tiling=ProductTiling(16, 32, 64, num_warps=4, group=2, persistent=persistent))
    assert torch.equal(out.long(), exact(x, w))


def test_triton_product__copies_only_what_descriptors_cannot_describe():
    pytest.importorskip("triton")
    from vitkernels.ops.int8_matmul.triton_product import _contiguous_along_k

    x = torch.zeros(6, 64, dtype=torch.int8)
    for view in (x, x[2:], x[:, 16:40], x[:1, 16:17]):
        assert _contiguous_along_k(view).data_ptr() == view.data_ptr()
    for view in (x.T, x[:, 1:], x[:, :40].contiguous(), x[:1].expand(4, 64)):
        assert _contiguous_along_k(view).data_ptr() != view.data_ptr()


@pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [(1, 1, 1), (300, 500, 1), (1, 128, 200), (130, 300, 70)], ids=str)
def test_int8_matmul__compiles_for_v5e(size, transposed, dtype):
    """Uses libtpu's compiler, without a TPU."""
    compile_for_v5e(dtype, size, transposed)


@pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
@pytest.mark.parametrize("dtype, transposed", [("int8", True), ("bfloat16", False)])
def test_int8_matmul__compiles_full_blocks_and_edges_for_v5e(dtype, transposed):
    compile_for_v5e(dtype, (1100, 3100, 2100), transposed)


def compile_for_v5e(dtype, size, transposed):
    import jax

    from vitkernels.ops.int8_matmul.pallas_tpu_kernel import matmul

    M, K, N = size
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((M, K), (N, K) if transposed else (K, N))]
    compiler.compile_jax(partial(matmul, transposed=transposed), shapes)


def test_int8_matmul__ignores_memory_past_the_edge_in_bfloat16():
    """The bfloat16 kernel of the benchmark: blocks extend past the matrices, where memory holds NaN."""
    pytest.importorskip("jax")
    from vitkernels.bridge import pallas_op
    from vitkernels.ops.int8_matmul.pallas_tpu_kernel import MatmulBlocks, matmul

    op = pallas_op(matmul, name="test_matmul_bfloat16")
    x, w = torch.randn(20, 150).bfloat16(), torch.randn(150, 140).bfloat16()
    out = op(x, w, blocks=MatmulBlocks(16, 128, 128))
    reference = x.double() @ w.double()
    # One rounding to bfloat16 after float32 sums: at most 2⁻⁹ per element, about 2⁻¹⁰ of the norm.
    assert (out.double() - reference).norm() < 3e-3 * reference.norm()
