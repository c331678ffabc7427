"""Row-wise 8-bit quantization: the Triton kernels against PyTorch, and inputs of any layout."""

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize(("M", "C"), [(48, 40), (37, 64), (1, 130)])
def test_triton_kernels__match_torch(M, C, dtype, device):
    pytest.importorskip("triton")
    from vitkernels.ops import rowwise_quantization
    from vitkernels.ops.rowwise_quantization import triton as kernels

    if (device, dtype) == ("cpu", torch.float8_e4m3fn):
        pytest.skip("Triton's interpreter rounds to fp8 without a carry into the exponent; runs on GPUs")
    torch.manual_seed(0)
    x, gradient = torch.randn(M, C) * torch.rand(M, 1), torch.randn(M, C)
    x[M // 2] = 0
    on_device = lambda *tensors: [None if t is None else t.to(device) for t in tensors]  # noqa: E731
    bits = lambda q: q.cpu().view(torch.int8)  # noqa: E731
    for gelu, grad in ((False, None), (True, None), (True, gradient)):
        q, scale = (
            rowwise_quantization.quantize_gelu(x, grad, dtype) if gelu else rowwise_quantization.quantize_rows(x, dtype)
        )
        found, found_scale = kernels.quantize_rows(*on_device(x, grad), dtype, gelu)
        torch.testing.assert_close(found_scale.cpu(), scale, rtol=1e-6, atol=0)
        # gelu's polynomial is within 1e-7, and a reciprocal's last bit may differ: values that close to a tie may round
        # either way.
        assert (bits(found) != bits(q)).float().mean() < 2e-3
        assert (found.cpu().float() - q.float()).abs().max() <= (1 if dtype == torch.int8 else 32)
        turned, sums = kernels.transpose_rows(found, found_scale, True)
        assert turned.shape == (C, rowwise_quantization.padded(M)) and not bits(turned)[:, M:].any()
        assert torch.equal(bits(turned)[:, :M].T, bits(found))
        exact = (found.double() * found_scale.double()[:, None]).sum(0)
        torch.testing.assert_close(sums.double(), exact, rtol=1e-5, atol=1e-5)
    factor, other = torch.rand(M), torch.rand(M)
    for given, factors, wanted in ((x, (None, None), False), (q, (factor, other), True)):
        expected = rowwise_quantization.quantize_columns(given, *factors, dtype, wanted)
        found = kernels.quantize_columns(*on_device(given, *factors), dtype, wanted)
        assert (bits(found[0]) != bits(expected[0])).float().mean() < 2e-3 and found[0].shape == expected[0].shape
        torch.testing.assert_close(found[1].cpu(), expected[1])
        torch.testing.assert_close(found[2].cpu(), expected[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_quantization__accepts_any_layout(dtype, device):
    """The kernels address rows in contiguous memory."""
    from vitkernels.ops.rowwise_quantization import quantize_columns, quantize_gelu, quantize_rows

    turned = torch.randn(64, 48, device=device).T
    apart = torch.randn(48, 64, 2, device=device)[..., 0]
    ways = (
        lambda x: quantize_rows(x, dtype),
        lambda x: quantize_gelu(x, None, dtype),
        lambda x: quantize_gelu(turned.contiguous(), x, dtype),
        lambda x: quantize_columns(x, None, None, dtype, False),
    )
    for x in (turned, apart, torch.randn(64, device=device).expand(48, 64)):
        for way in ways:
            for found, wanted in zip(way(x), way(x.contiguous()), strict=True):
                assert torch.equal(found.float(), wanted.float()) and found.stride() == wanted.stride()
