"""triton_call on every path of the Triton bridge, with the guide's vector addition."""

import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from expecting import error

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from vitkernels.bridge import triton_call  # noqa: E402
from vitkernels.bridge.triton import bind  # noqa: E402

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@triton.jit
def add_kernel(x_ptr, y_ptr, output_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(axis=0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(output_ptr + offsets, x + y, mask=mask)


@triton.jit
def scale_kernel(x_ptr, output_ptr, factor, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(output_ptr + offsets, x.to(tl.float32) * factor, mask=offsets < n)


@triton.jit
def _square(x):
    return x * x


@triton.jit
def norm_kernel(x_ptr, output_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        total += _square(tl.load(x_ptr + start + offsets, mask=start + offsets < n, other=0.0))
    tl.store(output_ptr, tl.sqrt(tl.sum(total)))


def add(x, y):
    output = torch.empty_like(x)
    triton_call(
        x,
        y,
        output,
        x.numel(),
        kernel=add_kernel,
        grid=lambda meta: (-(-x.numel() // meta["BLOCK_SIZE"]),),
        BLOCK_SIZE=8,
    )
    return output


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("size", [1, 8, 19])
def test_guide_example__equals_torch(device, size):
    x = torch.arange(size, dtype=torch.int64, device=device)
    y = torch.randint(-5, 5, (size,), device=device)
    assert torch.equal(add(x, y), x + y)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_kernel__with_device_functions_reductions_and_launch_options(device):
    x = torch.randn(1000, device=device)
    out = torch.full((1,), float("nan"), device=device)
    triton_call(x, out, 1000, kernel=norm_kernel, grid=(1,), BLOCK=128, num_warps=2, num_stages=1)
    torch.testing.assert_close(out[0], x.norm())  # 1000 squares in float32: the default tolerance, 1.3e-6


@pytest.mark.parametrize("device_type", ["cpu", GPU])
def test_relaunch__with_other_arguments(device_type):
    """A cached launch must not be reused for arguments that need another kernel."""
    count = torch.cuda.device_count() if device_type == "cuda" else 1
    for device in [torch.device(device_type, index) for index in range(count)] * 2:  # device 0 stays current
        for dtype in (torch.float32, torch.float16, torch.int64):
            for first, size in ((0, 63), (0, 64), (0, 1), (1, 63), (3, 16)):  # offsets 1 and 3 are unaligned
                x, y = torch.randint(-9, 9, (2, 64), device=device).to(dtype)[:, first : first + size]
                assert torch.equal(add(x, y), x + y), (device, dtype, first, size)
                for factor in (2.0, 3, 0.5, 3.0):
                    out = torch.empty_like(x, dtype=torch.float32)
                    triton_call(x, out, factor, size, kernel=scale_kernel, grid=(1,), BLOCK=64)
                    assert torch.equal(out, x.float() * factor), (device, dtype, first, size, factor)


@pytest.mark.gpu
def test_bind__relaunches_on_other_tensors():
    x, y, z = torch.randn(3, 1000, device="cuda")
    out, again = torch.empty(2, 1000, device="cuda")
    launch = bind(x, y, out, 1000, kernel=add_kernel, grid=(4,), BLOCK_SIZE=256)
    launch(x, z, again)
    assert torch.equal(out, x + y) and torch.equal(again, x + z)


def test_interpreter__restores_triton():
    spaces = (tl, tl.core, tl.tensor, tl.math, tl.dtype, type(add_kernel))
    before = [dict(vars(space)) for space in spaces]
    names = set(globals())
    add(torch.ones(3), torch.ones(3))
    assert [dict(vars(space)) for space in spaces] == before
    assert set(globals()) == names


INTERPRETED_FIRST = """
import torch, triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from vitkernels.bridge.triton import triton_call

@triton.jit
def first_kernel(x, out_ptr, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, x.load([0]), mask=at < min(n, SIZE))

x, out = torch.ones(32), torch.zeros(32)
triton_call(TensorDescriptor.from_tensor(x, [16]), out, 8, kernel=first_kernel, grid=(1,), SIZE=16)
assert out.sum() == 8
types = {"x": "tensordesc<fp32[16]>", "out_ptr": "*fp32", "n": "i32", "SIZE": "constexpr"}
source = triton.compiler.ASTSource(first_kernel, types, constexprs={(3,): 16})
assert "ptx" in triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32)).asm
"""


def test_compiler__works_after_the_interpreter(tmp_path):
    """Run in a new process, where the first kernel is interpreted before Triton's compiler is imported."""
    (tmp_path / "kernel.py").write_text(INTERPRETED_FIRST)  # a file, because Triton reads a kernel's source
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, tmp_path / "kernel.py"], check=True, env=environment)


@pytest.mark.gpu
def test_compiled_graph__on_cuda():
    x, y = torch.randn(2, 1000, device="cuda")
    compiled = torch.compile(lambda x, y: add(x.sin(), y) * 2, fullgraph=True)
    torch.testing.assert_close(compiled(x, y), (x.sin() + y) * 2)


@pytest.mark.gpu
def test_triton_op__on_cuda():
    op = torch.library.triton_op("vitkernels_test::add", add_op, mutates_args=())
    x, y = torch.randn(2, 1000, device="cuda")
    torch.testing.assert_close(op(x, y), x + y)
    torch.testing.assert_close(torch.compile(op, fullgraph=True)(x, y), x + y)


def add_op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return add(x, y)


def test_compiled_graph_on_the_cpu__breaks_and_is_correct():
    x, y = torch.randn(2, 19)
    compiled = torch.compile(lambda x, y: add(x.sin(), y) * 2, backend="eager")
    torch.testing.assert_close(compiled(x, y), (x.sin() + y) * 2)


def test_invalid_arguments__raise():
    x = torch.ones(3)
    with error("bridge.device", device="xla"):
        triton_call(SimpleXla(), kernel=add_kernel, grid=(1,))
    with error("bridge.mixed_devices", devices=["cpu", "meta"]):
        triton_call(x, x.to("meta"), kernel=add_kernel, grid=(1,))
    with error("bridge.device", device="meta"):
        triton_call(x.to("meta"), kernel=add_kernel, grid=(1,))
    with error("bridge.interpreter_bfloat16"):
        add(x.bfloat16(), x.bfloat16())
    with error("bridge.no_tensor"):
        triton_call(3, kernel=add_kernel, grid=(1,))


class SimpleXla(torch.Tensor):
    """A stand-in for an XLA tensor, so that the test does not need torch_xla."""

    device = SimpleNamespace(type="xla")


def test_jax_arrays__go_through_jax_triton(monkeypatch):
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones(4)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with error("bridge.missing_package", package="jax-triton"):
        triton_call(x, x, out, 4, kernel=add_kernel, grid=(1,), BLOCK_SIZE=8)

    calls = []
    fake = ModuleType("jax_triton")
    fake.triton_call = lambda *args, **keywords: calls.append((args, keywords)) or ["made"]
    monkeypatch.setitem(sys.modules, "jax_triton", fake)
    assert triton_call(x, x, out, 4, kernel=add_kernel, grid=(1,), BLOCK_SIZE=8) == "made"
    (args, keywords), *_ = calls
    assert len(args) == 2 and keywords == {
        "kernel": add_kernel, "out_type": (out,), "grid": (1,), "n_elements": 4, "BLOCK_SIZE": 8
    }  # fmt: skip
    with error("bridge.jax_output_order"):
        triton_call(x, out, x, 4, kernel=add_kernel, grid=(1,), BLOCK_SIZE=8)
    with error("bridge.jax_outputs"):
        triton_call(x, x, x, 4, kernel=add_kernel, grid=(1,), BLOCK_SIZE=8)
