"""Conformance suite of swiglu_norm: every backend against float64, with all gradients."""

import pytest
import torch
from backend_devices import each_backend_and_device
from expecting import error

from vitkernels.ops import swiglu_norm
from vitkernels.ops.swiglu_norm import BACKENDS

NORM = ("weight_F", "bias_F")


def make(device, shape, dtype, extras):
    """Return x and the extras; x is far from zero, so that the norm's mean and variance matter."""
    F = shape[-1] // 2
    draw = {
        "x": 2 * torch.randn(shape) + 1,
        "weight_F": torch.randn(F),
        "bias_F": torch.randn(F),
        "linear_bias_G": torch.randn(2 * F),
    }
    return {k: v.to(device, dtype if k == "x" else torch.float32) for k, v in draw.items() if k in ("x", *extras)}


def exact(x, weight_F=None, bias_F=None, linear_bias_G=None, eps=1e-6, gate_last=False):
    """Compute the op in float64, independently of the package."""
    total = x if linear_bias_G is None else x + linear_bias_G
    F = x.shape[-1] // 2
    first, second = total[..., :F], total[..., F:]
    gate, value = (second, first) if gate_last else (first, second)
    hidden = gate / (1 + (-gate).exp()) * value
    if weight_F is None:
        return hidden
    centred = hidden - hidden.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight_F + bias_F


def output_and_gradients(call, tensors, d_out):
    leaves = {k: v.detach().clone().requires_grad_() for k, v in tensors.items()}
    out = call(**leaves)
    grads = torch.autograd.grad(out, [*leaves.values()], d_out.to(out))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def relative_error(got, want):
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-300))


# float32 sums of F terms have a relative error of about 1e-6; bfloat16 rounds the output and its gradient by 0.17 %.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 6e-3, torch.float16: 6e-4}


def check(device, backend, shape, extras, dtype, **settings):
    torch.manual_seed(0)
    tensors = make(device, shape, dtype, extras)
    d_out = torch.randn(*shape[:-1], shape[-1] // 2, device=device).to(dtype)
    got = output_and_gradients(lambda **t: swiglu_norm(**t, backend=backend, **settings), tensors, d_out)
    wide = {k: v.double() for k, v in tensors.items()}
    want = output_and_gradients(lambda **t: exact(**t, **settings), wide, d_out.double())
    assert got["out"].dtype == dtype and got["x"].dtype == dtype
    errors = {name: relative_error(got[name], want[name]) for name in want}
    assert max(errors.values()) < TOLERANCE[dtype], errors


@each_backend_and_device(BACKENDS)
@pytest.mark.parametrize("shape", [(2, 5, 96), (3, 2, 400), (1, 3, 2, 1364), (7, 4096)], ids=str)
@pytest.mark.parametrize("extras", [(), NORM, ("linear_bias_G",), (*NORM, "linear_bias_G")], ids=len)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_swiglu_norm__matches_float64(device, backend, shape, extras, dtype):
    check(device, backend, shape, extras, dtype)


@each_backend_and_device(BACKENDS)
def test_swiglu_norm__takes_the_gates_last_and_another_eps(device, backend):
    check(device, backend, (67, 48), (*NORM, "linear_bias_G"), torch.float16, gate_last=True, eps=1e-2)


@pytest.mark.parametrize("name", BACKENDS.names())
def test_swiglu_norm__returns_autocasts_dtype_and_accepts_an_empty_batch(name):
    tensors = make("cpu", (0, 5, 32), torch.float32, (*NORM, "linear_bias_G"))
    leaves = {k: v.requires_grad_() for k, v in tensors.items()}
    with torch.autocast("cpu", torch.bfloat16):
        out = swiglu_norm(**leaves, backend=name)
    assert out.dtype == torch.bfloat16 and out.shape == (0, 5, 16)
    out.sum().backward()
    assert not leaves["linear_bias_G"].grad.any()


def test_swiglu_norm__is_bitwise_reproducible_and_compiles_to_one_graph():
    tensors = make("cpu", (9, 64), torch.float32, (*NORM, "linear_bias_G"))
    d_out = torch.randn(9, 32)

    def call(**given):
        return swiglu_norm(**given, backend="triton")

    first = output_and_gradients(call, tensors, d_out)
    again = output_and_gradients(call, tensors, d_out)
    compiled = output_and_gradients(torch.compile(call, fullgraph=True, backend="aot_eager"), tensors, d_out)
    for name, value in first.items():
        assert torch.equal(value, again[name]) and torch.equal(value, compiled[name]), name


def test_swiglu_norm__backward_has_fewer_stages_where_shared_memory_is_small(monkeypatch):
    from triton.runtime.errors import OutOfResources

    from vitkernels.ops.swiglu_norm import triton as module

    tried, launch = [], module.triton_call

    def launch_on_small_gpu(*args, **options):
        if "STAGES" in options:
            tried.append(options["STAGES"])
            if options["STAGES"] > 1:
                raise OutOfResources(294_968, 101_376, "shared memory")
        launch(*args, **options)

    monkeypatch.setattr(module, "triton_call", launch_on_small_gpu)
    check("cpu", "triton", (4, 96), (*NORM, "linear_bias_G"), torch.float32)
    assert tried == [3, 2, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("F", [5461, 8192])
def test_swiglu_norm__with_the_longest_rows_on_gpu(F, dtype):
    """Their backward pass with three stages would need up to 401 KB of shared memory; Hopper has 227."""
    check("cuda", "triton", (300, 2 * F), (*NORM, "linear_bias_G"), dtype)


@pytest.mark.parametrize(
    "change,code,fields",
    [
        ({"x": torch.zeros(2, 5, 33)}, "shape", {"argument": "x"}),
        ({"x": torch.zeros(2, 5, 32, dtype=torch.int64)}, "dtype", {"argument": "x"}),
        ({"weight_F": torch.zeros(15)}, "shape", {"argument": "weight"}),
        ({"linear_bias_G": torch.zeros(16)}, "shape", {"argument": "linear_bias"}),
        ({"bias_F": None}, "half_a_norm", {}),
        ({"weight_F": torch.zeros(16, device="meta")}, "device", {"argument": "weight"}),
    ],
    ids=str,
)
def test_swiglu_norm__refuses_invalid_arguments(change, code, fields):
    tensors = make("cpu", (2, 5, 32), torch.float32, (*NORM, "linear_bias_G"))
    with error(f"ops.swiglu_norm.{code}", **fields):
        swiglu_norm(**{**tensors, **change})


def test_swiglu_norm__by_triton_refuses_float64_and_long_rows():
    with error("registry.unsupported"):
        swiglu_norm(torch.zeros(2, 32).double(), backend="triton")
    with error("registry.unsupported"):
        swiglu_norm(torch.zeros(1, 32_768), backend="triton")
