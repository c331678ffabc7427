"""The Hopper kernel of scaled int8 products: interpreted on the CPU, lowered on any machine, and run on a GPU.

On a GPU it must agree bitwise with PyTorch's int8 product.
"""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from hopper import needs_new_jax

from vitkernels.ops import quantized_matmul
from vitkernels.ops.int8_matmul import pallas_hopper_product, scaled


def draw(M, N, K, bias_dtype, device="cpu"):
    """Return factors, scales and a bias. Scales are powers of two: scaling is exact, with and without FMA."""
    a, b = (torch.randint(-128, 128, (rows, K), dtype=torch.int8, device=device) for rows in (M, N))
    scales = [torch.exp2(torch.randint(-9, 3, (rows,), device=device).float()) for rows in (M, N)]
    bias = None if bias_dtype is None else (torch.randn(N, device=device) * 1e3).to(bias_dtype)
    return a, b, *scales, bias


def expected(sums: Tensor, a_scale, b_scale, bias, out_dtype) -> Tensor:
    out = sums.float() * a_scale[:, None] * b_scale
    return (out if bias is None else out + bias.float()).to(out_dtype)


# Consumers with several tiles and with none, more steps than ring slots, rows out of bounds; each tiling and dtype.
@needs_new_jax
@pytest.mark.parametrize(
    "M, N, K, tiling, out_dtype, bias_dtype",
    [
        (584, 256, 640, 0, torch.float32, torch.bfloat16),
        (136, 384, 256, 1, torch.bfloat16, None),
        (72, 512, 128, 2, torch.float16, torch.float16),
        (40, 128, 768, 3, torch.bfloat16, torch.float32),
    ],
)
def test_int8_hopper__matches_exact_product_interpreted(M, N, K, tiling, out_dtype, bias_dtype):
    import jax.numpy as jnp

    from vitkernels.ops.int8_matmul.pallas_hopper_kernel import TILINGS, ScaledProduct
    from vitkernels.ops.linear.pallas_hopper_launch import name_of

    a, b, *vectors = draw(M, N, K, bias_dtype)
    given = [jnp.asarray(t.numpy()) for t in (a, b, *vectors[:2])]
    if bias_dtype is not None:
        given.append(jnp.asarray(vectors[2].float().numpy(), name_of(bias_dtype)))
    options = name_of(out_dtype), bias_dtype and name_of(bias_dtype), TILINGS[tiling]
    out = ScaledProduct(M, N, K, "int8", 1, *options, interpret=True)(*given)
    assert out.dtype == name_of(out_dtype)
    found = torch.tensor(out.astype("float32").tolist()).to(out_dtype)
    assert torch.equal(found, expected((a.double() @ b.double().T).int(), *vectors, out_dtype))


@needs_new_jax
@pytest.mark.parametrize("tiling", range(4))
def test_int8_hopper__lowers_for_the_gpu(tiling):
    """Mosaic GPU checks layouts, copies and shared memory on any machine; only ptxas needs a GPU machine."""
    from vitkernels.bridge.mosaic_gpu import mosaic_module
    from vitkernels.ops.int8_matmul.pallas_hopper_kernel import TILINGS, ScaledProduct

    for out_dtype, bias_dtype in (("bfloat16", "bfloat16"), ("float32", "float32"), ("float16", None)):
        product = ScaledProduct(12608, 3072, 1024, "int8", 66, out_dtype, bias_dtype, TILINGS[tiling])
        assert mosaic_module(product, product.inputs()).startswith(b"ML")  # MLIR bytecode


@needs_new_jax
@pytest.mark.parametrize(
    "M, N, rows, columns",
    [
        (12608, 3072, 192, 128),  # 12 tiles per block at 192 x 128, 13 at 128 x 192
        (4096, 1024, 64, 256),
        (4096, 128, 128, 128),  # a single column of tiles cannot share the left factor
    ],
)
def test_int8_hopper__chooses_the_tiling_with_the_least_busy_block(M, N, rows, columns):
    from vitkernels.ops.int8_matmul.pallas_hopper_kernel import ScaledProduct

    tiling = ScaledProduct.best(M, N, 1024, "int8", 66, "bfloat16", None).tiling
    assert (tiling.rows, tiling.columns) == (rows, columns)


def test_int8_hopper__leaves_unsupported_products_to_triton():
    a, b, *vectors = draw(24, 40, 48, torch.float32)
    assert not pallas_hopper_product.takes(a, b, *vectors, torch.float32)  # not on a GPU
    found = scaled.product(a, b, *vectors, torch.float32)
    assert torch.equal(found, expected((a.double() @ b.double().T).int(), *vectors, torch.float32))


def on_hopper(test):
    reason = pallas_hopper_product._unavailable()
    return pytest.mark.gpu(pytest.mark.skipif(reason is not None, reason=str(reason))(test))


@on_hopper
def test_int8_hopper__takes_supported_products_on_the_gpu():
    a, b, *vectors = draw(4096, 1024, 256, torch.bfloat16, "cuda")
    scales, bias = vectors[:2], vectors[2]

    def takes(a=a, b=b, scales=scales, bias=bias, out_dtype=torch.bfloat16):
        return pallas_hopper_product.takes(a, b, *scales, bias, out_dtype)

    assert takes() and takes(bias=None) and takes(out_dtype=torch.float32)
    assert not takes(a[:1024])  # too few tiles
    assert not takes(a[:4092])
    assert not takes(b=b[:1000])
    assert not takes(a[:, :192], b[:, :192])
    assert not takes(a.T.contiguous().T)
    assert not takes(scales=(None, scales[1]))
    assert not takes(out_dtype=torch.int32)
    assert not takes(a.float(), b.float())


@on_hopper
@pytest.mark.parametrize("tiling", [None, 0, 1, 2, 3])
@pytest.mark.parametrize(
    "M, N, K, out_dtype, bias_dtype",
    [
        (12608, 1536, 1024, torch.bfloat16, torch.bfloat16),
        (12608, 3072, 4096, torch.bfloat16, None),
        (5000, 768, 128, torch.float16, torch.float32),
        (8, 768, 3072, torch.float32, torch.float16),
    ],
)
def test_int8_hopper__equals_torch_int_mm(M, N, K, out_dtype, bias_dtype, tiling):
    from vitkernels.ops.int8_matmul.pallas_hopper_kernel import TILINGS

    a, b, *vectors = draw(M, N, K, bias_dtype, "cuda")
    padded = torch.cat([a, a.new_zeros(-M % 32, K)])  # _int_mm needs more than 16 rows
    sums = torch._int_mm(padded, b.T)[:M]
    found = pallas_hopper_product.product(a, b, *vectors, out_dtype, None if tiling is None else TILINGS[tiling])
    assert torch.equal(found, expected(sums, *vectors, out_dtype))


@on_hopper
def test_int8_hopper__agrees_with_triton_in_a_quantized_layer(monkeypatch):
    """With random scales the last bit may differ, because roundings happen in a different order."""
    x = torch.randn(12608, 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.randint(-128, 128, (1024, 1024), dtype=torch.int8, device="cuda")
    scale, bias = torch.rand(1024, device="cuda") / 4096, torch.randn(1024, device="cuda")

    def layer():
        return quantized_matmul(x, w, scale, bias=bias, activation_bits=8)

    ours, compiled = layer(), torch.compile(layer, fullgraph=True)()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    graph.replay()
    assert torch.equal(captured, ours)
    monkeypatch.setattr(pallas_hopper_product, "product", None)  # fail if called
    monkeypatch.setattr(pallas_hopper_product, "takes", lambda *_: False)
    theirs = layer()
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(compiled, theirs, rtol=2**-5, atol=1e-2)  # Inductor rounds the tokens
