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
# head dims in two parts, a single tile; blocks that process several work items, in unequal numbers, with no common
# divisor of tiles, stages and buffers.
CASES = [
    (2, 70, 64, torch.bfloat16, False, 0.125, 2, 1, 1),
    (2, 130, 72, torch.float16, True, 0.1, 2, 1, 1),
    (3, 130, 40, torch.bfloat16, False, 0.1, 2, 2, 1),
    (3, 200, 64, torch.bfloat16, True, 0.1, 3, 2, 4),
    (3, 50, 32, torch.bfloat16, False, -0.2, 1, 2, 2),
    (1, 130, 32, torch.float16, True, 0.1, 1, 2, 1),
]


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


@pytest.mark.slow
@needs_new_jax
def test_short_forward__interpreted():
    """Run five heads in two thread blocks, so that both buffers are reused; the last tiles are nearly empty."""
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.short_forward import ShortForward

    class TwoBlocks(ShortForward):
        blocks = 2

    H, N, M, D = 5, 130, 140, 64
    q, k, v = (torch.randn(1, n, H, D).bfloat16() for n in (N, M, M))
    scores = torch.einsum("bnhd,bmhd->bhnm", q.double(), k.double()) * 0.1
    exact = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v.double())

    array = lambda x: jnp.asarray(x.float().numpy(), "bfloat16")  # noqa: E731
    forward = TwoBlocks(1, H, N, M, D, "bfloat16", 0.1, False, H, (0, 0, 0), None, True)
    out, lse = (torch.tensor(x.astype("float32").tolist()) for x in forward(*map(array, (q, k, v))))
    assert error(out, exact) < TOLERANCE[torch.bfloat16]
    assert (lse[:, :, :N] - scores.logsumexp(-1) / math.log(2)).abs().max() < 1e-5  # as above


@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize("shift", [0, -140])
def test_short_backward__interpreted(shift):
    """Run two heads in sequence in one thread block, so that every buffer is reused.

    shift: offset of all scores. Softmax is invariant to it, but exp2 of the padding beyond the last key is not.
    """
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.short_backward import ShortBackward

    class OneBlock(ShortBackward):
        blocks = 1

    H, N, M, D = 2, 130, 140, 64
    q, k, v, do = (torch.randn(1, n, H, D).bfloat16() for n in (N, M, M, N))
    if shift:
        q[..., 0], k[..., 0] = 8, shift / 0.8
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * 0.1
    out = (scores.softmax(-1) @ leaves[2]).transpose(1, 2)
    exact = torch.autograd.grad(out, leaves, do.double())
    lse = torch.zeros(1, H, 256)
    lse[:, :, :N] = scores.logsumexp(-1) / math.log(2)

    array = lambda x: jnp.asarray(x.detach().float().numpy(), "bfloat16")  # noqa: E731
    backward = OneBlock(1, H, N, M, D, "bfloat16", 0.1, False, H, (0, 0, 0), None, True)
    found = backward(*map(array, (q, k, v, out, do)), jnp.asarray(lse.detach().numpy()))
    for name, x, y in zip(("dq", "dk", "dv"), found, exact, strict=True):
        x = torch.tensor(x.astype("float32").tolist()).transpose(1, 2)
        # Skip the shifted column: in dq it is a sum of large numbers that cancel.
        assert x.isfinite().all() and error(x[..., 1:], y[..., 1:]) < TOLERANCE[torch.bfloat16], name


@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize("H, N, M, D, stages", [(2, 130, 300, 64, 3), (3, 200, 130, 48, 2)])
def test_fused_backward__interpreted(H, N, M, D, stages):
    """Run all items in one thread block, so that no turn is waited for and every buffer is reused."""
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.fused_backward import FusedBackward
    from vitkernels.attention.pallas_flash.hopper.fused_order import Delta
    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule

    q, k, v, do = (torch.randn(1, n, H, D).bfloat16() for n in (N, M, M, N))
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * 0.1
    out = (scores.softmax(-1) @ leaves[2]).transpose(1, 2)
    exact = torch.autograd.grad(out, leaves, do.double())
    lse = torch.zeros(1, H, 256)
    lse[:, :, :N] = scores.logsumexp(-1) / math.log(2)

    array = lambda x: jnp.asarray(x.detach().float().numpy(), "bfloat16")  # noqa: E731
    problem = (1, H, N, M, D, "bfloat16", 0.1, False, H, (0, 0, 0), Schedule(64, stages, 2), True, 1)
    delta, counters = Delta(*problem)(*map(array, (out, do)))
    assert error(torch.tensor(delta.tolist())[:, :, :N], (out * do.double()).sum(-1).transpose(1, 2)) < 2**-8
    found = FusedBackward(*problem)(*map(array, (q, k, v, do)), jnp.asarray(lse.detach().numpy()), delta, counters)
    for name, x, y in zip(("dq", "dk", "dv"), found, exact, strict=False):
        x = torch.tensor(x.astype("float32").tolist()).transpose(1, 2)
        assert error(x, y) < TOLERANCE[torch.bfloat16], name


@needs_new_jax
@pytest.mark.parametrize("B, H, N, blocks", [(3, 7, 1025, 132), (1, 40, 1025, 132), (2, 16, 4096, 132), (5, 3, 300, 1)])
def test_fused_backward__waits_only_for_items_drawn_before(B, H, N, blocks):
    """So some thread block can always proceed, whichever blocks run."""
    from vitkernels.attention.pallas_flash.hopper.fused_backward import FusedBackward
    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule

    schedule = Schedule(64, 3, 2)
    kernel = FusedBackward(B, H, N, N, 64, "bfloat16", 0.1, False, H, (0, 0, 0), schedule, True, multiprocessors=blocks)
    count = kernel.work_items(N)
    with jax.disable_jit():
        items = [kernel.item(jax.numpy.int32(i)) for i in range(count)]
    drawn = {(int(item.batch), int(item.head), int(item.tile)): i for i, item in enumerate(items)}
    assert sorted(drawn) == [(b, h, t) for b in range(B) for h in range(H) for t in range(kernel.key_blocks)]
    assert all(t == 0 or drawn[b, h, t - 1] < i for (b, h, t), i in drawn.items())


@needs_new_jax
def test_fused_backward__for_long_unmasked_self_attention():
    from vitkernels.attention.pallas_flash.hopper.schedule import fused_backward_schedule

    chosen = lambda *call: fused_backward_schedule(*call) is not None  # noqa: E731
    assert chosen(512, 1025, 1025, 64, False) and chosen(128, 4096, 4096, 40, False)
    assert not chosen(640, 777, 777, 64, False) and not chosen(512, 1025, 1025, 80, False)
    assert not chosen(512, 1025, 1025, 64, True) and not chosen(512, 1025, 2048, 64, False)
    assert not chosen(12, 1025, 1025, 64, False)  # too few heads to keep the items of a head apart


def ring_kernels(problem: tuple, q, k, v, do, ids: list, forward_problem: tuple | None = None) -> tuple:
    """Return out, dq, dk and dv of the ring kernels, given JAX arrays (B, N, H, D) and the ids of `token_ids`.

    forward_problem: that of the forward kernel if it differs.
    """
    from vitkernels.attention.pallas_flash.hopper.backward import Backward
    from vitkernels.attention.pallas_flash.hopper.forward import Forward

    out, lse = Forward(*(forward_problem or problem))(q, k, v, *ids)
    backward = Backward(*problem)
    dq, delta = backward.dq(q, k, v, out, do, lse, *ids)
    return out, dq, *backward.dkdv(q, k, v, do, lse, delta, *ids)


@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize(
    "H, N, M, D, is_causal, scale, warpgroups, buffers, blocks",
    [
        (2, 100, 100, 32, False, 0.1, 2, 2, 3),
        (1, 70, 130, 40, False, 0.1, 2, 1, 1),
        (1, 150, 150, 32, True, -0.2, 1, 2, 2),
    ],
)
def test_ids__interpreted(H, N, M, D, is_causal, scale, warpgroups, buffers, blocks):
    """Segments, masked keys, and queries without keys, whose results are zeros."""
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule
    from vitkernels.attention.pallas_flash.hopper.token_ids import given, token_ids

    B = 2
    q, k, v, do = (torch.randn(B, n, H, D).bfloat16() for n in (N, M, M, N))
    mask = torch.ones(B, 1, 1, M, dtype=torch.bool)
    mask[0, ..., 40:80], mask[1, ..., 3:7] = False, False  # with segments, queries 40 to 79 have no key
    segment_ids = torch.arange(N).expand(B, -1) // 40 if N == M else None
    ids = token_ids((B, H, N, D), M, mask, segment_ids)
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    exact = reference(*leaves, mask=mask, segment_ids=segment_ids, is_causal=is_causal, scale=scale)
    wanted = exact, *torch.autograd.grad(exact, leaves, do.double().transpose(1, 2))

    schedule = Schedule(64, 2, warpgroups, buffers)
    chunks = ids[2].shape[1], ids[3].shape[1]
    problem = (B, H, N, M, D, "bfloat16", scale, is_causal, H, (0, 0, 0), schedule, True, blocks, chunks)
    q, k, v, do = (jnp.asarray(x.float().numpy(), "bfloat16") for x in (q, k, v, do))
    ids = [jnp.asarray(x.numpy()) for x in given(ids)]
    found = ring_kernels(problem, q, k, v, do, ids)
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        x = torch.tensor(x.astype("float32").tolist()).transpose(1, 2)
        assert error(x, y) < TOLERANCE[torch.bfloat16], name
        assert name in ("dq", "dk") or not x[y == 0].any()  # rows without keys, keys that no query sees: exact zeros


def segments(*runs: tuple[int, int]) -> torch.Tensor:
    """Return the ids of consecutive segments, given as (id, tokens)."""
    return torch.cat([torch.full((tokens,), i) for i, tokens in runs])


MIXED = segments((5, 1), (-3, 64), (900, 65), (7, 130))  # 1, 1, 2 and 4 chunks
TWO = segments((0, 197), (1, 63))
ODD = segments((4, 30), (0, 100), (1, 33), (2, 47), (3, 20))
RECURRING = segments((0, 70), (1, 120), (0, 40))
SHORT = segments(*((i, 10) for i in range(26)))  # would need more chunks than there are


@needs_new_jax
def test_packed_chunks__start_where_segments_start():
    from vitkernels.attention.pallas_flash.hopper.chunks import PADDING
    from vitkernels.attention.pallas_flash.hopper.packed_segments import packed_chunks

    ids, chunks, used = packed_chunks(torch.stack([MIXED, TWO, torch.cat([ODD, ODD[:30]]), SHORT]), False)
    assert used.tolist() == [8, 8, 3, 0] and chunks.shape == (4, 18, 32) and ids.shape == (4, 18 * 64)
    # First and end of the needed chunks, the first that needs a comparison, first row and number of rows.
    assert chunks[1, :6, :5].tolist() == [
        [0, 4, 3, 0, 64], [0, 4, 3, 64, 64], [0, 4, 3, 128, 64], [0, 4, 3, 192, 5],
        [4, 5, 4, 197, 63], [4, 5, 4, 260, 0],
    ]  # fmt: skip
    assert chunks[0, :9, :5].tolist() == [
        [0, 1, 0, 0, 1], [1, 2, 2, 1, 64], [2, 4, 3, 65, 64], [2, 4, 3, 129, 1],
        [4, 7, 6, 130, 64], [4, 7, 6, 194, 64], [4, 7, 6, 258, 2], [4, 7, 6, 260, 0], [18, 0, 18, 260, 0],
    ]  # fmt: skip
    assert ids[1, :197].unique().tolist() == [0] and ids[1, 256:319].unique().tolist() == [4]
    assert ids[1, 197:256].unique().tolist() == ids[1, 319:384].unique().tolist() == [PADDING]
    for entry, whole in ((2, torch.cat([ODD, ODD[:30]])), (3, SHORT)):  # recurs; too short
        assert torch.equal(ids[entry, :260], whole.int()) and (ids[entry, 260:384] == PADDING).all()
        assert chunks[entry, :6, :5].tolist() == [[0, 5, 0, 64 * i, 64 * (i < 5)] for i in range(5)] + [
            [0, 5, 0, 260, 0]
        ]


@needs_new_jax
def test_masked_ids__name_the_chunks_that_need_a_comparison():
    """Keys 0 to 99 are kept: the first chunk entirely, the second partly, the third not at all."""
    from vitkernels.attention.pallas_flash.hopper.chunks import MASKED, PADDING
    from vitkernels.attention.pallas_flash.hopper.token_ids import token_ids

    mask = (torch.arange(150) < 100).expand(2, 1, 1, 150)
    q_ids, k_ids, q_chunks, k_chunks, used = token_ids((2, 3, 70, 64), 150, mask, None)
    assert used.tolist() == [2, 3, 0, 0] and q_chunks.shape == k_chunks.shape == (2, 4, 32)
    # First and end of the needed chunks, the first that needs a comparison, first row and number of rows.
    assert q_chunks[1, :3, :5].tolist() == [[0, 2, 1, 0, 64], [0, 2, 1, 64, 64], [4, 0, 4, 128, 0]]
    assert k_chunks[1, :4, :5].tolist() == [[0, 2, 1, 0, 64], [0, 2, 0, 64, 64], [4, 0, 4, 128, 64], [4, 0, 4, 192, 0]]
    assert q_ids[1].tolist() == [0] * 70 + [PADDING] * 186
    assert k_ids[1].tolist() == [0] * 100 + [MASKED] * 50 + [PADDING] * 106


@needs_new_jax
def test_packed_chunks__leave_an_odd_chunk_empty_before_a_longer_segment():
    from vitkernels.attention.pallas_flash.hopper.packed_segments import packed_chunks

    _, chunks, used = packed_chunks(ODD[None], False)
    assert used.tolist() == [8, 8, 4, 0]
    assert chunks[0, :8, 3].tolist()[::2] == [0, 30, 130, 210] and chunks[0, 5, 3] == 163
    assert chunks[0, :8, 4].tolist() == [30, 0, 64, 36, 33, 47, 20, 0]


@needs_new_jax
def test_packed_chunks__are_listed_as_work_items():
    """10 chunks become items of 2, 3, 2 and 3; a pair of chunks of two short segments is one item."""
    from vitkernels.attention.pallas_flash.hopper.packed_segments import packed_chunks

    ids = segments((0, 577), (1, 60), (2, 40), (3, 30), (4, 256), (5, 197))
    _, chunks, used = packed_chunks(ids[None].to(torch.uint8), False)
    assert used.tolist() == [22, 22, 10, 0]
    # The item's first chunk and number of chunks; first and end of those it needs, and the first to be compared.
    assert chunks[0, :11, 8:13].tolist() == [
        [0, 2, 0, 10, 9], [2, 3, 0, 10, 9], [5, 2, 0, 10, 9], [7, 3, 0, 10, 9], [10, 2, 10, 12, 10],
        [12, 2, 12, 14, 12], [14, 2, 14, 18, 18], [16, 2, 14, 18, 18], [18, 2, 18, 22, 21], [20, 2, 18, 22, 21],
        [0, 0, 0, 0, 0],
    ]  # fmt: skip


@needs_new_jax
@pytest.mark.parametrize("chunks, rows", [(0, [320, 320, 320]), (2, [320, 384, 384]), (3, [320, 384, 448])])
def test_listed_items__have_no_rows_beyond_their_chunks(chunks, rows):
    """Of a batch entry with fewer items than another one, the others are empty."""
    from vitkernels.attention.pallas_flash.hopper.forward import Forward
    from vitkernels.attention.pallas_flash.hopper.ring import WorkItem
    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule

    schedule = Schedule(128, 2, 3, is_listed=True)
    kernel = Forward(1, 1, 300, 300, 64, "bfloat16", 0.1, False, 1, (0, 0, 0), schedule, True, 132, (20, 20))
    item = WorkItem(0, 0, 0, 0, 0, chunk=5, chunks=chunks)
    assert [int(kernel.first_row(item, jax.numpy.int32(i))) for i in range(3)] == rows


@needs_new_jax
def test_packed_chunks__form_quads_behind_long_segments():
    """Segments of up to 256 tokens do not cross from one quad to the next; recurring ids have no quads."""
    from vitkernels.attention.pallas_flash.hopper.chunks import PADDING
    from vitkernels.attention.pallas_flash.hopper.packed_segments import packed_chunks

    mixed = segments((0, 64), (1, 300), (2, 65), (3, 129), (4, 256), (5, 10))  # 1, 5, 2, 3, 4 and 1 chunks
    recurring = segments((0, 300), (1, 300), (0, 224))
    ids, chunks, used = packed_chunks(torch.stack([mixed, recurring]), True)
    assert used.tolist() == [14, 14, 5, 3]
    # The long segment's chunks come first, in two work items.
    assert chunks[0, :6, :5].tolist() == [
        [0, 5, 4, 64, 64], [0, 5, 4, 128, 64], [0, 5, 4, 192, 64], [0, 5, 4, 256, 64], [0, 5, 4, 320, 44],
        [0, 5, 4, 384, 0],
    ]  # fmt: skip
    assert chunks[0, :3, 8:13].tolist() == [[0, 2, 0, 5, 4], [2, 3, 0, 5, 4], [0, 0, 0, 0, 0]]
    # No rows, and no other chunks, for the other kernels.
    assert not chunks[0, 8:20, 4].any() and not chunks[0, 8:20, 1].any()
    # Of each of a quad's chunks the first row, the number of rows, and the first and end of the needed chunks.
    quads = sorted(chunks.flatten(0, 1)[:3, 16:].view(3, 4, 4).tolist(), key=lambda quad: quad[0][2])
    assert quads == [
        [[558, 64, 8, 12], [622, 64, 8, 12], [686, 64, 8, 12], [750, 64, 8, 12]],
        [[429, 64, 12, 15], [493, 64, 12, 15], [557, 1, 12, 15], [0, 64, 15, 16]],
        [[364, 64, 16, 18], [428, 1, 16, 18], [814, 10, 18, 19], [824, 0, 18, 18]],
    ]
    assert chunks[1, :14, 4].tolist() == [64] * 13 + [0]
    assert [x.unique().tolist() for x in ids[0, 512:1280].view(12, 64)] == [
        [8], [8], [8], [8], [12], [12], [PADDING, 12], [15], [16], [PADDING, 16], [PADDING, 18], [PADDING],
    ]  # fmt: skip


@pytest.mark.slow
@needs_new_jax
def test_quads__interpreted():
    """Segments of 1 to 300 tokens; each thread block runs several quads, or none."""
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule
    from vitkernels.attention.pallas_flash.hopper.short_backward import ShortBackward
    from vitkernels.attention.pallas_flash.hopper.short_forward import ShortForward
    from vitkernels.attention.pallas_flash.hopper.token_ids import given, token_ids

    entries = [
        segments((0, 197), (1, 1), (2, 66), (3, 256), (4, 40)),
        segments((0, 300), (1, 129), (2, 131)),
        segments((0, 200), (1, 200), (0, 160)),  # recurs: no quads
    ]
    segment_ids = torch.stack(entries)
    (B, N), H, D = segment_ids.shape, 2, 48
    q, k, v, do = (torch.randn(B, N, H, D).bfloat16() for _ in range(4))
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    exact = reference(*leaves, segment_ids=segment_ids, scale=0.1)
    wanted = exact, *torch.autograd.grad(exact, leaves, do.double().transpose(1, 2))

    ids = [jnp.asarray(x.numpy()) for x in given(token_ids((B, H, N, D), N, None, segment_ids, moves_chunks=True))]
    chunks = ids[2].shape[1], ids[3].shape[1]
    q, k, v, do = (jnp.asarray(x.float().numpy(), "bfloat16") for x in (q, k, v, do))
    for blocks in (3, 40):
        of_others = (B, H, N, N, D, "bfloat16", 0.1, False, H, (0, 0, 0), Schedule(64, 2, 2), True, blocks, chunks)
        problem = (*of_others[:10], None, *of_others[11:])
        out, lse = ShortForward(*problem)(q, k, v, *ids)
        short = out, *ShortBackward(*problem)(q, k, v, out, do, lse, *ids)
        others = ring_kernels(of_others, q, k, v, do, ids)
        in_quads = (segment_ids[:, :, None] == segment_ids[:, None]).sum(2) <= 256
        in_quads[2] = False
        for name, x, y, z in zip(("out", "dq", "dk", "dv"), short, others, wanted, strict=True):
            x, y = (torch.tensor(x.astype("float32").tolist()) for x in (x, y))
            x = torch.where(in_quads[:, :, None, None], x, y).transpose(1, 2)
            assert error(x, z) < TOLERANCE[torch.bfloat16], (name, blocks)


@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize(
    "entries, H, D, dtype, warpgroups, tile, buffers, blocks",
    [
        ([MIXED, TWO], 2, 32, torch.bfloat16, 2, 64, 2, 5),
        ([ODD, RECURRING], 1, 72, torch.float16, 2, 128, 2, 3),
        ([SHORT], 1, 40, torch.bfloat16, 1, 64, 1, 2),
        ([MIXED], 1, 32, torch.bfloat16, 2, 128, 2, 40),
    ],
)
def test_packed_segments__interpreted(entries, H, D, dtype, warpgroups, tile, buffers, blocks):
    """Segments of 1 to 197 tokens, whose last chunks are partly or entirely empty; blocks without an item."""
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule
    from vitkernels.attention.pallas_flash.hopper.token_ids import given, token_ids

    segment_ids = torch.stack(entries)
    B, N = segment_ids.shape
    q, k, v, do = (torch.randn(B, N, H, D).to(dtype) for _ in range(4))
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    exact = reference(*leaves, segment_ids=segment_ids, scale=0.1)
    wanted = exact, *torch.autograd.grad(exact, leaves, do.double().transpose(1, 2))

    name = str(dtype).removeprefix("torch.")
    ids = [jnp.asarray(x.numpy()) for x in given(token_ids((B, H, N, D), N, None, segment_ids, moves_chunks=True))]
    chunks = ids[2].shape[1], ids[3].shape[1]
    schedule = Schedule(tile, 2, warpgroups, buffers)
    problem = (B, H, N, N, D, name, 0.1, False, H, (0, 0, 0), schedule, True, blocks, chunks)
    listed = (*problem[:10], Schedule(tile, 2, 3, buffers, is_listed=True), *problem[11:])
    q, k, v, do = (jnp.asarray(x.float().numpy(), name) for x in (q, k, v, do))
    found = ring_kernels(problem, q, k, v, do, ids, listed)
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        x = torch.tensor(x.astype("float32").tolist()).transpose(1, 2)
        assert error(x, y) < TOLERANCE[dtype], name


@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize(
    "H, N, M, D, shape, is_causal, with_ids, warpgroups, blocks, parts",
    [
        (2, 100, 100, 32, (1, 2), False, True, 2, 3, 2),
        (2, 70, 130, 40, (3, 1), False, False, 1, 2, 2),
        (2, 150, 150, 32, (1, 1), True, False, 2, 1, 3),
        (1, 65, 65, 64, (3, 1), True, True, 2, 4, 1),
    ],
)
def test_bias__interpreted(H, N, M, D, shape, is_causal, with_ids, warpgroups, blocks, parts):
    """Biases shared by images, heads or both, with rows that are -inf or absorb their scores."""
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.backward import Backward
    from vitkernels.attention.pallas_flash.hopper.bias import padded_bias
    from vitkernels.attention.pallas_flash.hopper.bias_gradient import BiasGradient
    from vitkernels.attention.pallas_flash.hopper.bias_groups import transposed
    from vitkernels.attention.pallas_flash.hopper.forward import Forward
    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule
    from vitkernels.attention.pallas_flash.hopper.token_ids import given, token_ids

    B = 3
    q, k, v, do = (torch.randn(B, n, H, D).bfloat16() for n in (N, M, M, N))
    bias = torch.randn(*shape, N, M)
    bias[:, :, 5], bias[:, :, 6], bias[:, :, 7, 1::2] = -torch.inf, torch.finfo(torch.float32).min, -torch.inf
    bias.requires_grad_()
    segment_ids = torch.arange(N).expand(B, -1) // 40 if with_ids else None
    ids = token_ids((B, H, N, D), M, None, segment_ids)
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    exact_bias = bias.detach().double().requires_grad_()
    exact = reference(*leaves, bias=exact_bias, segment_ids=segment_ids, is_causal=is_causal, scale=0.1)
    wanted = exact, *torch.autograd.grad(exact, [*leaves, exact_bias], do.double().transpose(1, 2))

    prepared = padded_bias(bias, None, N, M, 0.1)
    schedule = Schedule(64, 2, warpgroups)
    chunks = (ids[2].shape[1], ids[3].shape[1]) if with_ids else None
    problem = (B, H, N, M, D, "bfloat16", 0.1, is_causal, H, (0, 0, 0), schedule, True, blocks, chunks, shape)
    q, k, v, do = (jnp.asarray(x.float().numpy(), "bfloat16") for x in (q, k, v, do))
    ids = [jnp.asarray(x.numpy()) for x in given(ids)]
    of_queries_bias, of_keys_bias = (jnp.asarray(x.numpy()) for x in (prepared.detach(), transposed(prepared.detach())))
    out, lse = Forward(*problem)(q, k, v, of_queries_bias, *ids)
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


@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize(
    "N, M, D, has_segments, has_mask",
    [(130, 140, 64, False, True), (135, 135, 40, True, True), (197, 197, 64, True, False)],
)
def test_short_kernels__with_ids__interpreted(N, M, D, has_segments, has_mask):
    """Segments recur, and keys are masked, all of them in one image; each thread block runs two or more heads."""
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.short_backward import ShortBackward
    from vitkernels.attention.pallas_flash.hopper.short_forward import ShortForward
    from vitkernels.attention.pallas_flash.hopper.token_ids import given, token_ids

    B, H = 2, 2
    q, k, v, do = (torch.randn(B, n, H, D).bfloat16() for n in (N, M, M, N))
    segment_ids = torch.arange(N).div(31, rounding_mode="floor").fmod(3).expand(B, -1) if has_segments else None
    mask = (torch.rand(B, M) < 0.7).logical_and(torch.arange(B)[:, None] < 1)[:, None, None] if has_mask else None
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    exact = reference(*leaves, mask=mask, segment_ids=segment_ids, scale=-0.1)
    wanted = exact, *torch.autograd.grad(exact, leaves, do.double().transpose(1, 2))

    ids = [jnp.asarray(x.numpy()) for x in given(token_ids((B, H, N, D), M, mask, segment_ids))]
    chunks = ids[2].shape[1], ids[3].shape[1]
    problem = (B, H, N, M, D, "bfloat16", -0.1, False, H, (0, 0, 0), None, True, 2, chunks)
    q, k, v, do = (jnp.asarray(x.float().numpy(), "bfloat16") for x in (q, k, v, do))
    out, lse = ShortForward(*problem)(q, k, v, *ids)
    found = out, *ShortBackward(*problem)(q, k, v, out, do, lse, *ids)
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        x = torch.tensor(x.astype("float32").tolist()).transpose(1, 2)
        assert error(x, y) < TOLERANCE[torch.bfloat16], name
        assert not has_mask or not x[1].any()  # an image without keys: exact zeros


@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize("shape, N, M", [((1, 2), 130, 140), ((2, 1), 197, 135)])
def test_short_kernels__with_a_bias__interpreted(shape, N, M):
    """Each thread block runs two or more heads; rows of the bias are -inf or absorb their scores."""
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.bias import padded_bias
    from vitkernels.attention.pallas_flash.hopper.bias_groups import summed, transposed
    from vitkernels.attention.pallas_flash.hopper.short_backward import ShortBackward
    from vitkernels.attention.pallas_flash.hopper.short_forward import ShortForward

    B, H, D, scale = 2, 2, 64, 0.1
    q, k, v, do = (torch.randn(B, n, H, D).bfloat16() for n in (N, M, M, N))
    bias = 3 * torch.randn(*shape, N, M)
    bias[:, :, 5], bias[:, :, 6], bias[:, :, 7, 1::2] = -torch.inf, torch.finfo(torch.float32).min, -torch.inf
    bias[:, :, 8, 1::2], bias[:, :, 9] = torch.finfo(torch.float32).min, 1e38
    bias[:, :, 10, 1::2] = 1000.0
    bias.requires_grad_()
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    exact_bias = bias.detach().double().requires_grad_()
    exact = reference(*leaves, bias=exact_bias, scale=scale)
    wanted = exact, *torch.autograd.grad(exact, [*leaves, exact_bias], do.double().transpose(1, 2))

    prepared = padded_bias(bias, None, N, M, scale)
    problem = (B, H, N, M, D, "bfloat16", scale, False, H, (0, 0, 0), None, True, 2, None, shape)
    array = lambda x: jnp.asarray(x.detach().float().numpy(), "bfloat16")  # noqa: E731
    tensor = lambda x: torch.tensor(x.astype("float32").tolist())  # noqa: E731
    q, k, v, do = map(array, (q, k, v, do))
    given, of_keys = (jnp.asarray(x.detach().numpy()) for x in (prepared, transposed(prepared.detach())))
    out, lse = ShortForward(*problem)(q, k, v, given)
    *found, ds = ShortBackward(*problem, stores_ds=True)(q, k, v, out, do, lse, of_keys)

    for name, x, y in zip(("out", "dq", "dk", "dv"), (out, *found), wanted, strict=False):
        assert error(tensor(x).transpose(1, 2), y) < TOLERANCE[torch.bfloat16], name
    gradient = summed(tensor(ds).bfloat16(), shape, N, scale)
    (dbias,) = torch.autograd.grad(prepared, bias, gradient)
    assert error(dbias, wanted[4]) < TOLERANCE[torch.bfloat16]


@needs_new_jax
@pytest.mark.parametrize(
    "N, D, chunks, bias_shape",
    [
        (197, 64, None, None),
        (256, 40, None, None),
        (577, 88, None, None),
        (4096, 128, None, None),
        (4096, 56, None, None),
        (1024, 40, None, None),
        (197, 64, (6, 6), None),
        (256, 64, (6, 6), None),
        (788, 64, (50, 50), None),
        (788, 72, (50, 50), None),
        (788, 128, (50, 50), None),
        (197, 64, (6, 6), (1, 8)),
        (197, 64, None, (1, 8)),
        (256, 40, None, (2, 1)),
        (577, 88, None, (2, 1)),
    ],
)
def test_kernels__lower_without_a_gpu(N, D, chunks, bias_shape):
    """Mosaic GPU checks layouts, copies and shared memory on any machine; only ptxas needs a GPU machine."""
    from vitkernels.attention.pallas_flash.hopper.kernels import AttentionKernels
    from vitkernels.attention.pallas_flash.hopper.schedule import fits_short_backward

    options = True, torch.device("cuda"), chunks, bias_shape
    call = AttentionKernels(2, 8, N, N, D, torch.bfloat16, False, D**-0.5, *options)
    kernels = [call.forward, call.dq, call.dkdv]
    if bias_shape is not None:
        kernels.append(call.bias_gradient)
    if fits_short_backward(N, N, D, chunks is not None and bias_shape is not None):
        kernels.append(call.short_backward)
        if bias_shape is not None:
            kernels.append(call.short_backward_with_ds)
    if (N, D, chunks) == (788, 64, (50, 50)):
        kernels += [call.short_forward, call.short_backward]
    if (N, D) == (4096, 56):
        kernels += [call.delta, call.fused_backward]
    for kernel in kernels:
        assert kernel.module.startswith(b"ML")  # MLIR bytecode


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
