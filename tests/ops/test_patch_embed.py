"""Conformance suite of patch_embed: every backend against a float64 convolution, with all gradients."""

import pytest
import torch
from backend_devices import each_backend_and_device
from expecting import error
from refused import skip_if_refused
from torch.nn import functional as F

pytest.importorskip("triton")

from vitkernels.ops import patch_embed
from vitkernels.ops.patch_embed import BACKENDS

# Relative: float32 sums of a few hundred terms; for 16 bits the rounding of inputs and results, which partly cancels.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 1e-14}

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "cudnn_in_float32"),
    each_backend_and_device(BACKENDS),
]


@pytest.fixture
def cudnn_in_float32():
    """Replace cuDNN's default of tf32."""
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    yield
    torch.backends.cudnn.conv.fp32_precision = before


def draw(device, B=2, C=3, grid=(3, 2), patch=(4, 4), E=20):
    images = torch.randn(B, C, grid[0] * patch[0], grid[1] * patch[1], device=device)
    return images, torch.randn(E, C, *patch, device=device) * 0.1, torch.randn(E, device=device)


def check(backend, images, weight, bias, autocast=None):
    leaves = [x.requires_grad_() for x in (images, weight, bias) if x is not None]
    with torch.autocast(images.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
        tokens = patch_embed(images, weight, bias, backend=backend)
    assert tokens.dtype == (autocast or weight.dtype)
    dtokens = torch.randn_like(tokens)
    grads = torch.autograd.grad(tokens, leaves, dtokens)
    copies = [x.detach().double().requires_grad_() for x in leaves]
    exact = F.conv2d(copies[0], copies[1], copies[2] if bias is not None else None, stride=weight.shape[2:])
    exact = exact.flatten(2).transpose(1, 2)
    exact_grads = torch.autograd.grad(exact, copies, dtokens.double())
    assert tokens.shape == exact.shape
    for name, x, y in zip(
        ("tokens", "dimages", "dweight", "dbias"), (tokens, *grads), (exact, *exact_grads), strict=False
    ):
        assert (x.double() - y).norm() / y.norm() < TOLERANCE[tokens.dtype], name
    for x, grad in zip(leaves, grads, strict=True):
        assert grad.dtype == x.dtype and grad.shape == x.shape


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"B": 1, "C": 1, "grid": (1, 1)},
        {"patch": (2, 2), "grid": (4, 70)},  # wider than one program
        {"patch": (14, 14), "E": 8},
        {"patch": (16, 16), "E": 8},
        {"patch": (3, 5), "C": 2, "grid": (2, 30)},
    ],
)
def test_patch_embed__matches_float64_for_each_shape(backend, device, shape):
    check(backend, *draw(device, **shape))


def test_patch_embed__matches_float64_without_bias(backend, device):
    images, weight, _ = draw(device)
    check(backend, images, weight, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_patch_embed__matches_float64_for_each_dtype(backend, device, dtype):
    check(backend, *(x.to(dtype) for x in draw(device)))
    check(backend, *draw(device), autocast=dtype)


def test_patch_embed__computes_float64_exactly_or_refuses(backend, device):
    args = [x.double() for x in draw(device)]
    skip_if_refused(BACKENDS, backend, (*args, torch.float64), lambda: patch_embed(*args, backend=backend))
    check(backend, *args)


def test_patch_embed__reads_images_with_any_strides(backend, device):
    images, weight, bias = draw(device)
    check(backend, images.to(memory_format=torch.channels_last), weight, bias)
    check(backend, images.flip(0).mT.contiguous().mT, weight, bias)
    check(backend, images[:1].expand(2, -1, -1, -1).detach(), weight, bias)


def test_patch_embed__accepts_an_empty_batch(backend, device):
    images, weight, bias = draw(device)
    assert patch_embed(images[:0], weight, bias, backend=backend).shape == (0, 6, 20)


def test_patch_embed__compiles_to_one_graph(backend, device):
    if backend == "reference":
        pytest.skip("plain PyTorch")
    torch._dynamo.reset()
    images, weight, bias = (x.requires_grad_() for x in draw(device))

    def model(images, weight, bias):
        return patch_embed(images * 2, weight, bias, backend=backend).relu()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    tokens = [function(images, weight, bias) for function in (model, compiled)]
    torch.testing.assert_close(*tokens)
    grads = [torch.autograd.grad(x.sum(), (images, weight, bias)) for x in tokens]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)  # summed in another order


def test_patch_embed__refuses_invalid_arguments(backend, device):
    images, weight, bias = draw(device)
    with error("ops.patch_embed.patch_size", image=(12, 7), patch=(4, 4)):
        patch_embed(images[..., :7], weight, bias, backend=backend)
    with error("ops.patch_embed.patch_size", patch=(0, 4)):
        patch_embed(images, weight[:, :, :0], bias, backend=backend)
    with error("ops.patch_embed.shape", shape=(2, 2, 12, 8), weight=(20, 3, 4, 4)):
        patch_embed(images[:, :2], weight, bias, backend=backend)
    with error("ops.patch_embed.shape", argument="bias", expected=(20,)):
        patch_embed(images, weight, bias[:3], backend=backend)
    with error("ops.patch_embed.dtype", argument="images"):
        patch_embed(images.byte(), weight, bias, backend=backend)
    with error("ops.patch_embed.type", argument="images"):
        patch_embed(None, weight, bias, backend=backend)
