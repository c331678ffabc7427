"""The bridge on CUDA tensors: through DLPack and jit, and Mosaic-GPU kernels by their own launcher."""

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


def test_plain_jax_and_its_gradient():
    op = pallas_op(lambda x, y: jnp.sin(x) * y, name="cuda_sin_times")
    x, y = (torch.randn(64, 128, device="cuda", requires_grad=True) for _ in range(2))
    op(x, y).sum().backward()
    torch.testing.assert_close(x.grad, x.cos() * y, atol=1e-5, rtol=1e-5)  # two libraries' sine and cosine


# jax 0.11 and newer: a plain pallas_call still goes through Triton on the GPU, with a word about its end.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_pallas_kernel():
    x, y = torch.randn(2, 64, 128, device="cuda")
    torch.testing.assert_close(add_vectors(x, y), x + y, rtol=0, atol=0)


def test_runs_in_the_order_of_torchs_current_stream():
    op = pallas_op(lambda x: x + 1, name="cuda_increment")
    x = torch.zeros(1 << 22, device="cuda")
    op(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of ms: whoever does not wait reads the zeros
        x.fill_(7)
        total = op(x) * 2
    torch.cuda.current_stream().wait_stream(stream)
    assert total.eq(16).all()


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
def test_mosaic_gpu_kernel_is_launched_directly():
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
    with torch.cuda.stream(stream):  # not the default one, for which as_torch_kernel is made
        torch.cuda._sleep(50_000_000)  # tens of ms: whoever does not wait adds the old x
        x.fill_(7)
        total = op(x, y)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(total, y + 7)
