"""Conformance suite of paged_attention: every backend against float64, for all lengths, page sizes and head dims.

Memory that a call must not read is poisoned: the cache is NaN outside sequences, and past each sequence's last page the
table holds page numbers far outside the cache.
"""

import pytest
import torch
from expecting import error
from refused import skip_if_refused

from vitkernels.ops import paged_attention
from vitkernels.ops.paged_attention import BACKENDS
from vitkernels.ops.paged_attention.decode_batch import DecodeBatch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

everywhere = pytest.mark.parametrize("device", DEVICES)
every_backend = pytest.mark.parametrize("name", BACKENDS.names())

# ‖x - exact‖ / ‖exact‖: float32 sums of at most a few hundred products; for 16 bits a few roundings of weights and
# result, 2⁻¹² (float16) and 2⁻⁹ (bfloat16) each.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float64: 1e-14}


def make(device, lens, K=2, G=2, D=32, S=8, dtype=torch.float32, table_dtype=torch.int32, T=6, P=20):
    """Return the tensors of a call: a cache of P pages, assigned at random, and a table of T pages per sequence."""
    used = [-(-n // S) for n in lens]
    free = torch.randperm(P).tolist()
    table_BT = torch.randint(0, 2, (len(lens), T)) * 2_000_000_000 - 1_000_000_000
    caches = [torch.full((K, P, S, D), float("nan")) for _ in range(2)]
    for b, n in enumerate(lens):
        for t in range(used[b]):
            table_BT[b, t] = page = free.pop()
            rows = min(S, n - t * S)
            for cache in caches:
                cache[:, page, :rows] = torch.randn(K, rows, D)
    query = torch.randn(len(lens), K * G, D) * D**-0.5
    lens_B = torch.tensor(lens)
    caches = [cache.to(device, dtype) for cache in caches]
    return query.to(device, dtype), *caches, lens_B.to(device, table_dtype), table_BT.to(device, table_dtype)


def skip_slow(name, device, kept):
    """Skip shapes in the Pallas interpreter, which takes seconds per shape."""
    if name == "pallas_tpu" and device == "cpu" and not kept:
        pytest.skip("slow to interpret; compiled in test_paged_attention_tpu.py")


def exact(query, key_cache, value_cache, context_lens, block_tables, soft_cap=None):
    """Compute the op in float64, one sequence and one head at a time."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    S, G = key_cache.shape[2], query.shape[1] // key_cache.shape[0]
    for b, n in enumerate(context_lens.tolist()):
        if n == 0:
            continue
        pages = block_tables[b, : -(-n // S)].tolist()
        for h in range(query.shape[1]):
            k, v = (torch.cat([c[h // G, page] for page in pages])[:n].double().cpu() for c in (key_cache, value_cache))
            s = k @ query[b, h].double().cpu()
            s = s if soft_cap is None else soft_cap * torch.tanh(s / soft_cap)
            p = torch.exp(s - s.max())
            out[b, h] = p @ v / p.sum()
    return out


def relative_error(got, want):
    assert torch.isfinite(got).all()
    return float((got.double().cpu() - want).norm() / want.norm().clamp_min(1e-30))


@pytest.fixture(autouse=True)
def skip_pallas_tpu_on_cuda(request):
    """Skip what test_pallas_tpu__refuses_cuda covers."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if (params.get("name"), params.get("device")) == ("pallas_tpu", "cuda"):
        pytest.skip("runs on TPU and CPU only")


def check(name, tensors, pages_per_compute_block=2, soft_cap=None, may_refuse=False, **options):
    """Compare with float64; may_refuse: whether the backend may refuse the call."""
    batch = DecodeBatch(*tensors, pages_per_compute_block, options.get("megacore_mode"), soft_cap)

    def call():
        return paged_attention(*batch, backend=name)

    skip_if_refused(BACKENDS, name, (batch,), call, may_refuse)
    out = call()
    assert out.dtype == tensors[0].dtype and out.shape == tensors[0].shape and out.device == tensors[0].device
    empty = tensors[3] == 0
    assert torch.count_nonzero(out[empty]) == 0
    assert relative_error(out, exact(*tensors, soft_cap)) < TOLERANCE[out.dtype]
    return out


# On a TPU the kernel depends on whether the head dim fills registers.
both_kernels = pytest.mark.parametrize("D", [32, 128])


@everywhere
@every_backend
@both_kernels
@pytest.mark.parametrize(
    "lens",
    [
        [0, 1, 7, 8],
        [9, 15, 16, 17],
        [24, 25, 32, 33],
        [48, 40, 9, 47],  # the first uses its entire table
        [0, 0, 9, 0],
        [48, 0, 0, 0],
        [0, 17, 0, 40],
        [0, 0, 0, 0],
    ],
)
def test_paged_attention__matches_float64_for_each_length(name, device, D, lens):
    check(name, make(device, lens, D=D))


@everywhere
@every_backend
@pytest.mark.parametrize("D", [*range(32, 129, 8), 256])
def test_paged_attention__matches_float64_for_each_head_dim(name, device, D):
    skip_slow(name, device, D in (32, 72, 128))
    check(name, make(device, [11, 3, 0, 20], D=D))


@everywhere
@every_backend
@pytest.mark.parametrize("S", [8, 16, 24, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@both_kernels
def test_paged_attention__matches_float64_for_each_page_size(name, device, S, dtype, D):
    skip_slow(name, device, dtype == torch.bfloat16 and (S, D) in ((16, 32), (8, 128), (128, 32)))
    check(name, make(device, [S + 1, 2 * S - 3], K=1, S=S, D=D, dtype=dtype, T=3, P=5))


@everywhere
@every_backend
@pytest.mark.parametrize("S", [1, 5, 12])
def test_paged_attention__runs_or_refuses_odd_page_sizes(name, device, S):
    check(name, make(device, [13, 2], S=S, T=14), may_refuse=name == "pallas_tpu")


@everywhere
@every_backend
@pytest.mark.parametrize(("K", "G"), [(1, 1), (3, 1), (2, 4), (1, 8), (1, 12), (2, 8), (1, 65)])
def test_paged_attention__matches_float64_for_grouped_queries(name, device, K, G):
    skip_slow(name, device, (K, G) in ((3, 1), (1, 65)))
    check(name, make(device, [19, 4], K=K, G=G, T=3))


@everywhere
@every_backend
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_paged_attention__matches_float64_for_each_dtype(name, device, dtype):
    may_refuse = {"reference": (), "triton": (torch.float64,), "pallas_tpu": (torch.float64, torch.float16)}[name]
    check(name, make(device, [17, 29], K=1, S=16, dtype=dtype, T=3, P=5), may_refuse=dtype in may_refuse)


@everywhere
@every_backend
@both_kernels
def test_paged_attention__accepts_int64_tables(name, device, D):
    check(name, make(device, [19, 4, 0, 11], D=D, table_dtype=torch.int64))


@everywhere
@every_backend
@both_kernels
@pytest.mark.parametrize("pages_per_compute_block", [1, 4, 100])
def test_paged_attention__is_independent_of_compute_blocks(name, device, D, pages_per_compute_block):
    skip_slow(name, device, (D, pages_per_compute_block) in ((32, 4), (128, 100)))
    check(name, make(device, [48, 9, 0, 33], D=D), pages_per_compute_block)


@everywhere
@every_backend
@both_kernels
@pytest.mark.parametrize("megacore_mode", ["kv_head", "batch"])
def test_paged_attention__is_independent_of_megacore_mode(name, device, D, megacore_mode):
    check(name, make(device, [48, 0, 0, 33], D=D), megacore_mode=megacore_mode)


@everywhere
@every_backend
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_paged_attention__applies_the_soft_cap(name, device, soft_cap):
    skip_slow(name, device, soft_cap == 0.5)
    query, *others = make(device, [48, 9, 0, 2])
    check(name, (8 * query, *others), soft_cap=soft_cap)


@everywhere
@every_backend
@both_kernels
def test_paged_attention__is_accurate_for_large_scores(name, device, D):
    """Scores of about ± 300 have a rounding error of 300 · 2⁻²⁴, a relative error of 2e-5 in a weight."""
    query, *others = make(device, [48, 9, 1, 30], D=D)
    tensors = (300 * query, *others)
    assert relative_error(paged_attention(*tensors, 2, backend=name), exact(*tensors)) < 1e-4


@everywhere
@every_backend
def test_paged_attention__reads_any_strides(name, device):
    """Views of larger tensors, as in an inference server."""
    query, key_cache, value_cache, lens, table = make(device, [19, 4, 8])
    both = torch.stack([key_cache, value_cache], dim=2)  # (K, P, 2, S, D)
    wide = torch.cat([query, query], 2)
    taller = torch.stack([lens, table[:, 0]], 1)
    tensors = (wide[..., : query.shape[2]], both[:, :, 0], both[:, :, 1], taller[:, 0], table.T.contiguous().T)
    check(name, tensors, may_refuse=name == "pallas_tpu")


@everywhere
@every_backend
def test_paged_attention__runs_or_refuses_a_transposed_cache(name, device):
    query, key_cache, *others = make(device, [19, 4])
    check(name, (query, key_cache.mT.contiguous().mT, *others), may_refuse=name != "reference")


@pytest.mark.gpu
def test_pallas_tpu__refuses_cuda():
    with error("registry.unsupported", backend="pallas_tpu"):
        paged_attention(*make("cuda", [4]), 1, backend="pallas_tpu")


@everywhere
@every_backend
@both_kernels
@pytest.mark.parametrize("page", [-1, 20, 2**31 - 1, -(2**31), 2**32 + 1])
def test_paged_attention__returns_nan_for_a_page_outside_the_cache(name, device, D, page):
    """Call backends without the check of values for CPU tensors: only that sequence is NaN."""
    tensors = make(device, [19, 4, 11, 0], D=D, table_dtype=torch.int64)
    want = exact(*tensors)
    tensors[4][0, 1] = page
    out = BACKENDS.get(name).run(DecodeBatch(*tensors, 2))
    assert out[0].isnan().all() and relative_error(out[1:], want[1:]) < 3e-6


@everywhere
@every_backend
@both_kernels
@pytest.mark.parametrize("length", [-1, 49, 2**40, -(2**40)])
def test_paged_attention__returns_nan_for_a_length_out_of_range(name, device, D, length):
    tensors = make(device, [19, 4, 11, 0], D=D, table_dtype=torch.int64)
    want = exact(*tensors)
    tensors[4].clamp_(0, 19)  # all pages are valid; only the length is wrong
    tensors[3][1] = length
    out = BACKENDS.get(name).run(DecodeBatch(*tensors, 2))
    assert out[1].isnan().all() and relative_error(out[::2], want[::2]) < 3e-6


@pytest.mark.parametrize(
    ("row", "column", "page"),
    [(0, 2, 20), (1, 0, -1)],
)
def test_paged_attention__refuses_a_page_outside_the_cache_on_the_cpu(row, column, page):
    tensors = make("cpu", [19, 4, 11])
    tensors[4][row, column] = page
    with error("ops.paged_attention.page", sequence=row, entry=column, page=page, pages=20):
        paged_attention(*tensors, 1)


@pytest.mark.parametrize("length", [-1, 49])
def test_paged_attention__refuses_a_length_out_of_range_on_the_cpu(length):
    tensors = make("cpu", [19, 4, 11])
    tensors[3][2] = length
    with error("ops.paged_attention.context_len", sequence=2, length=length, limit=48):
        paged_attention(*tensors, 1)


def invalid_calls():
    query, key_cache, value_cache, lens, table = make("cpu", [19, 4, 11])
    valid = [query, key_cache, value_cache, lens, table]

    def tensor(index, value, what, **fields):
        return [*valid[:index], value, *valid[index + 1 :]], {}, f"ops.paged_attention.{what}", fields

    def option(name, value, **fields):
        return valid, {name: value}, f"ops.paged_attention.{name}", {name: value, **fields}

    yield tensor(0, query[0], "shape", argument="query")
    yield tensor(1, key_cache[:, :, :4], "shape", argument="key_cache", shape=(2, 20, 4, 32))
    yield tensor(0, query[..., :16], "shape", argument="key_cache")
    yield tensor(0, query.half(), "dtype", argument="query", dtype=torch.float16)
    yield tensor(0, query[:, :3], "heads", query_heads=3, key_heads=2)
    yield tensor(3, lens[:2], "shape", argument="context_lens", sequences=3)
    yield tensor(4, table[:2], "shape", argument="block_tables", sequences=3)
    yield tensor(3, lens.float(), "dtype", argument="context_lens", dtype=torch.float32)
    yield tensor(4, table[:, :0], "shape", argument="block_tables")
    yield tensor(4, table.to("meta"), "device", argument="block_tables", device="meta", expected="cpu")
    yield tensor(0, query.clone().requires_grad_(), "gradient")
    yield option("pages_per_compute_block", 0)
    yield option("megacore_mode", "core")
    yield option("megacore_mode", "batch", size=3)
    yield option("attn_logits_soft_cap", 0.0)
    yield valid, {"backend": "flash"}, "unknown_name", {"name": "flash"}


@pytest.mark.parametrize(("tensors", "options", "code", "fields"), [*invalid_calls()])
def test_paged_attention__refuses_invalid_arguments(tensors, options, code, fields):
    with error(code, **fields):
        paged_attention(*tensors, **{"pages_per_compute_block": 1, **options})


def test_paged_attention__accepts_an_empty_batch():
    query, *caches, lens, table = make("cpu", [4])
    assert paged_attention(query[:0], *caches, lens[:0], table[:0], 1).shape == query[:0].shape


def test_paged_attention__runs_under_no_grad():
    query, *others = make("cpu", [4])
    with torch.no_grad():
        assert torch.isfinite(paged_attention(query.requires_grad_(), *others, 1)).all()


@everywhere
@every_backend
def test_paged_attention__compiles_to_one_graph(name, device):
    tensors = make(device, [19, 4, 0, 1])
    compiled = torch.compile(paged_attention, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(*tensors, 2, backend=name), exact(*tensors)) < 3e-6
    tensors[4][0, 0] = -1
    out = compiled(*tensors, 2, backend=name)
    assert out[0].isnan().all() and torch.isfinite(out[1:]).all()


@everywhere
def test_triton_launch__matches_float64_for_each_tiling(device):
    """Splits of 16 and 32 tokens of tables for 64, tiles of one page and of two, reproducible bitwise."""
    from vitkernels.ops.paged_attention.triton_launch import DecodeTiling, attend

    tensors = make(device, [0, 1, 16, 17, 33], S=16)
    for tiling in (DecodeTiling(16, 16), DecodeTiling(32, 16), DecodeTiling(32, 32)):
        first, second = (attend(*tensors, None, tiling) for _ in range(2))
        assert relative_error(first, exact(*tensors)) < 3e-6 and torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("K", "G", "D", "S"), [(8, 4, 128, 16), (12, 1, 64, 128), (2, 16, 80, 32), (1, 8, 72, 8)])
def test_paged_attention__matches_float64_for_long_ragged_sequences(K, G, D, S, dtype):
    check("triton", make("cuda", [4097, 1, 0, 2048, 777], K=K, G=G, D=D, S=S, dtype=dtype, T=600, P=1000))
