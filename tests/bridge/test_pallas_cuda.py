"""pallas_op on CUDA tensors: jit through DLPack, and Mosaic-GPU kernels through the direct launcher."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

from vitkernels.bridge import jax_compat, pallas_op
from vitkernels.bridge.examples.quickstart import add_vectors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not jax_compat.has_cuda_plugin(), reason="needs a GPU"),
]


def test_plain_jax__output_and_gradient():
    op = pallas_op(lambda x, y: jnp.sin(x) * y, name="cuda_sin_times")
    x, y = (torch.randn(64, 128, device="cuda", requires_grad=True) for _ in range(2))
    op(x, y).sum().backward()
    torch.testing.assert_close(x.grad, x.cos() * y, atol=1e-5, rtol=1e-5)  # two libraries' sine and cosine


# From jax 0.11 on, a plain pallas_call on the GPU still lowers through Triton, with a deprecation warning.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_pallas_kernel__equals_torch():
    x, y = torch.randn(2, 64, 128, device="cuda")
    torch.testing.assert_close(add_vectors(x, y), x + y, rtol=0, atol=0)


def test_stream_order__follows_torchs_current_stream():
    op = pallas_op(lambda x: x + 1, name="cuda_increment")
    x = torch.zeros(1 << 22, device="cuda")
    op(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of ms: an unsynchronized kernel reads the zeros
        x.fill_(7)
        total = op(x) * 2
    torch.cuda.current_stream().wait_stream(stream)
    assert total.eq(16).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("visible", ["all", None])
@pytest.mark.parametrize("device", [0, 1])
def test_several_gpus__torch_keeps_its_device(device, visible):
    """Neither JAX's initialization nor its kernels switch torch's current GPU."""
    code = f"""
import ctypes, torch
from vitkernels.bridge import pallas_op
from vitkernels.runtime import create
torch.cuda.set_device({device})
if {visible is None}:
    create("cuda")
driver, before, after = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
x = torch.ones(1024, 768, device="cuda", dtype=torch.bfloat16)
driver.cuCtxGetCurrent(ctypes.byref(before))
jit = pallas_op(lambda x: x + 1, name="increment")(x)
driver.cuCtxGetCurrent(ctypes.byref(after))
assert before.value == after.value and torch.cuda.current_device() == {device}, (before, after)
assert torch.compile(torch.sin)(jit).allclose(jit.sin())
if torch.cuda.get_device_capability() == (9, 0):
    from vitkernels.ops.linear import linear
    weight = torch.eye(768, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(linear(x, weight, None, backend="pallas_hopper"), x)
    driver.cuCtxGetCurrent(ctypes.byref(after))
    assert before.value == after.value
    assert torch.compile(torch.cos)(x).allclose(x.cos())
print("passed")
"""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_CUDA_VISIBLE_DEVICES"}
    environment |= {} if visible is None else {"JAX_CUDA_VISIBLE_DEVICES": visible}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.stdout.strip().endswith("passed"), ran.stderr[-3000:]


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
def test_mosaic_gpu_kernel__is_launched_directly():
    if jax.__version_info__ < (0, 11):
        pytest.skip(f"needs jax 0.11 or newer, this is {jax.__version__}: pip install 'jax[cuda13]'")
    from jax.experimental.pallas import mosaic_gpu as mgpu

    def body(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    add = mgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    op = pallas_op(lambda x, y: add(x, y), name="cuda_mosaic_add")
    x, y = torch.randn(2, 128, device="cuda")
    torch.testing.assert_close(op(x, y), x + y)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # as_torch_kernel would use the default stream
        torch.cuda._sleep(50_000_000)  # tens of ms: an unsynchronized kernel adds the old x
        x.fill_(7)
        total = op(x, y)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(total, y + 7)
