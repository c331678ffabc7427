"""paged_attention: every backend against float64, on every length, page size and head dim, and what is refused.

What a call must not look at is poisoned: the cache holds NaN wherever no sequence has a token, and the table holds page
numbers far outside the cache past each sequence's last page.
"""

import pytest
import torch

from vitkernels.errors import UsageError
from vitkernels.ops import paged_attention
from vitkernels.ops.paged_attention import BACKENDS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

everywhere = pytest.mark.parametrize("device", DEVICES)
every_backend = pytest.mark.parametrize("name", BACKENDS.names())

# ‖x - exact‖ / ‖exact‖: float32 sums of at most a few hundred products; for the halves the rounding of weights and
# result, 2⁻¹² and 2⁻⁹ each, a few times.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float64: 1e-14}


def make(device, lens, K=2, G=2, D=32, S=8, dtype=torch.float32, table_dtype=torch.int32, T=6, P=20):
    """A cache of P pages, dealt out at random to sequences of these lengths; a table with room for T pages each."""
    used = [-(-n // S) for n in lens]
    deal = torch.randperm(P).tolist()
    table_BT = torch.randint(0, 2, (len(lens), T)) * 2_000_000_000 - 1_000_000_000
    caches = [torch.full((K, P, S, D), float("nan")) for _ in range(2)]
    for b, n in enumerate(lens):
        for t in range(used[b]):
            table_BT[b, t] = page = deal.pop()
            rows = min(S, n - t * S)
            for cache in caches:
                cache[:, page, :rows] = torch.randn(K, rows, D)
    query = torch.randn(len(lens), K * G, D) * D**-0.5
    lens_B = torch.tensor(lens)
    caches = [cache.to(device, dtype) for cache in caches]
    return query.to(device, dtype), *caches, lens_B.to(device, table_dtype), table_BT.to(device, table_dtype)


def skip_slow(name, device, kept):
    """The Pallas interpreter takes seconds for each new shape."""
    if name == "pallas_tpu" and device == "cpu" and not kept:
        pytest.skip("takes long to interpret; its kernel compiles in test_paged_attention_tpu.py")


def exact(query, key_cache, value_cache, context_lens, block_tables, soft_cap=None):
    """The contract in float64, one sequence and one head at a time."""
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


def error(got, want):
    assert torch.isfinite(got).all()
    return float((got.double().cpu() - want).norm() / want.norm().clamp_min(1e-30))


@pytest.fixture(autouse=True)
def places(request):
    """pallas_tpu has no kernel for CUDA, and says so (test_pallas_tpu_refuses_cuda)."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if (params.get("name"), params.get("device")) == ("pallas_tpu", "cuda"):
        pytest.skip("its kernel is for TPU; the CPU interprets it")


def check(name, tensors, pages_per_compute_block=2, soft_cap=None, may_refuse=False, **options):
    """Against float64. Where a backend may refuse, the call must refuse with the reason that it gives."""
    args = (*tensors, pages_per_compute_block, options.get("megacore_mode"), soft_cap)
    reason = BACKENDS.unsupported(name, *args)
    if reason is not None:
        assert may_refuse, reason
        with pytest.raises(UsageError) as raised:
            paged_attention(*args, backend=name)
        assert reason in str(raised.value)
        pytest.skip(reason)
    out = paged_attention(*args, backend=name)
    assert out.dtype == tensors[0].dtype and out.shape == tensors[0].shape and out.device == tensors[0].device
    empty = tensors[3] == 0
    assert torch.count_nonzero(out[empty]) == 0
    assert error(out, exact(*tensors, soft_cap)) < TOLERANCE[out.dtype]
    return out


# On a TPU head dims that fill registers and others take different kernels.
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
        [48, 40, 9, 47],  # the first has a token in every place of its table
        [0, 0, 9, 0],
        [48, 0, 0, 0],
        [0, 17, 0, 40],
        [0, 0, 0, 0],
    ],
)
def test_lengths(name, device, D, lens):
    check(name, make(device, lens, D=D))


@everywhere
@every_backend
@pytest.mark.parametrize("D", [*range(32, 129, 8), 256])
def test_head_dims(name, device, D):
    skip_slow(name, device, D in (32, 72, 128))
    check(name, make(device, [11, 3, 0, 20], D=D))


@everywhere
@every_backend
@pytest.mark.parametrize("S", [8, 16, 24, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@both_kernels
def test_page_sizes(name, device, S, dtype, D):
    skip_slow(name, device, dtype == torch.bfloat16 and (S, D) in ((16, 32), (8, 128), (128, 32)))
    check(name, make(device, [S + 1, 2 * S - 3], K=1, S=S, D=D, dtype=dtype, T=3, P=5))


@everywhere
@every_backend
@pytest.mark.parametrize("S", [1, 5, 12])
def test_odd_page_sizes_run_or_are_refused(name, device, S):
    check(name, make(device, [13, 2], S=S, T=14), may_refuse=name == "pallas_tpu")


@everywhere
@every_backend
@pytest.mark.parametrize(("K", "G"), [(1, 1), (3, 1), (2, 4), (1, 8), (1, 12), (2, 8), (1, 65)])
def test_query_heads_share_key_heads(name, device, K, G):
    skip_slow(name, device, (K, G) in ((3, 1), (1, 65)))
    check(name, make(device, [19, 4], K=K, G=G, T=3))


@everywhere
@every_backend
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes(name, device, dtype):
    may_refuse = {"reference": (), "triton": (torch.float64,), "pallas_tpu": (torch.float64, torch.float16)}[name]
    check(name, make(device, [17, 29], K=1, S=16, dtype=dtype, T=3, P=5), may_refuse=dtype in may_refuse)


@everywhere
@every_backend
@both_kernels
def test_64_bit_tables(name, device, D):
    check(name, make(device, [19, 4, 0, 11], D=D, table_dtype=torch.int64))


@everywhere
@every_backend
@both_kernels
@pytest.mark.parametrize("pages_per_compute_block", [1, 4, 100])
def test_compute_blocks_change_nothing(name, device, D, pages_per_compute_block):
    skip_slow(name, device, (D, pages_per_compute_block) in ((32, 4), (128, 100)))
    check(name, make(device, [48, 9, 0, 33], D=D), pages_per_compute_block)


@everywhere
@every_backend
@both_kernels
@pytest.mark.parametrize("megacore_mode", ["kv_head", "batch"])
def test_megacore_modes_change_nothing(name, device, D, megacore_mode):
    check(name, make(device, [48, 0, 0, 33], D=D), megacore_mode=megacore_mode)


@everywhere
@every_backend
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_cap(name, device, soft_cap):
    skip_slow(name, device, soft_cap == 0.5)
    query, *others = make(device, [48, 9, 0, 2])
    check(name, (8 * query, *others), soft_cap=soft_cap)


@everywhere
@every_backend
@both_kernels
def test_large_scores(name, device, D):
    """Scores of some ± 300: their own rounding, 2⁻²⁴ of that, is an error of 2e-5 in a weight."""
    query, *others = make(device, [48, 9, 1, 30], D=D)
    tensors = (300 * query, *others)
    assert error(paged_attention(*tensors, 2, backend=name), exact(*tensors)) < 1e-4


@everywhere
@every_backend
def test_strided_tensors(name, device):
    """Views of a larger query, cache and table, as a server keeps them."""
    query, key_cache, value_cache, lens, table = make(device, [19, 4, 8])
    both = torch.stack([key_cache, value_cache], dim=2)  # (K, P, 2, S, D)
    wide = torch.cat([query, query], 2)
    taller = torch.stack([lens, table[:, 0]], 1)
    tensors = (wide[..., : query.shape[2]], both[:, :, 0], both[:, :, 1], taller[:, 0], table.T.contiguous().T)
    check(name, tensors, may_refuse=name == "pallas_tpu")


@everywhere
@every_backend
def test_a_cache_with_its_head_dim_elsewhere_runs_or_is_refused(name, device):
    query, key_cache, *others = make(device, [19, 4])
    check(name, (query, key_cache.mT.contiguous().mT, *others), may_refuse=name != "reference")


@pytest.mark.gpu
def test_pallas_tpu_refuses_cuda():
    with pytest.raises(UsageError, match="interpreted, for cpu; got cuda"):
        paged_attention(*make("cuda", [4]), 1, backend="pallas_tpu")


@everywhere
@every_backend
@both_kernels
@pytest.mark.parametrize("page", [-1, 20, 2**31 - 1, -(2**31), 2**32 + 1])
def test_a_page_outside_the_cache_is_never_read(name, device, D, page):
    """The kernels by themselves, without the check that CPU tensors get first: NaN, and for that sequence alone."""
    tensors = make(device, [19, 4, 11, 0], D=D, table_dtype=torch.int64)
    want = exact(*tensors)
    tensors[4][0, 1] = page
    out = BACKENDS.get(name).run(*tensors, 2, None, None)
    assert out[0].isnan().all() and error(out[1:], want[1:]) < 3e-6


@everywhere
@every_backend
@both_kernels
@pytest.mark.parametrize("length", [-1, 49, 2**40, -(2**40)])
def test_a_length_out_of_range_gives_nan(name, device, D, length):
    tensors = make(device, [19, 4, 11, 0], D=D, table_dtype=torch.int64)
    want = exact(*tensors)
    tensors[4].clamp_(0, 19)  # its pages are all there: the length alone is wrong
    tensors[3][1] = length
    out = BACKENDS.get(name).run(*tensors, 2, None, None)
    assert out[1].isnan().all() and error(out[::2], want[::2]) < 3e-6


@pytest.mark.parametrize(
    ("row", "column", "page", "message"),
    [
        (0, 2, 20, r"block_tables\[0, 2\] is 20, but the cache has pages 0 to 19"),
        (1, 0, -1, r"block_tables\[1, 0\] is -1, but the cache has pages 0 to 19"),
    ],
)
def test_a_page_outside_the_cache_is_refused(row, column, page, message):
    tensors = make("cpu", [19, 4, 11])
    tensors[4][row, column] = page
    with pytest.raises(UsageError, match=message):
        paged_attention(*tensors, 1)


@pytest.mark.parametrize("length", [-1, 49])
def test_a_length_out_of_range_is_refused(length):
    tensors = make("cpu", [19, 4, 11])
    tensors[3][2] = length
    with pytest.raises(UsageError, match=rf"context_lens\[2\] is {length}; a sequence has 0 to 48 tokens"):
        paged_attention(*tensors, 1)


def wrong_calls():
    query, key_cache, value_cache, lens, table = make("cpu", [19, 4, 11])
    good = [query, key_cache, value_cache, lens, table]

    def with_(index, value):
        return [*good[:index], value, *good[index + 1 :]]

    yield with_(0, query[0]), {}, r"query must be \(sequences, query heads, head dim\)"
    yield with_(1, key_cache[:, :, :4]), {}, "must share one shape"
    yield with_(0, query[..., :16]), {}, "query's head dim last"
    yield with_(0, query.half()), {}, "share one floating dtype"
    yield with_(0, query[:, :3]), {}, "multiple of key heads, to share them evenly; got 3 and 2"
    yield with_(3, lens[:2]), {}, "a row for each of the 3 sequences"
    yield with_(4, table[:2]), {}, "a row for each of the 3 sequences"
    yield with_(3, lens.float()), {}, "context_lens must be int32 or int64, got torch.float32"
    yield with_(4, table[:, :0]), {}, "the table 0 columns"
    yield with_(4, table.to("meta")), {}, "block_tables is on meta, query on cpu"
    yield with_(0, query.clone().requires_grad_()), {}, r"call it under torch.no_grad\(\)"
    yield good, {"pages_per_compute_block": 0}, "at least 1, got 0"
    yield good, {"megacore_mode": "core"}, "one of 'kv_head', 'batch' and None, got 'core'"
    yield good, {"megacore_mode": "batch"}, "halves a dimension of 3; it must be even"
    yield good, {"attn_logits_soft_cap": 0.0}, "must be positive or None, got 0.0"
    yield (
        good,
        {"backend": "flash"},
        "backend 'flash'; known: auto, pallas_tpu, reference, triton",
    )


@pytest.mark.parametrize(("tensors", "options", "message"), [*wrong_calls()])
def test_wrong_calls_say_what_is_wrong(tensors, options, message):
    with pytest.raises(UsageError, match=message):
        paged_attention(*tensors, **{"pages_per_compute_block": 1, **options})


def test_no_sequences():
    query, *caches, lens, table = make("cpu", [4])
    assert paged_attention(query[:0], *caches, lens[:0], table[:0], 1).shape == query[:0].shape


def test_weights_that_are_trained_elsewhere_are_no_obstacle_to_inference():
    query, *others = make("cpu", [4])
    with torch.no_grad():
        assert torch.isfinite(paged_attention(query.requires_grad_(), *others, 1)).all()


@everywhere
@every_backend
def test_torch_compile_keeps_one_graph_and_the_refusal(name, device):
    tensors = make(device, [19, 4, 0, 1])
    compiled = torch.compile(paged_attention, fullgraph=True, backend="aot_eager")
    assert error(compiled(*tensors, 2, backend=name), exact(*tensors)) < 3e-6
    tensors[4][0, 0] = -1
    out = compiled(*tensors, 2, backend=name)
    assert out[0].isnan().all() and torch.isfinite(out[1:]).all()


@everywhere
def test_triton_cuts_sequences_into_parts(device):
    """Parts of 16 and 32 tokens of tables for 64, tiles of one page and of two; the same bits from every run."""
    from vitkernels.ops.paged_attention.triton_launch import Tiles, attend

    tensors = make(device, [0, 1, 16, 17, 33], S=16)
    for tiles in (Tiles(16, 16), Tiles(32, 16), Tiles(32, 32)):
        first, second = (attend(*tensors, None, tiles=tiles) for _ in range(2))
        assert error(first, exact(*tensors)) < 3e-6 and torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("K", "G", "D", "S"), [(8, 4, 128, 16), (12, 1, 64, 128), (2, 16, 80, 32), (1, 8, 72, 8)])
def test_long_ragged_sequences_on_the_gpu(K, G, D, S, dtype):
    check("triton", make("cuda", [4097, 1, 0, 2048, 777], K=K, G=G, D=D, S=S, dtype=dtype, T=600, P=1000))
