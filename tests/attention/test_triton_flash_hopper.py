"""The Gluon kernels of triton_flash on Hopper: compiled without a GPU, and run on one."""

import re
import subprocess

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

import triton

from vitkernels import attention
from vitkernels.attention.triton_flash import launch as triton_launch
from vitkernels.attention.triton_flash import operators
from vitkernels.attention.triton_flash.hopper import launch
from vitkernels.attention.triton_flash.inputs import FlashInputs
from vitkernels.bridge import triton as bridge
from vitkernels.cli import doctor
from vitkernels.testing.attention_reference import TOLERANCE

needs_gluon = pytest.mark.skipif(
    launch.limitation() is not None, reason=f"the kernels need Triton {launch._TRITON}, this is {triton.__version__}"
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
@pytest.mark.parametrize("dtype, divisible", [("bf16", 16), ("fp16", 8)])
@pytest.mark.parametrize("name, width, sizes", SIZES, ids=[f"{name}-{width}" for name, width, _ in SIZES])
def test_kernels__serialize_no_products_and_spill_no_registers(name, width, sizes, dtype, divisible, tmp_path):
    """Both would be slow, and no test of results notices them.

    divisible: of strides and head dim. Triton compiles another variant for multiples of 16.
    """
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
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, (x, kind) in enumerate(types.items())
            if kind.startswith("*") or (divisible == 16 and (x[-2:] in ("_b", "_h", "_n") or x == "head_dim"))
        },
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    (tmp_path / "kernel.ptx").write_text(compiled.asm["ptx"])
    command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    report = done.stdout + done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills and set(spills) == {("0", "0")}, report
    assert "serialized" not in report, report


def inputs(N=4096, M=4096, D=64, B=32, dtype=torch.bfloat16, **extras):
    q, k, v = (torch.empty(B, 3, n, D, dtype=dtype, device="meta") for n in (N, M, M))
    defaults = {"bias": None, "mask": None, "segment_ids": None, "is_causal": False, "scale": 0.1}
    return FlashInputs(q, k, v, **defaults | extras)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(launch, "_are_supported", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)


def chosen(kernel, call, *others):
    owned = call.k if kernel is launch.DKDV else call.q
    return launch.sizes_if_supported(kernel, call, owned, *others)


IDS = torch.zeros(32, 4096, dtype=torch.int32)


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
        ({"dtype": torch.float16}, "forward dkdv"),
        ({"dtype": torch.float32}, ""),
        ({"B": 0}, ""),
        ({"is_causal": True}, ""),
        ({"mask": torch.ones(1, dtype=torch.uint8)}, ""),
        ({"bias": torch.ones(1)}, ""),
        ({"segment_ids": IDS}, ""),
        ({"segment_ids": IDS, "segment_tiles": torch.zeros(32, 9, 4, dtype=torch.int32)}, ""),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(f"{k}={'' if torch.is_tensor(v) else v}" for k, v in x.items()),
)
def test_choice__by_length_head_dim_and_what_the_call_has(call, kernels, on_hopper):
    assert [name for name, kernel in KERNELS.items() if chosen(kernel, inputs(**call))] == kernels.split()


@pytest.mark.parametrize(
    "heads, tokens, expected",
    [(12, 2304, False), (6, 4096, True), (32, 1370, True), (1, 4096, False), (18, 4096, True)],
)
def test_choice__by_use_of_the_multiprocessors(heads, tokens, expected, on_hopper):
    """(1, 12, 2304, 64) would need two turns of 132 programs for 144; it takes 1.28 times as long."""
    q = torch.empty(1, heads, tokens, 64, dtype=torch.bfloat16, device="meta")
    call = FlashInputs(q, q, q, None, None, None, False, 0.1)
    assert (chosen(launch.DKDV, call) is not None) is expected


def test_choice__not_for_rows_that_expand_repeats(on_hopper):
    call = inputs()
    assert chosen(launch.DKDV, call, torch.empty(32, 3, 4096, 64, device="meta"))
    for shape in ((1, 3, 4096, 64), (32, 1, 4096, 64), (32, 3, 1, 64)):
        do = torch.empty(shape, device="meta").expand(32, 3, 4096, 64)
        assert chosen(launch.DKDV, call, do) is None


def test_choice__not_with_requested_tiles_nor_interpreted(monkeypatch):
    """Only a pass of which no tiles are requested asks whether a kernel for Hopper runs it."""
    asked = []
    monkeypatch.setattr(triton_launch, "_bound", {})
    monkeypatch.setattr(triton_launch, "_is_interpreted", lambda kernel, device: is_interpreted)
    monkeypatch.setattr(triton_launch, "launch_fitting", lambda tiles, launch: None)
    monkeypatch.setattr(triton_launch, "triton_call", lambda *args, **constexprs: None)
    monkeypatch.setattr(triton_launch, "bind", lambda *args, **constexprs: None)
    call = inputs()
    out, lse = torch.empty_like(call.q), torch.empty(32, 3, 4096, device="meta")
    for is_interpreted, sizes in ((False, ()), (False, (64, 32, 0, 0, 0, 0)), (True, ())):
        monkeypatch.setattr(
            triton_launch.hopper, "forward", lambda *args, case=(is_interpreted, sizes): asked.append(case)
        )
        triton_launch.forward(call, out, lse, sizes)
    assert asked == [(False, ())]


@pytest.fixture
def not_cached():
    launch._are_supported.cache_clear()
    yield
    launch._are_supported.cache_clear()


@pytest.mark.parametrize("version, expected", [("3.6.0", True), ("3.6.1", True), ("3.5.0", False), ("3.7.0", False)])
def test_choice__by_version_of_triton(version, expected, monkeypatch, not_cached):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(triton, "__version__", version)
    assert launch._are_supported(0) is expected


def test_doctor__names_the_version_that_the_kernels_need(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(doctor, "devices", list)
    monkeypatch.setattr(triton, "__version__", "3.5.0")
    doctor.main([])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("attn=triton_flash"))
    assert line.endswith(", without kernels for long sequences on Hopper, which need Triton 3.6; found 3.5.0")
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert attention.get("triton_flash").limitation() is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(triton, "__version__", "3.5.0")
    assert attention.get("triton_flash").limitation() is None


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_choice__not_on_other_gpus(capability, monkeypatch, not_cached):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert not launch._are_supported(0)


@pytest.mark.parametrize("shape", [(1, 1, 5, 64), (2, 1, 5, 64), (1, 3, 5, 64), (2, 3, 5, 40)])
def test_tma_strides__are_multiples_of_16_bytes(shape):
    x = torch.empty(*shape, dtype=torch.bfloat16)
    odd = x.as_strided(shape, [stride if size > 1 else 1 for size, stride in zip(shape, x.stride(), strict=True)])
    strides = launch._tma_strides(odd)
    assert strides[-1] == 1 and all(stride > 0 and stride % 8 == 0 for stride in strides[:-1])
    assert all(a == b for a, b, size in zip(strides, x.stride(), shape, strict=True) if size > 1)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch):
    """Record which kernels of this package ran, however few programs they have."""
    seen = []
    monkeypatch.setattr(launch, "_LEAST_USE", 0)
    monkeypatch.setattr(triton_launch, "_bound", {})
    monkeypatch.setattr(operators, "_forward_launches", {})
    monkeypatch.setattr(operators, "_backward_launches", {})

    def bind(*args, kernel, **constexprs):
        seen.append(kernel.__name__)
        run = bridge.bind(*args, kernel=kernel, **constexprs)
        return lambda *tensors: seen.append(kernel.__name__) or run(*tensors)

    monkeypatch.setattr(launch, "bind", bind)
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
        assert error(x, y) < TOLERANCE[torch.bfloat16]


@gpu
@pytest.mark.parametrize("B, H", [(1, 1), (3, 1), (1, 5)])
@pytest.mark.parametrize("D", [40, 64, 120])
def test_results__of_one_image_or_head(B, H, D, ran):
    q, k, v = draw(1601, 1601, D, B=B, H=H)
    do = torch.randn_like(q)
    results = with_gradients(attention.get("triton_flash"), q, k, v, do)
    assert ran == (AT_64 if D == 64 else ALL)
    for x, y in zip(results, exact(q, k, v, do, D**-0.5), strict=True):
        assert error(x, y) < TOLERANCE[torch.bfloat16]


@gpu
@pytest.mark.parametrize(
    "N, M, D", [(2305, 1601, 64), (1601, 2305, 64), (1025, 900, 40), (577, 700, 128), (600, 513, 104)]
)
def test_stores__stay_within_their_tensors(N, M, D, ran):
    """Each result lies between rows of a larger tensor, which must keep their values."""

    def framed(*shape, dtype=torch.bfloat16):
        size = torch.Size(shape).numel()
        memory = torch.full((size + 2 * MARGIN,), 7.0, device="cuda", dtype=dtype)
        memories.append((memory, size))
        return memory[MARGIN : MARGIN + size].view(shape)

    B, H, MARGIN, memories = 1, 2, 64 * 1024, []
    q, k, v = (x.detach() for x in draw(N, M, D, B=B, H=H))
    out, dq, dk, dv = (framed(B, n, H, D).transpose(1, 2) for n in (N, N, M, M))
    lse, delta = (framed(B, H, N, dtype=torch.float32) for _ in range(2))
    do = torch.randn_like(out)
    call = FlashInputs.of(q, k, v, None, None, None, False, D**-0.5)
    triton_launch.forward(call, out, lse)
    triton_launch.dq_pass(call, out, lse, do, delta, dq, None)
    triton_launch.dkdv_pass(call, lse, do, delta, dk, dv)
    assert ran == (AT_64 if D == 64 else ALL)
    for memory, size in memories:
        assert (memory[:MARGIN] == 7).all() and (memory[MARGIN + size :] == 7).all()
    for x, y in zip((out, dq, dk, dv), exact(q, k, v, do, D**-0.5), strict=True):
        assert error(x, y) < TOLERANCE[torch.bfloat16]


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
def test_gradients__of_an_expanded_output_gradient(D, ran):
    """The kernels for all GPUs compute the gradients: the TMA unit cannot read rows without strides."""
    q, k, v = draw(2305, 2305, D)
    weight = torch.randn(D, device="cuda").to(torch.bfloat16)
    do = weight.expand(2, 3, 2305, D)  # of a sum over tokens
    results = with_gradients(attention.get("triton_flash"), q, k, v, do)
    assert ran == ["forward_kernel"]
    for x, y in zip(results, exact(q, k, v, do, D**-0.5), strict=True):
        assert error(x, y) < TOLERANCE[torch.bfloat16]


@gpu
@pytest.mark.parametrize("D", [64, 128])
def test_launch__on_a_stream_in_a_cuda_graph_and_compiled(D, ran):
    attend = attention.get("triton_flash").qkvpacked
    data = torch.randn(2, 2304, 3, 4, D, device="cuda", dtype=torch.bfloat16)
    do = torch.randn(2, 2304, 4 * D, device="cuda", dtype=torch.bfloat16)

    def both(attend, data):
        qkv = data.detach().requires_grad_()
        out = attend(qkv)
        return out, *torch.autograd.grad(out, qkv, do)

    expected = both(attend, data)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(data)
        torch.cuda._sleep(20_000_000)  # a kernel on another stream would read zeros
        late.copy_(data)
        again = both(attend, late)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = both(attend, data)
    graph.replay()
    compiled = both(torch.compile(attend, fullgraph=True), data)
    assert ran == (ALL if D == 128 else AT_64) * 4
    for results in (again, replayed, compiled):
        assert all(map(torch.equal, results, expected))
