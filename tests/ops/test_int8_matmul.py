"""int8_matmul: every backend against an int64 product, on any sizes and strides; the scaled product beneath it."""

import itertools
from functools import partial

import pytest
import torch

from vitkernels.errors import UsageError
from vitkernels.ops import int8_matmul
from vitkernels.ops.int8_matmul import BACKENDS, LARGEST_K
from vitkernels.tpu_estimate import compiler

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ON_GPU = pytest.param("triton", "cuda", marks=pytest.mark.gpu)
# Nothing, one, less than a tile, whole tiles, just past them, and odd everywhere.
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


@pytest.fixture(autouse=True)
def poisoned_memory():
    """New integers are full of their largest value, so that an element which nobody writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def draw(rows, columns, device, transposed=False):
    shape = (columns, rows) if transposed else (rows, columns)
    x = torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
    return x.T if transposed else x


def exact(x, w):
    """In int64; on a GPU, which multiplies no integers, in float64: 53 bits hold these sums."""
    return x.long() @ w.long() if x.device.type == "cpu" else (x.double() @ w.double()).long()


def check(backend, x, w):
    reason = BACKENDS.unsupported(backend, x, w)
    if reason is not None:
        with pytest.raises(UsageError, match="cannot take this call"):
            int8_matmul(x, w, backend=backend)
        pytest.skip(reason)
    out = int8_matmul(x, w, backend=backend)
    assert out.dtype == torch.int32 and out.is_contiguous() and out.device == x.device
    assert torch.equal(out.long(), exact(x, w))


@pytest.mark.parametrize("backend", BACKENDS.names())
@pytest.mark.parametrize("device", DEVICES)
class TestEveryBackend:
    @pytest.mark.parametrize("size", SIZES, ids=str)
    def test_sizes(self, backend, device, size):
        M, K, N = size
        check(backend, draw(M, K, device), draw(K, N, device))

    @pytest.mark.gpu
    @pytest.mark.parametrize("size", LARGE, ids=str)
    def test_large_sizes(self, backend, device, size):
        M, K, N = size
        check(backend, draw(M, K, device), draw(K, N, device, transposed=True))

    @pytest.mark.parametrize("x_transposed", [False, True])
    @pytest.mark.parametrize("w_transposed", [False, True])
    def test_transposed_operands(self, backend, device, x_transposed, w_transposed):
        check(backend, draw(70, 150, device, x_transposed), draw(150, 50, device, w_transposed))

    def test_slices_and_repeated_rows(self, backend, device):
        check(backend, draw(80, 160, device)[3:40:2, 5:85], draw(160, 90, device)[5:85, ::3])
        check(backend, draw(1, 48, device).expand(20, 48), draw(48, 9, device))

    def test_the_largest_sums(self, backend, device):
        K = 2000 if (backend, device) == ("triton", "cpu") else LARGEST_K  # interpreted, a thousand steps take long
        x, w = (torch.full(shape, -128, dtype=torch.int8, device=device) for shape in ((2, K), (K, 3)))
        check(backend, x, w)
        check(backend, x, torch.full_like(w, 127))


@pytest.mark.parametrize("backend, device", [("reference", "cpu"), ("triton", "cpu"), ("pallas_tpu", "cpu"), ON_GPU])
def test_no_backend_refuses_what_it_must_take(backend, device):
    """The suite above skips what a backend refuses: so it must not refuse these."""
    pytest.importorskip({"triton": "triton", "pallas_tpu": "jax"}.get(backend, "torch"))
    for size in SIZES + LARGE:
        M, K, N = size
        for x, w in itertools.product(
            *([draw(*shape, device, t) for t in (False, True)] for shape in ((M, K), (K, N)))
        ):
            if backend != "pallas_tpu" or 0 not in size:
                assert BACKENDS.unsupported(backend, x, w) is None


@pytest.mark.parametrize("device", DEVICES)
def test_auto(device):
    x, w = draw(20, 30, device), draw(30, 10, device)
    assert torch.equal(int8_matmul(x, w).long(), exact(x, w))
    chosen = BACKENDS.pick("auto", x.device, x, w)
    assert chosen is BACKENDS.get("triton" if device == "cuda" else "reference")


def test_on_xla():
    """In a lazy graph, through the same bridge and HLO that a TPU gets."""
    torch_xla = pytest.importorskip("torch_xla")
    x, w = draw(20, 30, "cpu"), draw(30, 10, "cpu")
    on_xla = x.to(torch_xla.device()), w.to(torch_xla.device())
    for backend in ("reference", "pallas_tpu"):
        assert torch.equal(int8_matmul(*on_xla, backend=backend).cpu().long(), exact(x, w))


@pytest.mark.parametrize("device", DEVICES)
def test_whole_graph(device):
    torch._dynamo.reset()
    x, w = draw(40, 64, device), draw(64, 24, device)

    def model(x, w):
        return int8_matmul(x, w, backend="triton") + 1

    backend = "aot_eager" if device == "cpu" else "inductor"
    assert torch.equal(torch.compile(model, fullgraph=True, backend=backend)(x, w).long(), exact(x, w) + 1)


@pytest.mark.parametrize(
    "x, w, message",
    [
        (torch.zeros(3, 4), torch.zeros(4, 5, dtype=torch.int8), r"x is torch.float32 of shape \(3, 4\)"),
        (torch.zeros(2, 3, 4, dtype=torch.int8), torch.zeros(4, 5, dtype=torch.int8), "flatten"),
        (torch.zeros(3, 4, dtype=torch.int8), torch.zeros(5, 4, dtype=torch.int8), r"pass w\.T"),
        (torch.zeros(1, 131072, dtype=torch.int8), torch.zeros(131072, 1, dtype=torch.int8), "leave int32; split K"),
        (torch.zeros(3, 4, dtype=torch.int8), torch.zeros(4, 5, dtype=torch.int8, device="meta"), "one device"),
    ],
)
def test_what_it_refuses(x, w, message):
    with pytest.raises(UsageError, match=f"(?i){message}"):
        int8_matmul(x, w)


def test_unknown_backend():
    x = torch.zeros(2, 2, dtype=torch.int8)
    with pytest.raises(UsageError, match=r"unknown int8_matmul backend 'trition'.*Did you mean 'triton'"):
        int8_matmul(x, x, backend="trition")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "size", [(70, 200, 50), (5, 0, 7), pytest.param((2050, 2000, 2060), marks=pytest.mark.gpu)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_scaled_products(device, size, dtype):
    """What quantized layers call: scales of rows and columns, a bias, int8 and fp8; nothing summed leaves the bias."""
    pytest.importorskip("triton")
    from vitkernels.ops.int8_matmul.triton_product import product

    if device == "cpu" and size[0] > 100:
        pytest.skip("takes too long interpreted; runs where a GPU is")
    M, K, N = size
    x, w = ((20 * torch.randn(shape, device=device)).clamp(-128, 127).to(dtype) for shape in ((M, K), (N, K)))
    x_scale, w_scale = torch.rand(M, device=device), torch.rand(N, device=device)
    bias = torch.randn(N, device=device)
    reference = x.double() @ w.double().T * x_scale[:, None] * w_scale + bias
    # float32: sums of 2000 fp8 products, which Hopper's tensor cores keep to some 14 bits. bfloat16: 2⁻⁹ each.
    for out_dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 3e-3)):
        if device == "cpu" and out_dtype == torch.bfloat16:
            continue  # Triton's interpreter has none
        out = product(x, w.T, out_dtype, x_scale, w_scale, bias_N=bias)
        assert out.dtype == out_dtype
        assert (out.double() - reference).norm() < tolerance * reference.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_a_scaled_product_takes_a_bias_of_any_strides(device):
    pytest.importorskip("triton")
    from vitkernels.ops.int8_matmul.scaled import product

    x, w = draw(8, 32, device), draw(16, 32, device)
    scales = torch.rand(8, device=device), torch.rand(16, device=device)
    for bias in (torch.randn(16, 2, device=device)[:, 0], torch.randn(1, device=device).expand(16)):
        results = [product(x, w, *scales, b, torch.float32) for b in (bias, bias.contiguous())]
        assert torch.equal(*results)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_long_products(device, dtype):
    """Dealt out in runs of steps that end inside tiles: 6 tiles of 5 steps among 4 programs, and one for all."""
    pytest.importorskip("triton")
    from vitkernels.ops.int8_matmul.triton_long import product

    x, w = ((20 * torch.randn(shape, device=device)).clamp(-128, 127).to(dtype) for shape in ((40, 320), (90, 320)))
    x_scale, w_scale = torch.rand(40, device=device), torch.rand(90, device=device)
    tile = (32, 32, 64) if device == "cpu" else (64, 64, 64)
    sums = x.double() @ w.double().T
    for scales, exact in (((x_scale, w_scale), sums * x_scale[:, None] * w_scale), ((None, None), sums)):
        for programs in (4, 7, 1):
            out = product(x, w, torch.float32, *scales, tile, programs)
            # Integers are exact but for the scales; fp8 sums of 320 keep some 14 bits on Hopper.
            assert (out.double() - exact).norm() < (1e-6 if dtype == torch.int8 else 1e-3) * exact.norm()


@pytest.mark.parametrize("resident", [False, True])
def test_tiles_change_no_sum(resident):
    pytest.importorskip("triton")
    from vitkernels.ops.int8_matmul.triton_product import Tiles, product

    x, w = draw(70, 200, "cpu"), draw(200, 50, "cpu", transposed=True)
    out = product(x, w, torch.int32, tiles=Tiles(16, 32, 64, num_warps=4, group=2, resident=resident))
    assert torch.equal(out.long(), exact(x, w))


def test_what_a_descriptor_can_describe_is_not_copied():
    pytest.importorskip("triton")
    from vitkernels.ops.int8_matmul.triton_product import _k_last

    x = torch.zeros(6, 64, dtype=torch.int8)
    assert all(_k_last(v).data_ptr() == v.data_ptr() for v in (x, x[2:], x[:, 16:40], x[:1, 16:17]))
    assert all(
        _k_last(v).data_ptr() != v.data_ptr() for v in (x.T, x[:, 1:], x[:, :40].contiguous(), x[:1].expand(4, 64))
    )


@pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [(1, 1, 1), (300, 500, 1), (1, 128, 200), (130, 300, 70)], ids=str)
def test_compiles_for_v5e(size, transposed, dtype):
    """By libtpu's own compiler; no TPU is needed."""
    compile_for_v5e(dtype, size, transposed)


@pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
@pytest.mark.parametrize("dtype, transposed", [("int8", True), ("bfloat16", False)])
def test_whole_blocks_and_edges_compile_for_v5e(dtype, transposed):
    compile_for_v5e(dtype, (1100, 3100, 2100), transposed)


def compile_for_v5e(dtype, size, transposed):
    import jax

    from vitkernels.ops.int8_matmul.pallas_tpu_kernel import matmul

    M, K, N = size
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((M, K), (N, K) if transposed else (K, N))]
    compiler.compile_jax(partial(matmul, transposed=transposed), shapes)


def test_bfloat16_kernel_clears_what_lies_past_the_edge():
    """The same kernel in bfloat16, which the benchmark compares with: blocks end in the middle, past it lies NaN."""
    pytest.importorskip("jax")
    from vitkernels.bridge import pallas_op
    from vitkernels.ops.int8_matmul.pallas_tpu_kernel import Blocks, matmul

    op = pallas_op(matmul, name="test_matmul_bfloat16")
    x, w = torch.randn(20, 150).bfloat16(), torch.randn(150, 140).bfloat16()
    out = op(x, w, blocks=Blocks(16, 128, 128))
    reference = x.double() @ w.double()
    # One rounding to bfloat16, 2⁻⁹ each and so 2⁻¹⁰ of the norm at random, after float32 sums.
    assert (out.double() - reference).norm() < 3e-3 * reference.norm()
