"""Conformance suite of quantized_matmul: every scheme on every backend against float64, within the scheme's error."""

import itertools
from importlib.util import find_spec

import pytest
import torch
from expecting import error

from vitkernels.ops import quantized_matmul
from vitkernels.ops.quantized_matmul import BACKENDS, pack_int4, unpack_int4

NEEDS = {"triton": "triton", "pallas_tpu": "jax"}
CPU_BACKENDS = [
    pytest.param(
        name, marks=pytest.mark.skipif(not find_spec(NEEDS.get(name, "torch")), reason=f"no {NEEDS.get(name)}")
    )
    for name in BACKENDS.names()
    if name != "xla"  # runs on XLA devices: test_quantized_matmul_xla.py
]
SCHEMES = list(itertools.product((-1, 32), (8, 4), (False, True), (16, 8)))


def weights(K, N, block_size, bits, asymmetric, dtype=torch.float32):
    """Return int8 weights of `bits` in torch_xla's layout, scale, zero point, and the float64 matrix (K, N)."""
    S = 1 if block_size == -1 else K // block_size
    top = 2 ** (bits - 1)
    w = torch.randint(-top, top, (S, K // S, N), dtype=torch.int8)
    scale = (torch.rand(S, N) * 0.02 + 0.01).to(dtype)
    zero = (torch.randn(S, N) * 0.05).to(dtype) if asymmetric else None
    full = w.double() * scale.double()[:, None] - (0 if zero is None else zero.double()[:, None])
    if block_size == -1:
        w, scale, zero = w[0].T.contiguous(), scale[0], None if zero is None else zero[0]
    return w, scale, zero, full.reshape(K, N)


def check(backend, M, K, N, block_size, bits, asymmetric, activation_bits, device="cpu", dtype=torch.float32):
    w, scale, zero, full = weights(K, N, block_size, bits, asymmetric)
    x, bias = torch.randn(M, K).to(dtype), torch.randn(N)
    stored = pack_int4(w) if bits == 4 else w
    args = [None if t is None else t.to(device) for t in (x, stored, scale, zero)]
    keywords = {"block_size": block_size, "weight_bits": bits, "activation_bits": activation_bits, "backend": backend}
    out = quantized_matmul(*args, bias=bias.to(device), **keywords)
    assert out.dtype == dtype and out.shape == (M, N)
    exact = x.double() @ full + bias.double()
    # Arithmetic: each of K products, and with 16-bit activations each weight once more, is rounded to the dtype, sums
    # to float32. Rounded tokens: half a quantization step per entry.
    digits = torch.finfo(dtype).eps
    bound = (digits + K * 2**-23) * (x.double().abs() @ (full.abs() + 128 * scale.max().double()) + bias.abs())
    if activation_bits == 8:
        step = x.double().abs().amax(1, keepdim=True) / 127
        bound = bound + 0.5001 * step * full.abs().sum(0)
    difference = (out.cpu().double() - exact).abs()
    assert (difference <= bound).all(), (difference / bound).max()
    # A tighter bound against the reference, except for tokens that are rounded differently on a tie.
    reference = quantized_matmul(x.double(), stored, scale, zero, bias=bias, **{**keywords, "backend": "reference"})
    assert (out.cpu().double() - reference).norm() <= (2 * digits + 1e-4 * (activation_bits == 8)) * reference.norm()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("block_size", "bits", "asymmetric", "activation_bits"), SCHEMES)
def test_quantized_matmul__matches_float64_for_each_scheme(backend, block_size, bits, asymmetric, activation_bits):
    torch.manual_seed(0)
    check(backend, 5, 96, 24, block_size, bits, asymmetric, activation_bits)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("bits", "activation_bits"), [(8, 16), (4, 8)])
def test_quantized_matmul__matches_float64_for_odd_sizes(backend, bits, activation_bits):
    torch.manual_seed(1)
    check(backend, 3, 37, 7, -1, bits, True, activation_bits)
    check(backend, 1, 15, 9, 5, bits, True, activation_bits)  # blocks of 5 pack into 3 bytes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("block_size", "bits", "asymmetric", "activation_bits"), SCHEMES)
def test_quantized_matmul__matches_float64_on_cuda(block_size, bits, asymmetric, activation_bits, dtype):
    torch.manual_seed(2)
    for M in (5, 600):  # few tokens, and many, for which weights are unpacked first
        check("triton", M, 96, 264, block_size, bits, asymmetric, activation_bits, "cuda", dtype)


@pytest.mark.parametrize(
    "backend, device", [("reference", "cpu"), pytest.param("triton", "cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("M, K, N", [(5, 96, 24), (600, 96, 272), (3, 37, 7)])
def test_quantized_matmul__matches_float64_for_fp8(backend, device, dtype, M, K, N):
    torch.manual_seed(0)
    x, w, scale, bias = (
        torch.randn(M, K).to(dtype),
        torch.randn(N, K).to(torch.float8_e4m3fn),
        torch.rand(N),
        torch.randn(N),
    )
    on_device = [t.to(device) for t in (x, w, scale)]
    out = quantized_matmul(*on_device, bias=bias.to(device), activation_bits=8, backend=backend)
    full = (w.double() * scale.double()[:, None]).T
    # A rounded token: half of its last bit, 2⁻⁴, or for subnormal numbers half a step, 2⁻¹⁰ on a scale of 448.
    step = x.double().abs() * 2**-4 + x.double().abs().amax(1, keepdim=True) * 2**-10 / 448
    arithmetic = (torch.finfo(dtype).eps + K * 2**-12) * (x.double().abs() @ full.abs() + bias.abs())
    difference = (out.cpu().double() - (x.double() @ full + bias.double())).abs()
    assert out.dtype == dtype and (difference <= 1.001 * step @ full.abs() + arithmetic).all()
    reference = quantized_matmul(x, w, scale, bias=bias, activation_bits=8, backend="reference")
    # Hopper sums fp8 products to about 14 bits; tokens on a tie may be rounded differently.
    assert (out.cpu().float() - reference.float()).norm() <= (2e-3 + torch.finfo(dtype).eps) * reference.float().norm()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("block_size", "activation_bits"), [(-1, 8), (32, 8), (-1, 16)])
def test_quantized_matmul__compiles_to_one_graph(device, block_size, activation_bits):
    pytest.importorskip("triton")
    torch._dynamo.reset()
    w, scale, _, _ = weights(64, 48, block_size, 8, False)
    x, w, scale = torch.randn(5, 64, device=device), w.to(device), scale.to(device)

    def model(x):
        return 2 * quantized_matmul(
            x.tanh(), w, scale, block_size=block_size, activation_bits=activation_bits, backend="triton"
        )

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    # Tokens on a tie may be rounded differently, because the compiler's tanh differs.
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-2 if activation_bits == 8 else 1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(3, 8), (2, 7, 4), (1, 1)])
def test_pack_int4__halves_the_bytes_without_loss(shape):
    w = torch.randint(-8, 8, shape, dtype=torch.int8)
    packed = pack_int4(w)
    assert packed.dtype == torch.uint8 and packed.shape[1] == -(-shape[1] // 2)
    assert torch.equal(unpack_int4(packed, shape[1]), w)


def test_quantized_matmul__accepts_packed_and_unpacked_4_bit_weights():
    w, scale, _, _ = weights(32, 6, -1, 4, False)
    x = torch.randn(2, 32)
    assert torch.equal(
        quantized_matmul(x, w, scale, weight_bits=4), quantized_matmul(x, pack_int4(w), scale, weight_bits=4)
    )


def test_quantized_matmul__keeps_leading_dimensions_and_zero_tokens():
    w, scale, _, _ = weights(32, 6, -1, 8, False)
    x = torch.zeros(2, 3, 32)
    out = quantized_matmul(x, w, scale, activation_bits=8)
    assert out.shape == (2, 3, 6) and torch.equal(out, torch.zeros(2, 3, 6))


@pytest.mark.parametrize(
    ("change", "code", "fields"),
    [
        ({"weight_bits": 3}, "weight_bits", {"value": 3}),
        ({"activation_bits": 32}, "activation_bits", {"value": 32}),
        ({"block_size": 5}, "block_size", {"block_size": 5, "in_features": 32}),
        ({"block_size": 16}, "shape", {"argument": "w", "shape": (6, 32)}),
        ({"w": torch.zeros(6, 31, dtype=torch.int8)}, "shape", {"argument": "w", "shape": (6, 31)}),
        ({"w": torch.zeros(6, 16, dtype=torch.uint8)}, "dtype", {"argument": "w", "dtype": torch.uint8}),
        ({"scale": torch.ones(5)}, "shape", {"argument": "scale", "expected": (6,)}),
        ({"scale": torch.ones(6, device="meta")}, "device", {"argument": "scale", "device": "meta"}),
        ({"zero_point": torch.ones(6, 1)}, "shape", {"argument": "zero_point", "expected": (6,)}),
        ({"zero_point": torch.ones(6, dtype=torch.int32)}, "dtype", {"argument": "zero_point"}),
        ({"x": torch.randn(2, 32, requires_grad=True)}, "gradient", {}),
        ({"scale": torch.ones(6, requires_grad=True)}, "gradient", {}),
        ({"x": torch.zeros(2, 32, dtype=torch.int8)}, "dtype", {"argument": "x"}),
        ({"x": torch.zeros(2, 32).to(torch.float8_e4m3fn)}, "dtype", {"argument": "x"}),
        ({"x": torch.zeros(2, 0), "w": torch.zeros(6, 0, dtype=torch.int8)}, "shape", {"argument": "x"}),
        ({"w": torch.zeros(6, 32).to(torch.float8_e4m3fn)}, "fp8", {}),
    ],
)
def test_quantized_matmul__refuses_invalid_arguments(change, code, fields):
    with error(f"ops.quantized_matmul.{code}", **fields):
        call_with(change)


def test_quantized_matmul__refuses_backends():
    with error("registry.unsupported", backend="xla"):
        call_with({"backend": "xla"})
    with error("unknown_name", name="cutlass"):
        call_with({"backend": "cutlass"})


def call_with(change):
    given = {"x": torch.randn(2, 32), "w": torch.zeros(6, 32, dtype=torch.int8), "scale": torch.ones(6)} | change
    return quantized_matmul(given.pop("x"), given.pop("w"), given.pop("scale"), given.pop("zero_point", None), **given)


@pytest.mark.parametrize(
    ("w", "code"),
    [
        (torch.zeros(4, dtype=torch.int8), "pack"),
        (torch.zeros(4, 4), "pack"),
        (torch.full((4, 4), 8, dtype=torch.int8), "pack_range"),
    ],
)
def test_pack_int4__refuses_invalid_weights(w, code):
    with error(f"ops.quantized_matmul.{code}"):
        pack_int4(w)


def test_unpack_int4__refuses_another_size():
    with error("ops.quantized_matmul.unpack", size=9):
        unpack_int4(torch.zeros(3, 4, dtype=torch.uint8), 9)
