"""The Mosaic-GPU kernels on a Hopper GPU, in calls that the conformance suite lacks."""

import pytest
import torch
from hopper import error, exact_attention
from torch.nn import functional as F

from vitkernels import attention
from vitkernels.testing.attention_reference import TOLERANCE, reference

hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


def gpu(test):
    for mark in hopper:
        test = mark(test)
    return test


def check_gradients(B, H, N, M, D, dtype):
    """Compare gradients with float64, and with a second run, which must give the same bits."""
    q, k, v = (torch.randn(B, H, n, D, device="cuda").to(dtype).requires_grad_() for n in (N, M, M))
    out = attention.get("pallas_flash")(q, k, v, scale=0.1)
    do = torch.randn_like(out)
    grads, again = (torch.autograd.grad(out, (q, k, v), do, retain_graph=True) for _ in range(2))
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(*leaves, scale=0.1)
    for x, y, z in zip(grads, again, torch.autograd.grad(exact, leaves, do.double()), strict=True):
        assert torch.equal(x, y)
        assert error(x, z) < TOLERANCE[dtype] if z.norm() > 1e-6 else x.norm() < 1e-3


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N, M", [(50, 70), (129, 17), (577, 1200)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_cross_attention__on_gpu(N, M, is_causal, dtype):
    q, k, v = (torch.randn(2, 3, n, 64, device="cuda").to(dtype).requires_grad_() for n in (N, M, M))
    out = attention.get("pallas_flash")(q, k, v, is_causal=is_causal, scale=0.1)
    do = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), do)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, scale=0.1)
    for x, y in zip((out, *grads), (exact, *torch.autograd.grad(exact, leaves, do.double())), strict=True):
        assert error(x, y) < TOLERANCE[dtype]


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "N, M, D",
    [
        *((100, 256, 64), (300, 300, 48), (350, 350, 64), (577, 577, 64), (552, 552, 64), (1025, 1025, 64)),
        *((40, 1601, 64), (2304, 2304, 56), (257, 257, 64), (100, 400, 64)),
        *((100, 256, 128), (300, 300, 104), (577, 577, 128), (1025, 1025, 112), (257, 257, 128), (2304, 2304, 120)),
        (70, 2305, 128),
    ],
)
def test_overlapped_forward__on_gpu(N, M, D, dtype):
    """The calls process their tiles in each order of OverlappedForward."""
    q, k, v = (torch.randn(2, 9, n, D, device="cuda").to(dtype) for n in (N, M, M))
    out, again = (attention.get("pallas_flash")(q, k, v, scale=0.1) for _ in range(2))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.1)
    assert torch.equal(out, again) and error(out, exact) < TOLERANCE[dtype]


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "N, M, D",
    [
        *((n, n, 64) for n in (256, 209, 208, 201, 200, 197, 192, 172, 165, 145, 1)),
        *((150, 197, 64), (192, 208, 64), (230, 197, 64)),
        *((129, 129, 40), (196, 193, 48), (50, 70, 48), (129, 17, 64), (100, 150, 64), (250, 198, 56), (250, 140, 64)),
    ],
)
def test_short_backward__on_gpu(N, M, D, dtype):
    check_gradients(13, 50, N, M, D, dtype)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "N, M, D",
    [
        *((257, 257, 64), (264, 264, 40), (265, 265, 64), (385, 385, 48), (513, 513, 64), (1025, 1025, 64)),
        *((257, 300, 64), (300, 257, 56), (66, 66, 32), (257, 257, 80), (1025, 1025, 128)),
    ],
)
def test_backward_pair__on_gpu(N, M, D, dtype):
    """At head dims up to 64, with up to 8 tokens behind full tiles, the first step takes two tiles."""
    check_gradients(2, 70, N, M, D, dtype)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "B, H, N, D",
    # Their last tiles have 65, 89, 128, 66, 8, 128, 90, 48, 128 and 128 queries.
    [
        (5, 16, 577, 64),
        (6, 12, 601, 48),
        (5, 16, 640, 64),
        (3, 12, 1090, 64),
        (3, 12, 1160, 64),
        (3, 12, 1024, 64),
        (2, 12, 1370, 40),
        (3, 12, 1200, 64),
        (2, 8, 2304, 56),
        (3, 4, 4096, 64),
    ],
)
def test_fused_backward__on_gpu(B, H, N, D, dtype):
    """Each item adds to dq in turn, so that results are bit-equal from run to run."""
    from vitkernels.attention.pallas_flash.hopper.schedule import fused_backward_schedule

    assert fused_backward_schedule(B * H, N, N, D, False)
    qkv = torch.randn(B, N, 3, H, D, device="cuda").to(dtype).requires_grad_()
    do = torch.randn(B, N, H * D, device="cuda").to(dtype)
    out = attention.get("pallas_flash").qkvpacked(qkv)
    grads = [torch.autograd.grad(out, qkv, do, retain_graph=True)[0] for _ in range(3)]
    assert all(torch.equal(grads[0], x) for x in grads[1:])
    for b in range(B):
        _, exact, _ = exact_attention(qkv[b : b + 1].detach(), do[b : b + 1].view(1, N, H, D), D**-0.5, False)
        for i in range(3):
            assert error(grads[0][b : b + 1, :, i], exact[:, :, i]) < TOLERANCE[dtype], "qkv"[i]


@gpu
def test_fused_backward__while_another_kernel_holds_multiprocessors():
    """Blocks that start late draw what is left, so the result is the same."""
    qkv = torch.randn(2, 1090, 3, 24, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    do = torch.randn(2, 1090, 24 * 64, device="cuda", dtype=torch.bfloat16)
    out = attention.get("pallas_flash").qkvpacked(qkv)
    backward = lambda: torch.autograd.grad(out, qkv, do, retain_graph=True)[0]  # noqa: E731
    expected = backward()
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            a = (a @ a).clamp(-1, 1)
    found = [backward() for _ in range(10)]
    torch.cuda.synchronize()
    assert all(torch.equal(expected, x) for x in found)


@gpu
@pytest.mark.parametrize("of_bias", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "N, D, shape, is_causal, of_segment",
    [
        (197, 64, (1, 8), False, None),
        (144, 64, (3, 1), False, None),
        (577, 64, (1, 8), False, None),
        (700, 56, (3, 8), False, None),
        (300, 96, (1, 8), True, None),
        (577, 128, (1, 1), False, None),
        (40, 48, (1, 8), True, None),
        (577, 64, (1, 8), False, 150),
        (300, 64, (1, 8), True, None),
    ],
)
def test_bias__on_gpu(N, D, shape, is_causal, of_segment, of_bias):
    """Rows of -inf, rows whose bias absorbs their scores, and large numbers; reruns give the same bits."""
    ids = None if of_segment is None else (torch.arange(N, device="cuda") // of_segment).expand(3, N)
    bias = 3 * torch.randn(*shape, N, N, device="cuda")
    lowest = torch.finfo(of_bias).min
    bias[:, :, 5], bias[:, :, 6], bias[:, :, 7, 1::2], bias[:, :, 8, 1::2] = -torch.inf, lowest, -torch.inf, lowest
    bias[:, :, 9], bias[:, :, 10, 1::2] = 1e30, 1000.0
    bias[:, :, 11] -= 300
    bias[:, :, 12, 39] = 1000.0  # hidden by causality
    bias = bias.to(of_bias).requires_grad_()
    qkv = torch.randn(3, N, 3, 8, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    do = torch.randn(3, N, 8 * D, device="cuda", dtype=torch.bfloat16)
    results = []
    for _ in range(2):
        out = attention.get("pallas_flash").qkvpacked(qkv, bias=bias, segment_ids=ids, is_causal=is_causal, scale=0.125)
        results.append((out, *torch.autograd.grad(out, (qkv, bias), do)))
    leaves = [x.detach().double().requires_grad_() for x in (qkv, bias)]
    q, k, v = leaves[0].permute(2, 0, 3, 1, 4).unbind(0)
    exact = reference(q, k, v, bias=leaves[1], segment_ids=ids, is_causal=is_causal, scale=0.125)
    exact = exact.transpose(1, 2).flatten(2)
    for x, y, z in zip(*results, (exact, *torch.autograd.grad(exact, leaves, do.double())), strict=True):
        assert torch.equal(x, y) and error(x, z) < TOLERANCE[torch.bfloat16]


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N, D, rope_half", [(261, 64, True), (257, 64, False), (197, 88, True), (577, 40, False)])
def test_rope__on_gpu(N, D, rope_half, dtype):
    """A packed call, its rerun, the call compiled, and the call with q, k and v as views of the packed tensor."""
    from vitkernels.testing.attention_reference import rotary_table, unpacked

    backend = attention.get("pallas_flash")
    rope = rotary_table("cuda", N - 1, D, rope_half)
    qkv = torch.randn(3, N, 3, 5, D, device="cuda").to(dtype).requires_grad_()
    do = torch.randn(3, N, 5 * D, device="cuda").to(dtype)
    packed = lambda qkv: backend.qkvpacked(qkv, rope=rope, rope_half=rope_half)  # noqa: E731
    views = lambda qkv: backend(*unpacked(qkv), rope=rope, rope_half=rope_half).transpose(1, 2).flatten(2)  # noqa: E731
    leaf = qkv.detach().double().requires_grad_()
    exact = reference(*unpacked(leaf), rope=rope, rope_half=rope_half).transpose(1, 2).flatten(2)
    wanted = exact, *torch.autograd.grad(exact, leaf, do.double())
    results = []
    for attend in (packed, packed, torch.compile(packed, fullgraph=True), views):
        out = attend(qkv)
        results.append((out, *torch.autograd.grad(out, qkv, do)))
        assert all(error(x, y) < TOLERANCE[dtype] for x, y in zip(results[-1], wanted, strict=True))
    for others in results[1:3]:
        assert all(map(torch.equal, results[0], others))


@gpu
@pytest.mark.parametrize("extra", [None, "segments", "rope"])
def test_compiled_with_symbolic_sizes__on_gpu(extra):
    """All sizes, the head dim too, differ from call to call of one compiled function."""
    from vitkernels.testing.attention_reference import rotary_table

    torch._dynamo.reset()
    attend = attention.get("pallas_flash").qkvpacked
    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for N, D in ((197, 88), (300, 64), (70, 40)):
        qkv = torch.randn(2, N, 3, 4, D, device="cuda", dtype=torch.bfloat16).requires_grad_()
        do = torch.randn(2, N, 4 * D, device="cuda", dtype=torch.bfloat16)
        given = {}
        if extra == "segments":
            given = {"segment_ids": (torch.arange(N, device="cuda") // 40).expand(2, N)}
        elif extra == "rope":
            given = {"rope": rotary_table("cuda", N - 1, D, True), "rope_half": True}
        results = []
        for call in (attend, compiled):
            out = call(qkv, **given)
            results.append((out, *torch.autograd.grad(out, qkv, do)))
        assert all(map(torch.equal, *results))


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "N, M, D",
    [
        *((197, 197, 64), (256, 256, 40), (129, 250, 64), (50, 70, 64), (300, 256, 64), (100, 700, 64)),
        (100, 700, 128),
    ],
)
def test_key_masks__on_gpu(N, M, D, dtype):
    """More images and heads than thread blocks; the first images have padding, and the last one has no keys."""
    q, k, v = (torch.randn(20, 7, n, D, device="cuda").to(dtype).requires_grad_() for n in (N, M, M))
    mask = torch.rand(20, 1, 1, M, device="cuda") < 0.7
    mask[:5] = torch.arange(M, device="cuda") < 5 * M // 6
    mask[-1] = False
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = reference(*leaves, mask=mask, scale=0.1)
    do = torch.randn_like(q)
    wanted = exact, *torch.autograd.grad(exact, leaves, do.double())
    results = []
    for _ in range(2):
        out = attention.get("pallas_flash")(q, k, v, mask=mask, scale=0.1)
        results.append((out, *torch.autograd.grad(out, (q, k, v), do)))
    for x, y, z in zip(*results, wanted, strict=True):
        assert torch.equal(x, y) and error(x, z) < TOLERANCE[dtype] and not x[-1].any()


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [32, 64, 72, 128])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 49, 64, 65, 197, 324), (577, 123), (100,) * 7],
        [(1100, 1), (64,) * 17 + (13,), (300, 2, 600, 199)],
        [(10,) * 40, (400,), (128, 128, 144)],  # the first entry has too many segments for its chunks
        [(49,) * 4, (196,), (1, 67, 128)],
        [(321, 272, 65), (329, 273, 56), (16, 197, 385, 60)],  # narrow and wide last tiles
    ],
    ids=str,
)
def test_packed_segments__on_gpu(lengths, D, dtype):
    """Each chunk writes its own rows only; a rerun gives the same bits, and so does the call compiled."""
    rows = [torch.cat([torch.full((n,), 7 * i - 3) for i, n in enumerate(entry)]) for entry in lengths]
    segment_ids = torch.stack(rows).cuda()
    qkv = torch.randn(*segment_ids.shape, 3, 5, D, device="cuda").to(dtype).requires_grad_()
    do = torch.randn(*segment_ids.shape, 5 * D, device="cuda").to(dtype)
    attend = lambda qkv: attention.get("pallas_flash").qkvpacked(qkv, segment_ids=segment_ids)  # noqa: E731
    leaf = qkv.detach().double().requires_grad_()
    exact = reference(*leaf.permute(2, 0, 3, 1, 4), segment_ids=segment_ids).transpose(1, 2).flatten(2)
    wanted = exact, *torch.autograd.grad(exact, leaf, do.double())
    results = []
    torch.compiler.reset()  # this function's earlier shapes would exceed the limit of recompilations
    for call in (attend, attend, torch.compile(attend, fullgraph=True)):
        out = call(qkv)
        results.append((out, *torch.autograd.grad(out, qkv, do)))
    assert all(error(x, y) < TOLERANCE[dtype] for x, y in zip(results[0], wanted, strict=True))
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))


@gpu
@pytest.mark.parametrize("lengths", [(300, 300, 1400), (1200, 1201, 257), (3800,)])
def test_packed_segments__many_heads_on_gpu(lengths):
    """Reruns give equal bits: no tile's ids are overwritten while a slow warp still reads them."""
    segment_ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(11, -1).cuda()
    qkv = torch.randn(*segment_ids.shape, 3, 12, 64, device="cuda", dtype=torch.bfloat16)
    attend = attention.get("pallas_flash").qkvpacked
    with torch.no_grad():
        first = attend(qkv, segment_ids=segment_ids)
        assert all(torch.equal(first, attend(qkv, segment_ids=segment_ids)) for _ in range(40))
        starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
        alone = [attend(qkv[:, i : i + n]) for i, n in zip(starts.tolist(), lengths, strict=True)]
    assert error(first, torch.cat(alone, 1).double()) < TOLERANCE[torch.bfloat16]


@gpu
@pytest.mark.parametrize("D, dtype", [(64, torch.bfloat16), (40, torch.float16)])
@pytest.mark.parametrize("lengths", [[(1100, 901), (1300, 257, 444), (64, 1937)], [(1200, 801), (1500, 1, 500)] * 2])
def test_fused_backward__with_segments__on_gpu(lengths, D, dtype):
    """Mostly long segments, so that the device chooses the fused kernel; some are in quads. Reruns give equal bits."""
    from vitkernels.attention.pallas_flash.hopper.chunks import prefers_fused
    from vitkernels.attention.pallas_flash.hopper.token_ids import token_ids

    rows = [torch.cat([torch.full((n,), 7 * i - 3) for i, n in enumerate(entry)]) for entry in lengths]
    segment_ids = torch.stack(rows).cuda()
    qkv = torch.randn(*segment_ids.shape, 3, 12, D, device="cuda").to(dtype).requires_grad_()
    do = torch.randn(*segment_ids.shape, 12 * D, device="cuda").to(dtype)
    q = qkv[:, :, 0].transpose(1, 2)
    *_, counts = token_ids(q.shape, q.shape[2], None, segment_ids, moves_chunks=True)
    assert prefers_fused(counts)
    leaf = qkv.detach().double().requires_grad_()
    exact = reference(*leaf.permute(2, 0, 3, 1, 4), segment_ids=segment_ids).transpose(1, 2).flatten(2)
    wanted = exact, *torch.autograd.grad(exact, leaf, do.double())
    results = []
    for _ in range(5):
        out = attention.get("pallas_flash").qkvpacked(qkv, segment_ids=segment_ids)
        results.append((out, *torch.autograd.grad(out, qkv, do)))
    assert all(error(x, y) < TOLERANCE[dtype] for x, y in zip(results[0], wanted, strict=True))
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))


@gpu
def test_launch__on_a_stream_in_a_cuda_graph_and_compiled():
    attend = attention.get("pallas_flash").qkvpacked
    data = torch.randn(2, 197, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    do = torch.randn(2, 197, 256, device="cuda", dtype=torch.bfloat16)

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
        for x, y in zip(results, expected, strict=True):
            assert torch.equal(x, y)
