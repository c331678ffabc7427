"""The Gluon kernels of triton_flash on Hopper: compiled without a GPU, and run on one."""

import re
import subprocess

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

import triton

from vitkernels import attention
from vitkernels.attention.triton_flash.hopper import launch
from vitkernels.attention.triton_flash.inputs import FlashInputs
from vitkernels.testing.attention_reference import TOLERANCE

needs_gluon = pytest.mark.skipif(
    not triton.__version__.startswith(launch._GLUON_VERSION),
    reason=f"the kernels need triton {launch._GLUON_VERSION}*, this is {triton.__version__}",
)


def gpu(test):
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return pytest.mark.gpu(pytest.mark.skipif(not is_hopper, reason="needs a Hopper GPU")(needs_gluon(test)))


# --- without a GPU ----------------------------------------------------------------------------------------------------

KERNELS = {"forward": launch.FORWARD, "dq": launch.DQ, "dkdv": launch.DKDV}
SIZES = [(name, width, sizes) for name, kernel in KERNELS.items() for width, sizes in kernel.sizes.items()]


def signature(name: str, width: int, tile: int, dtype: str) -> dict[str, str]:
    """Return the types of a kernel's run-time parameters."""
    from triton.experimental.gluon import language as gl

    def descriptor(rows):
        block = [1, 1, rows, width]
        layout = gl.NVMMASharedLayout.get_default_for(block, {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype])
        return f"tensordesc<{dtype}{block},{layout!r}>"

    queries, keys = (64, tile) if name != "dkdv" else (tile, 64)
    rows = {"forward": ["out"], "dq": ["out", "dq"], "dkdv": ["dk", "dv"]}[name]
    types = {"q_desc": queries, "do_desc": queries, "k_desc": keys, "v_desc": keys}
    types = {parameter: descriptor(block) for parameter, block in types.items()}
    types |= {f"{x}_ptr": f"*{dtype}" for x in rows} | {"lse_ptr": "*fp32", "delta_ptr": "*fp32"}
    types |= {f"{x}_{dimension}": "i32" for x in rows for dimension in "bhn"}
    return types | {"H": "i32", "N": "i32", "M": "i32", "head_dim": "i32", "scale": "fp32", "factor": "fp32"}


@needs_gluon
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name, width, sizes", SIZES, ids=[f"{name}-{width}" for name, width, _ in SIZES])
def test_kernels__serialize_no_products_and_spill_no_registers(name, width, sizes, dtype, tmp_path):
    """Both would be slow, and no test of results notices them."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from vitkernels.attention.triton_flash.hopper import backward, forward

    kernel = {"forward": forward.forward_kernel, "dq": backward.dq_kernel, "dkdv": backward.dkdv_kernel}[name]
    constants = {"WARPGROUPS": sizes.warpgroups, "TILE": sizes.tile, "D": width, "STAGES": sizes.stages}
    types = {x: signature(name, width, sizes.tile, dtype).get(x, "constexpr") for x in kernel.arg_names}
    assert {x for x, kind in types.items() if kind == "constexpr"} == set(constants)
    source = GluonASTSource(
        kernel,
        types,
        constexprs={(kernel.arg_names.index(x),): value for x, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    (tmp_path / "kernel.ptx").write_text(compiled.asm["ptx"])
    command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    report = done.stdout + done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills and set(spills) == {("0", "0")}, report
    assert "serialized" not in report, report


def inputs(N=4096, M=4096, D=64, dtype=torch.bfloat16, scale=0.1, **extras):
    q, k, v = (torch.empty(2, 3, n, D, dtype=dtype, device="meta") for n in (N, M, M))
    defaults = {"bias": None, "mask": None, "segment_ids": None, "is_causal": False, "scale": scale}
    return FlashInputs(q, k, v, **defaults | extras)


@pytest.mark.parametrize(
    "call, kernels",
    [
        ({}, "forward dkdv"),
        ({"D": 56}, "forward dkdv"),
        ({"N": 1536}, "dkdv"),
        ({"N": 896}, ""),
        ({"M": 896}, ""),
        ({"D": 128, "N": 513}, "forward dq dkdv"),
        ({"D": 104, "N": 700, "M": 600}, "forward dq dkdv"),
        ({"D": 128, "N": 385}, "dq dkdv"),
        ({"D": 128, "N": 384}, ""),
        ({"D": 96, "N": 313, "M": 313}, "dkdv"),
        ({"D": 96}, "forward dq dkdv"),
        ({"D": 80}, "dq dkdv"),
        ({"D": 40}, "forward dq dkdv"),
        ({"D": 136}, ""),
        ({"D": 32}, ""),
        ({"dtype": torch.float32}, ""),
        ({"is_causal": True}, ""),
        ({"mask": torch.ones(1, dtype=torch.uint8)}, ""),
    ],
    ids=str,
)
def test_choice__by_length_head_dim_and_what_the_call_has(call, kernels, monkeypatch):
    monkeypatch.setattr(launch, "_are_supported", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert [name for name, kernel in KERNELS.items() if launch.sizes_for(kernel, inputs(**call))] == kernels.split()


def test_choice__not_for_rows_that_expand_repeats(monkeypatch):
    monkeypatch.setattr(launch, "_are_supported", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    call = inputs()
    assert launch.sizes_for(launch.DKDV, call, torch.empty(2, 3, 4096, 64, device="meta"))
    for shape in ((1, 3, 4096, 64), (2, 1, 4096, 64), (2, 3, 1, 64)):
        assert launch.sizes_for(launch.DKDV, call, torch.empty(shape, device="meta").expand(2, 3, 4096, 64)) is None


def test_choice__by_version_of_triton_and_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for version, supported in (("3.6.0", True), ("3.6.1", True), ("3.5.0", False), ("3.7.0", False)):
        launch._are_supported.cache_clear()
        monkeypatch.setattr(triton, "__version__", version)
        assert launch._are_supported(0) is supported
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        launch._are_supported.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert not launch._are_supported(0)
    launch._are_supported.cache_clear()


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch):
    """Record which kernels of this package ran."""
    seen, run = [], launch._launch
    monkeypatch.setattr(launch, "_launch", lambda kernel, *args: seen.append(kernel.__name__) or run(kernel, *args))
    return seen


def draw(N, M, D, dtype=torch.bfloat16, B=2, H=3):
    return [torch.randn(B, H, n, D, device="cuda").to(dtype).requires_grad_() for n in (N, M, M)]


def with_gradients(function, q, k, v, do):
    out = function(q, k, v)
    return out, *torch.autograd.grad(out, (q, k, v), do)


def exact(q, k, v, do, scale):
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, scale=scale)
    return out.detach(), *torch.autograd.grad(out, leaves, do.double())


def error(x, y):
    return ((x.double() - y).norm() / y.norm()).item()


ALL = ["forward_kernel", "dq_kernel", "dkdv_kernel"]
AT_64 = ["forward_kernel", "dkdv_kernel"]


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "N, M, D, kernels",
    [
        *((4096, 4096, 64, AT_64), (2304, 2304, 64, AT_64), (2305, 1611, 64, AT_64), (2111, 2305, 56, AT_64)),
        *((1025, 1025, 64, AT_64[1:]), (1370, 1100, 56, AT_64[1:]), (900, 1025, 40, ALL), (1025, 2000, 48, ALL)),
        *((777, 1025, 72, ALL[1:]), (1025, 777, 80, ALL[1:]), (577, 577, 88, ALL[1:]), (2305, 2100, 96, ALL)),
        *((313, 313, 96, ALL[2:]), (577, 577, 128, ALL), (513, 2305, 128, ALL), (1025, 600, 104, ALL)),
        *((400, 385, 120, ALL[1:]), (640, 640, 112, ALL), (4096, 4096, 128, ALL)),
    ],
)
def test_results__near_float64_and_equal_from_run_to_run(N, M, D, kernels, dtype, ran):
    q, k, v = draw(N, M, D, dtype)
    do = torch.randn_like(q)
    results, again = (with_gradients(attention.get("triton_flash"), q, k, v, do) for _ in range(2))
    assert ran == [name for name in ALL if name in kernels] * 2
    for x, y, z in zip(results, exact(q, k, v, do, D**-0.5), again, strict=True):
        assert error(x, y) < TOLERANCE[dtype]
        assert torch.equal(x, z)


@gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("scale", [1e-12, 0.02, 3.0])
def test_results__at_any_scale(D, scale, ran):
    q, k, v = draw(2305, 2305, D)
    do = torch.randn_like(q)
    results = with_gradients(lambda *x: attention.get("triton_flash")(*x, scale=scale), q, k, v, do)
    assert ran == (ALL if D == 128 else AT_64)
    for x, y in zip(results, exact(q, k, v, do, scale), strict=True):
        assert error(x, y) < TOLERANCE[torch.bfloat16] if y.norm() > 1e-6 else x.norm() < 1e-6


@gpu
@pytest.mark.parametrize("D", [64, 128])
def test_nan__stays_in_its_head(D, ran):
    q, k, v = draw(2305, 2305, D)
    do = torch.randn_like(q)
    clean = with_gradients(attention.get("triton_flash"), q, k, v, do)
    with torch.no_grad():
        for x in (q, k, v):
            x[0, 1] = torch.nan
            x[1, 0, :5] = torch.inf
    do[0, 1] = torch.nan
    for x, y in zip(with_gradients(attention.get("triton_flash"), q, k, v, do), clean, strict=True):
        assert x[0, 1].isnan().all()
        for b, h in ((0, 0), (0, 2), (1, 1), (1, 2)):
            assert torch.equal(x[b, h], y[b, h])
    assert len(ran) == (6 if D == 128 else 4)


@gpu
@pytest.mark.parametrize("D", [64, 128])
def test_packed__gradients_of_strided_and_expanded_outputs(D):
    """The kernels for all GPUs run where the TMA unit cannot read the gradient."""
    qkv = torch.randn(1, 2305, 3, 2, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaf = qkv.detach().double().requires_grad_()
    q, k, v = leaf.permute(2, 0, 3, 1, 4).unbind(0)
    wanted = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    weight = torch.randn(2 * D, device="cuda", dtype=torch.bfloat16)
    for reduce in (
        lambda out: out.sum(),
        lambda out: (out.mean(1) * weight.to(out.dtype)).sum(),
        lambda out: out[:, ::2, ::3].sum(),
    ):
        out = attention.get("triton_flash").qkvpacked(qkv)
        (x,), (y,) = torch.autograd.grad(reduce(out), qkv), torch.autograd.grad(reduce(wanted), leaf, retain_graph=True)
        assert error(x, y) < 2 * TOLERANCE[torch.bfloat16]  # sums of out's gradient cancel


@gpu
@pytest.mark.parametrize("D", [64, 128])
def test_launch__on_a_stream_in_a_cuda_graph_and_compiled(D):
    attend = attention.get("triton_flash").qkvpacked
    data = torch.randn(2, 2304, 3, 4, D, device="cuda", dtype=torch.bfloat16)
    do = torch.randn(2, 2304, 4 * D, device="cuda", dtype=torch.bfloat16)

    def both(attend):
        qkv = data.detach().requires_grad_()
        out = attend(qkv)
        return out, *torch.autograd.grad(out, qkv, do)

    expected = both(attend)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        both(attend)
        torch.cuda._sleep(20_000_000)  # an unsynchronized kernel reads stale memory
        again = both(attend)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = both(attend)
    graph.replay()
    compiled = both(torch.compile(attend, fullgraph=True))
    for results in (again, replayed, compiled):
        assert all(map(torch.equal, results, expected))
