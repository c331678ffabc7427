"""The Mosaic-GPU kernels for Hopper without one: interpreted on the CPU, and lowered on any machine.

test_pallas_flash_on_hopper.py and the conformance suite run them on a Hopper GPU.
"""

import dataclasses
import importlib
import math

import pytest
import torch
from hopper import error, exact_attention, jax, needs_new_jax

from vitkernels import attention
from vitkernels.attention import Problem
from vitkernels.testing.attention_reference import TOLERANCE, reference

# (heads, tokens, head dim, dtype, causal, scale, warpgroups, buffers, blocks): ragged ends, a warpgroup without rows,
# head dims in two parts, a single tile, a last tile in the first step or not; blocks that process several work items,
# in unequal numbers, with no common divisor of tiles, stages and buffers; scales of all kinds.
CASES = [
    (2, 70, 64, torch.bfloat16, False, 0.125, 2, 1, 1),
    (2, 200, 48, torch.bfloat16, False, 0.1, 3, 2, 2),
    (2, 150, 64, torch.float16, False, -0.1, 2, 2, 1),
    (2, 130, 72, torch.float16, True, 0.1, 2, 1, 1),
    (3, 130, 40, torch.bfloat16, False, 0.1, 2, 2, 1),
    (3, 200, 64, torch.bfloat16, True, 0.1, 3, 2, 4),
    (3, 50, 32, torch.bfloat16, False, -0.2, 1, 2, 2),
    (1, 130, 32, torch.float16, True, 0.1, 1, 2, 1),
    (2, 70, 32, torch.bfloat16, False, 2.0**-110, 1, 1, 1),  # log-sum-exps in units of q k could be infinite
    (1, 70, 128, torch.bfloat16, False, 0.1, 2, 1, 1),
]


@pytest.mark.usefixtures("detects_races")
@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize("heads, N, D, dtype, is_causal, scale, warpgroups, buffers, blocks", CASES)
def test_ring_kernels__interpreted(heads, N, D, dtype, is_causal, scale, warpgroups, buffers, blocks):
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.backward import Backward
    from vitkernels.attention.pallas_flash.hopper.forward import Forward
    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule

    H = heads
    qkv, do = torch.randn(1, N, 3, H, D).to(dtype), torch.randn(1, N, H, D).to(dtype)
    out, dqkv, lse = exact_attention(qkv, do, scale, is_causal)
    schedule = Schedule(64, 2, warpgroups, buffers)
    name = str(dtype).removeprefix("torch.")
    problem = (1, H, N, N, D, name, scale, is_causal, 3 * H, (0, H, 2 * H), schedule, True, blocks)
    array = lambda x: jnp.asarray(x.float().numpy(), name)  # noqa: E731
    x, g = array(qkv.flatten(2, 3)), array(do)

    found_out, found_lse = Forward(*problem)(x, x, x)
    tensor = lambda a: torch.tensor(a.astype("float32").tolist())  # noqa: E731
    assert error(tensor(found_out), out) < TOLERANCE[dtype]
    assert (
        tensor(found_lse)[:, :, :N] - lse
    ).abs().max() < 1e-5  # float32 sums round by 2⁻²⁴ each, for values up to 10
    backward = Backward(*problem)
    dq, delta = backward.dq(x, x, x, found_out, g, found_lse)
    dk, dv = backward.dkdv(x, x, x, g, found_lse, delta)
    for i, found in enumerate((dq, dk, dv)):
        assert error(tensor(found)[:, :, i * H : (i + 1) * H], dqkv[:, :, i]) < TOLERANCE[dtype], "qkv"[i]


@pytest.mark.usefixtures("detects_races")
@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize(
    "N, M, D, tile, scale, warpgroups",
    [
        pytest.param(130, 256, 64, 128, 0.1, 2, id="full tiles"),
        pytest.param(200, 300, 64, 128, 0.0, 3, id="last tile last"),
        pytest.param(70, 457, 48, 128, -0.1, 1, id="last tile first"),
        pytest.param(70, 552, 64, 128, 0.1, 1, id="last tile first, less than half full"),
        pytest.param(130, 517, 64, 128, 0.1, 2, id="last tile with the next"),
        pytest.param(130, 256, 128, 128, 0.1, 2, id="two groups of columns"),
        pytest.param(70, 300, 104, 128, 0.1, 1, id="two groups of columns, last tile last"),
        pytest.param(130, 321, 120, 128, 0.1, 2, id="two groups of columns, last tile first"),
        pytest.param(70, 513, 128, 128, -0.1, 1, id="two groups of columns, last tile with the next"),
        pytest.param(130, 288, 128, 144, 0.1, 2, id="large tiles"),
        pytest.param(70, 257, 112, 144, 0.1, 1, id="large tiles, last tile first"),
        pytest.param(70, 589, 128, 144, 0.1, 1, id="large tiles, last tile with the next"),
    ],
)
def test_overlapped_forward__interpreted(N, M, D, tile, scale, warpgroups):
    """Run all work items in one thread block, for each order of the tiles."""
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper import overlapped_forward
    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule

    H = 2
    q, k, v = (torch.randn(1, n, H, D).bfloat16() for n in (N, M, M))
    scores = torch.einsum("bnhd,bmhd->bhnm", q.double(), k.double()) * scale
    exact = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v.double())

    array = lambda x: jnp.asarray(x.float().numpy(), "bfloat16")  # noqa: E731
    problem = (1, H, N, M, D, "bfloat16", scale, False, H, (0, 0, 0), Schedule(tile, 2, warpgroups), True, 1)
    out, lse = overlapped_forward.OverlappedForward(*problem)(*map(array, (q, k, v)))
    assert error(torch.tensor(out.astype("float32").tolist()), exact) < TOLERANCE[torch.bfloat16]
    # Float32 sums round by 2⁻²⁴ each, for values up to 10.
    assert (torch.tensor(lse.tolist())[:, :, :N] - scores.logsumexp(-1) / math.log(2)).abs().max() < 1e-5


@needs_new_jax
@pytest.mark.parametrize("waits", [False, True])
def test_interpreter__detects_races(waits, capsys):
    """See the fixture detects_races: one warpgroup writes shared memory that another one reads."""
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def pass_on(out_ref, smem, written):
        warpgroup = jax.lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            smem[...] = jnp.ones_like(smem)
            plgpu.commit_smem()
            plgpu.barrier_arrive(written)

        @pl.when(warpgroup == 1)
        def _():
            if waits:
                plgpu.barrier_wait(written)
            out_ref[...] = smem[...]
            if not waits:
                plgpu.barrier_wait(written)

    kernel = plgpu.kernel(
        pass_on,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32), plgpu.Barrier(num_arrivals=1)],
        num_threads=2,
        thread_name="warpgroup",
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    jax.block_until_ready(kernel())
    assert ("RACE DETECTED" in capsys.readouterr().out) == (not waits)


@needs_new_jax
def test_overlapped_forward__for_long_calls_without_bias_and_causality():
    from vitkernels.attention.pallas_flash.hopper.schedule import overlaps_forward

    assert all(overlaps_forward(*size, False, False) for size in ((256, 40), (4096, 64), (577, 104), (577, 128)))
    others = (255, 64, False, False), (577, 32, False, False), (577, 72, False, False), (577, 96, False, False)
    others = *others, (577, 64, True, False), (577, 64, False, True)
    assert not any(overlaps_forward(*call) for call in others)


@needs_new_jax
def test_starts_with_two__for_few_tokens_behind_full_tiles():
    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule, starts_with_two

    small, large = Schedule(64, 4, 3), Schedule(128, 2, 2)
    assert all(starts_with_two(tokens, 64, small) for tokens in (65, 257, 264, 1025))
    assert not any(starts_with_two(tokens, 64, small) for tokens in (8, 64, 256, 265, 320))
    assert starts_with_two(257, 40, small) and not starts_with_two(257, 72, small)
    assert not starts_with_two(257, 64, large)


@needs_new_jax
def test_overlapped_forward_schedule():
    from vitkernels.attention.pallas_flash.hopper.schedule import overlapped_forward_schedule as schedule

    tiles = {N: schedule(N, N, 128).tile for N in (256, 257, 288, 300, 512, 577, 720, 1025, 1370, 1440, 2304, 4096)}
    assert [N for N, tile in tiles.items() if tile == 144] == [257, 288, 720, 1440, 2304, 4096]
    assert {schedule(N, N, 64).tile for N in tiles} == {128}
    assert [N for N in (257, 288, 289, 384, 385, 416, 513) if schedule(N, N, 64).stages == 3] == [257, 288, 385, 416]


@pytest.mark.usefixtures("detects_races")
@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize(
    "H, N, M, D, scale, few_tiles",
    [
        (2, 130, 300, 64, -0.1, 24),
        (3, 200, 130, 48, 0.1, 24),
        (1, 256, 257, 64, 0.1, 24),
        (2, 256, 384, 64, -0.1, 0),  # as in longer sequences
    ],
)
def test_fused_backward__interpreted(H, N, M, D, scale, few_tiles, monkeypatch):
    """Run all items in one thread block, so that no turn is waited for and every buffer is reused."""
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper import fused_sums
    from vitkernels.attention.pallas_flash.hopper.fused_backward import FusedBackward
    from vitkernels.attention.pallas_flash.hopper.fused_order import Starts
    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule

    monkeypatch.setattr(fused_sums, "_FEW_TILES", few_tiles)
    q, k, v, do = (torch.randn(1, n, H, D).bfloat16() for n in (N, M, M, N))
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * scale
    out = (scores.softmax(-1) @ leaves[2]).transpose(1, 2)
    exact = torch.autograd.grad(out, leaves, do.double())
    lse = torch.zeros(1, H, 256)
    lse[:, :, :N] = scores.logsumexp(-1) / math.log(2)

    array = lambda x: jnp.asarray(x.detach().float().numpy(), "bfloat16")  # noqa: E731
    problem = (1, H, N, M, D, "bfloat16", scale, False, H, (0, 0, 0), Schedule(128, 2, 2), True, 1)
    lse = jnp.asarray(lse.detach().numpy())
    of_scores, of_dp, counters = Starts(*problem)(*map(array, (out, do)), lse)
    delta = (out * do.double()).sum(-1).transpose(1, 2)
    assert error(torch.tensor(of_dp.tolist())[:, :, :N], -delta) < 2**-8
    found = FusedBackward(*problem)(*map(array, (q, k, v, do)), of_scores, of_dp, counters)
    for name, x, y in zip(("dq", "dk", "dv"), found, exact, strict=False):
        x = torch.tensor(x.astype("float32").tolist()).transpose(1, 2)
        assert error(x, y) < TOLERANCE[torch.bfloat16], name


@needs_new_jax
@pytest.mark.parametrize(
    "B, H, N, blocks, counts",
    [
        (3, 7, 1025, 132, None),
        (1, 40, 1025, 132, None),
        (2, 16, 4096, 132, None),
        (5, 3, 300, 1, None),
        # Packed segments: the batch entry with the most chunks has 46. The long segments are of 32 and of 16 chunks.
        (4, 12, 2000, 132, [0, 46, 0, 0, 4 * 32**2, 0, 4 * 32]),
        (11, 12, 1000, 144, [0, 46, 0, 0, 11 * 16**2, 0, 11 * 16]),
        (5, 7, 2000, 132, [0, 46, 0, 0, 5 * 32**2, 0, 5 * 32]),  # groups of 17 and of 18 heads
    ],
)
def test_fused_backward__waits_only_for_items_drawn_before(B, H, N, blocks, counts):
    """So some thread block can always proceed, whichever blocks run."""
    from vitkernels.attention.pallas_flash.hopper.fused_backward import FusedBackward
    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule

    schedule = Schedule(128, 2, 2)
    call = B, H, N, N, 64, "bfloat16", 0.1, False, H, (0, 0, 0), schedule, True
    kernel = FusedBackward(*call, multiprocessors=blocks, chunks=counts and (N // 16, N // 16))
    ids = (None, None, None, None, jax.numpy.array(counts)) if counts else ()
    key_blocks = 23 if counts else kernel.key_blocks(ids)
    count = B * H * key_blocks
    with jax.disable_jit():
        places = [kernel.place_of(jax.numpy.int32(i), ids) for i in range(count)]
    drawn = {tuple(map(int, place)): i for i, place in enumerate(places)}
    assert sorted(drawn) == [(b, h, t) for b in range(B) for h in range(H) for t in range(key_blocks)]
    assert all(t == 0 or drawn[b, h, t - 1] < i for (b, h, t), i in drawn.items())


@needs_new_jax
def test_fused_backward__for_long_unmasked_self_attention():
    from vitkernels.attention.pallas_flash.hopper.kernels import AttentionKernels
    from vitkernels.attention.pallas_flash.hopper.schedule import fewest_chunks, fused_backward_schedule

    chosen = lambda *call: fused_backward_schedule(*call) is not None  # noqa: E731
    assert chosen(512, 1024, 1024, 64, False) and chosen(128, 4096, 4096, 40, False)
    # The fused kernel pads all these to a multiple of 128 keys, the pair to one of 64.
    assert chosen(512, 577, 577, 64, False) and not chosen(512, 576, 576, 64, False)
    assert chosen(512, 1089, 1089, 64, False) and not chosen(512, 1088, 1088, 64, False)
    assert not chosen(512, 512, 512, 64, False) and not chosen(512, 1200, 1200, 80, False)
    assert not chosen(512, 1200, 1200, 64, True) and not chosen(512, 1200, 2048, 64, False)
    assert not chosen(12, 1200, 1200, 64, False)  # too few heads to keep the items of a head apart
    kernels = lambda scale: AttentionKernels(  # noqa: E731
        32, 16, 1200, 1200, 64, torch.bfloat16, False, scale, True, torch.device("cuda")
    )
    assert kernels(-0.1)._fused and not kernels(2.0**-110)._fused  # lse in units of q k could overflow
    # Of packed segments, the device knows which are long enough for the number of heads.
    assert chosen(20, 9216, 9216, 64, False, True) and not chosen(3, 9216, 9216, 64, False, True)
    assert not chosen(512, 896, 896, 64, False, True)
    assert [fewest_chunks(heads) for heads in (96, 33, 20)] == [5, 15, 27]


@pytest.mark.usefixtures("detects_races")
@needs_new_jax
@pytest.mark.parametrize(
    "H, N, M, D, shape, is_causal, of_segment, kept, warpgroups, blocks, parts, of_bias",
    [
        # Work items whose first tile is not the array's, and some without any.
        (1, 200, 200, 32, (1, 1), False, 70, 140, 1, 3, 1, torch.bfloat16),
        pytest.param(2, 100, 100, 32, (1, 2), False, 40, 100, 2, 3, 2, torch.float32, marks=pytest.mark.slow),
        pytest.param(2, 70, 130, 40, (3, 1), False, None, 130, 1, 2, 2, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(2, 150, 150, 32, (1, 1), True, None, 150, 2, 1, 3, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(1, 65, 65, 64, (3, 1), True, 40, 65, 2, 4, 1, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_bias__interpreted(H, N, M, D, shape, is_causal, of_segment, kept, warpgroups, blocks, parts, of_bias):
    """Biases shared by images, heads or both, with rows that are -inf or absorb their scores.

    of_segment: tokens of a segment. kept: how many keys a mask keeps.
    """
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.backward import Backward
    from vitkernels.attention.pallas_flash.hopper.bias import padded_bias
    from vitkernels.attention.pallas_flash.hopper.bias_gradient import BiasGradient
    from vitkernels.attention.pallas_flash.hopper.bias_groups import transposed
    from vitkernels.attention.pallas_flash.hopper.forward import Forward
    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule
    from vitkernels.attention.pallas_flash.hopper.token_ids import given, token_ids

    B, scale = 3, 0.125
    q, k, v, do = (torch.randn(B, n, H, D).bfloat16() for n in (N, M, M, N))
    bias = torch.randn(*shape, N, M).to(of_bias)
    bias[:, :, 5], bias[:, :, 6], bias[:, :, 7, 1::2] = -torch.inf, torch.finfo(of_bias).min, -torch.inf
    bias.requires_grad_()
    segment_ids = torch.arange(N).expand(B, -1) // of_segment if of_segment else None
    mask = (torch.arange(M) < kept).expand(B, 1, 1, M) if kept < M else None
    ids = token_ids((B, H, N, D), M, mask, segment_ids)
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    exact_bias = bias.detach().double().requires_grad_()
    exact = reference(*leaves, bias=exact_bias, mask=mask, segment_ids=segment_ids, is_causal=is_causal, scale=scale)
    wanted = exact, *torch.autograd.grad(exact, [*leaves, exact_bias], do.double().transpose(1, 2))

    prepared = padded_bias(bias, None, N, M, scale)
    assert prepared.dtype == of_bias
    schedule = Schedule(64, 2, warpgroups)
    chunks = (ids[2].shape[1], ids[3].shape[1]) if of_segment else None
    dtype = str(of_bias).removeprefix("torch.")
    problem = (B, H, N, M, D, "bfloat16", scale, is_causal, H, (0, 0, 0), schedule, True, blocks, chunks, shape, dtype)
    array = lambda x, dtype: jnp.asarray(x.detach().float().numpy(), dtype)  # noqa: E731
    q, k, v, do = (array(x, "bfloat16") for x in (q, k, v, do))
    ids = [jnp.asarray(x.numpy()) for x in given(ids)]
    of_queries_bias, of_keys_bias = array(prepared, dtype), array(transposed(prepared.detach()), dtype)
    forward = dataclasses.replace(Forward(*problem), schedule=Schedule(64 if D == 64 else 128, 2, warpgroups))
    out, lse = forward(q, k, v, of_queries_bias, *ids)
    backward = Backward(*problem)
    dq, delta = backward.dq(q, k, v, out, do, lse, of_queries_bias, *ids)
    dk, dv = backward.dkdv(q, k, v, do, lse, delta, of_keys_bias, *ids)
    sums = BiasGradient(*problem, parts=parts)(q, k, v, do, lse, delta, of_queries_bias, *ids)

    for name, x, y in zip(("out", "dq", "dk", "dv"), (out, dq, dk, dv), wanted, strict=False):
        x = torch.tensor(x.astype("float32").tolist()).transpose(1, 2)
        assert error(x, y) < TOLERANCE[torch.bfloat16], name
    total = torch.tensor(sums.tolist()).sum(0).nan_to_num()  # tiles of padding are never written
    (dbias,) = torch.autograd.grad(prepared, bias, total)
    assert error(dbias, wanted[4]) < TOLERANCE[torch.bfloat16]


@needs_new_jax
@pytest.mark.parametrize(
    "N, D, chunks, of_bias",
    [
        (208, 64, None, None),
        (256, 40, None, None),
        (577, 88, None, None),
        (4096, 56, None, None),
        (1024, 40, None, None),
        (197, 64, (6, 6), None),
        (1200, 64, None, None),
        (788, 72, (50, 50), None),
        (197, 64, (4, 4), ((1, 8), torch.float32)),
        (197, 64, None, ((1, 8), torch.bfloat16)),
        (256, 40, None, ((2, 1), torch.float32)),
        (577, 64, None, ((2, 1), torch.bfloat16)),
        (577, 88, None, ((2, 1), torch.float32)),
        # They leave the least shared memory.
        (256, 64, None, ((1, 8), torch.bfloat16)),
        (192, 64, None, ((1, 8), torch.float32)),
        (577, 64, (10, 10), ((1, 8), torch.bfloat16)),
    ],
)
def test_kernels__lower_without_a_gpu(N, D, chunks, of_bias):
    """Mosaic GPU checks layouts, copies and shared memory. test_pallas_flash_ptxas.py lowers other calls."""
    from vitkernels.attention.pallas_flash.hopper.kernels import AttentionKernels

    options = True, torch.device("cuda"), chunks, *(of_bias or ())
    call = AttentionKernels(5, 8, N, N, D, torch.bfloat16, False, D**-0.5, *options)
    kernels = {*call.launched(True, False), *call.launched(True, of_bias is not None)}
    assert all(kernel.module.startswith(b"ML") for kernel in kernels)  # MLIR bytecode


@needs_new_jax
def test_operators__trace_with_ids_and_a_bias():
    """Fake outputs have the layouts' shapes."""
    from torch._subclasses import FakeTensorMode

    from vitkernels.attention.pallas_flash.hopper import operators
    from vitkernels.attention.pallas_flash.hopper.bias import padded_bias
    from vitkernels.attention.pallas_flash.hopper.token_ids import token_ids

    ops = (operators.attend, operators.attend_backward, operators.attend_packed, operators.attend_packed_backward)
    attend, backward, attend_packed, packed_backward = (op.traced for op in ops)
    with FakeTensorMode():
        qkv = torch.empty(2, 70, 3, 3, 64, dtype=torch.bfloat16)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        ids = token_ids(q.shape, 70, torch.ones(2, 1, 1, 70, dtype=torch.bool), None)
        bias = padded_bias(torch.empty(3, 70, 70), None, 70, 70, 0.1)
        call = bias, *ids, False, 0.1
        out, lse = attend_packed(qkv, *call)
        assert out.shape == (2, 70, 192) and lse.shape == (2, 3, 256)
        dqkv, dbias = packed_backward(out, out, lse, qkv, True, *call)
        assert dqkv.shape == qkv.shape and dbias.shape == bias.shape == (1, 3, 4, 32, 512)
        out, lse = attend(q, k, v, *call)
        assert out.shape == q.shape
        *dqkv, dbias = backward(out, out, lse, q, k, v, False, *call)
        assert [x.shape for x in dqkv] == [q.shape] * 3 and not dbias.numel()


@needs_new_jax
def test_operators__trace_with_a_symbolic_number_of_tokens():
    """A second length makes torch.compile treat the number of tokens as a symbol."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    from vitkernels.attention.pallas_flash.hopper import operators

    sizes = [DimDynamic.STATIC, DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 3]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    qkv = mode.from_tensor(torch.empty(2, 70, 3, 3, 64), symbolic_context=context)
    with mode:
        out, lse = operators.attend_packed.traced(qkv, *[None] * 6, False, 0.1)
        assert out.shape[::2] == (2, 192) and all(isinstance(x.shape[i], torch.SymInt) for x, i in ((out, 1), (lse, 2)))


def test_unsupported__names_the_missing_requirement():
    half = Problem(1, 2, 50, 50, 64, torch.bfloat16, "cuda")
    reason = attention.get("pallas_flash").unsupported(half)
    if not torch.cuda.is_available():
        assert "no CUDA device" in reason
    elif jax.__version_info__ < (0, 11, 2):
        assert "jax 0.11.2" in reason
    elif torch.cuda.get_device_capability() != (9, 0):
        assert "Hopper" in reason
    else:
        assert reason is None


def test_unsupported__message(monkeypatch):
    module = importlib.import_module("vitkernels.attention.pallas_flash")
    monkeypatch.setattr(module, "_no_hopper", None)  # as if on a Hopper GPU; nothing is launched
    half = Problem(1, 2, 50, 50, 64, torch.bfloat16, "cuda")
    reason = lambda **changes: module.BACKEND.unsupported(dataclasses.replace(half, **changes))  # noqa: E731
    assert reason() is None
    assert reason(bias_shape=(50, 50)) is None
    assert reason(has_segment_ids=True) is None
    assert all(reason(has_mask=True, mask_shape=shape) is None for shape in ((50,), (1, 1, 1, 50), (50, 50)))
    assert "float32" in reason(dtype=torch.float32)
    assert "not 136" in reason(head_dim=136)
    assert "dropout" in reason(dropout_p=0.1)
