"""Segments and masks of keys in the Hopper kernels of pallas_flash: interpreted kernels with ids."""

import math

import pytest
import torch
from hopper import MIXED, ODD, RECURRING, SHORT, TWO, error, needs_new_jax, segments

from vitkernels.testing.attention_reference import TOLERANCE, reference


def ring_kernels(
    problem: tuple, q, k, v, do, ids: list, forward_problem: tuple | None = None, overlaps: bool = False
) -> tuple:
    """Return out, dq, dk and dv of the ring kernels, given JAX arrays (B, N, H, D) and the ids of `token_ids`.

    forward_problem: that of the forward kernel if it differs. overlaps: whether it is OverlappedForward.
    """
    from vitkernels.attention.pallas_flash.hopper.backward import Backward
    from vitkernels.attention.pallas_flash.hopper.forward import Forward
    from vitkernels.attention.pallas_flash.hopper.overlapped_forward import OverlappedForward

    forward = OverlappedForward if overlaps else Forward
    out, lse = forward(*(forward_problem or problem))(q, k, v, *ids)
    backward = Backward(*problem)
    dq, delta = backward.dq(q, k, v, out, do, lse, *ids)
    return out, dq, *backward.dkdv(q, k, v, do, lse, delta, *ids)


@pytest.mark.usefixtures("detects_races")
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


@pytest.mark.usefixtures("detects_races")
@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize("D", [64, 128])
def test_overlapped_forward__with_masked_keys__interpreted(D):
    """The first tiles have no masked key in one batch entry, and only masked keys in another; the third has no other.

    Its outputs are zeros.
    """
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.overlapped_forward import OverlappedForward
    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule
    from vitkernels.attention.pallas_flash.hopper.token_ids import given, token_ids

    B, H, N, M = 3, 2, 70, 330
    q, k, v = (torch.randn(B, n, H, D).bfloat16() for n in (N, M, M))
    mask = torch.ones(B, 1, 1, M, dtype=torch.bool)
    mask[0, ..., 240:300], mask[1, ..., :150], mask[2] = False, False, False
    exact = reference(*(x.double().transpose(1, 2) for x in (q, k, v)), mask=mask, scale=0.1)
    ids = [jnp.asarray(x.numpy()) for x in given(token_ids((B, H, N, D), M, mask, None))]
    chunks = ids[2].shape[1], ids[3].shape[1]
    problem = (B, H, N, M, D, "bfloat16", 0.1, False, H, (0, 0, 0), Schedule(64, 2, 2), True, 1, chunks)
    out, _ = OverlappedForward(*problem)(*(jnp.asarray(x.float().numpy(), "bfloat16") for x in (q, k, v)), *ids)
    found = torch.tensor(out.astype("float32").tolist()).transpose(1, 2)
    assert error(found, exact) < TOLERANCE[torch.bfloat16]


@pytest.mark.usefixtures("detects_races")
@pytest.mark.slow
@needs_new_jax
def test_quads__interpreted():
    """Segments of 1 to 300 tokens, with narrow and wide last tiles; each thread block runs several quads, or none."""
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
    ids = [jnp.asarray(x.numpy()) for x in given(token_ids((B, H, N, D), N, None, segment_ids, moves_chunks=True))]
    chunks = ids[2].shape[1], ids[3].shape[1]
    cotangent = do.double().transpose(1, 2)
    q, k, v, do = (jnp.asarray(x.float().numpy(), "bfloat16") for x in (q, k, v, do))
    for blocks, scale in ((3, 0.1), (40, -0.1), (3, 0.0)):
        exact = reference(*leaves, segment_ids=segment_ids, scale=scale)
        wanted = exact, *torch.autograd.grad(exact, leaves, cotangent)
        schedule = Schedule(64, 2, 3, is_listed=True)
        of_others = (B, H, N, N, D, "bfloat16", scale, False, H, (0, 0, 0), schedule, True, blocks, chunks)
        problem = (*of_others[:10], None, *of_others[11:])
        out, lse = ShortForward(*problem)(q, k, v, *ids)
        short = out, *ShortBackward(*problem)(q, k, v, out, do, lse, *ids)
        others = ring_kernels(of_others, q, k, v, do, ids, overlaps=True)  # as calls with quads have it
        in_quads = (segment_ids[:, :, None] == segment_ids[:, None]).sum(2) <= 256
        in_quads[2] = False
        for name, x, y, z in zip(("out", "dq", "dk", "dv"), short, others, wanted, strict=True):
            x, y = (torch.tensor(x.astype("float32").tolist()) for x in (x, y))
            x = torch.where(in_quads[:, :, None, None], x, y).transpose(1, 2)
            if scale == 0 and name in ("dq", "dk"):
                assert not x.any()
            else:
                assert error(x, z) < TOLERANCE[torch.bfloat16], (name, scale)


@pytest.mark.usefixtures("detects_races")
@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize(
    "entries, H, D, dtype, warpgroups, tile, buffers, blocks",
    [
        ([MIXED, TWO], 2, 32, torch.bfloat16, 2, 64, 2, 5),
        ([ODD, RECURRING], 1, 72, torch.float16, 2, 128, 2, 3),
        ([SHORT], 1, 40, torch.bfloat16, 3, 64, 1, 2),
        ([MIXED], 1, 32, torch.bfloat16, 2, 128, 2, 40),
        ([segments((0, 300), (1, 70)), segments((0, 150), (1, 70), (0, 150))], 1, 104, torch.bfloat16, 2, 128, 2, 3),
    ],
)
def test_packed_segments__interpreted(entries, H, D, dtype, warpgroups, tile, buffers, blocks):
    """Segments of 1 to 300 tokens, whose last chunks are partly or entirely empty; blocks without an item.

    With three warpgroups, and in the forward kernel up to head dim 96, work items are listed. Beyond, that kernel
    overlaps.
    """
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
    schedule = Schedule(tile, 2, warpgroups, buffers, is_listed=warpgroups == 3)
    problem = (B, H, N, N, D, name, 0.1, False, H, (0, 0, 0), schedule, True, blocks, chunks)
    listed = (*problem[:10], Schedule(tile, 2, 3, buffers, is_listed=True), *problem[11:])
    q, k, v, do = (jnp.asarray(x.float().numpy(), name) for x in (q, k, v, do))
    found = ring_kernels(problem, q, k, v, do, ids, listed if D <= 96 else None, overlaps=D > 96)
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        x = torch.tensor(x.astype("float32").tolist()).transpose(1, 2)
        assert error(x, y) < TOLERANCE[dtype], name


@pytest.mark.usefixtures("detects_races")
@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize("overlaps", [False, True])
def test_last_tiles_of_segments__are_narrowed__interpreted(overlaps):
    """The last tiles of 128 rows have 65, 16, 73, 17 and 128, those of 64 backward have 1, 16, 9, 17 and 64.

    The ring kernels do not write rows in quads: they stay NaN.
    """
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule
    from vitkernels.attention.pallas_flash.hopper.token_ids import given, token_ids

    segment_ids = torch.stack([segments((0, 321), (1, 272), (2, 65)), segments((0, 329), (1, 273), (2, 56))])
    segment_ids = torch.cat([segment_ids, torch.full((2, 384), 3)], 1)
    (B, N), H, D = segment_ids.shape, 1, 48
    q, k, v, do = (torch.randn(B, N, H, D).bfloat16() for _ in range(4))
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    exact = reference(*leaves, segment_ids=segment_ids, scale=0.1)
    wanted = exact, *torch.autograd.grad(exact, leaves, do.double().transpose(1, 2))

    ids = [jnp.asarray(x.numpy()) for x in given(token_ids((B, H, N, D), N, None, segment_ids, moves_chunks=True))]
    chunks = ids[2].shape[1], ids[3].shape[1]
    schedule = Schedule(64, 4, 3, is_listed=True)
    problem = (B, H, N, N, D, "bfloat16", 0.1, False, H, (0, 0, 0), schedule, True, 3, chunks)
    listed = (*problem[:10], Schedule(128, 2, 3, is_listed=True), *problem[11:])
    q, k, v, do = (jnp.asarray(x.float().numpy(), "bfloat16") for x in (q, k, v, do))
    found = ring_kernels(problem, q, k, v, do, ids, listed, overlaps)
    in_quads = segment_ids == 2
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        x, y = torch.tensor(x.astype("float32").tolist()), y.transpose(1, 2)
        assert error(x[~in_quads], y[~in_quads]) < TOLERANCE[torch.bfloat16], name
        assert x[in_quads].isnan().all(), name


@needs_new_jax
def test_listed_items__outnumber_the_chunks_of_a_batch_entry__interpreted():
    from vitkernels.attention.pallas_flash.hopper.chunks import ITEMS

    B, N, H, D = 12, 257, 1, 48
    q, k, v = (torch.randn(B, N, H, D).bfloat16() for _ in range(3))
    segment_ids = torch.zeros(B, N, dtype=torch.int32)
    exact = reference(*(x.double().transpose(1, 2) for x in (q, k, v)), segment_ids=segment_ids, scale=0.1)
    found, _, ids = overlapped_forward_of_segments(q, k, v, segment_ids)
    assert ids[4][ITEMS] == 24 > ids[2].shape[1]
    assert error(found, exact) < TOLERANCE[torch.bfloat16]


@pytest.mark.usefixtures("detects_races")
@pytest.mark.slow
@needs_new_jax
def test_overlapped_forward__compares_ids_that_recur__interpreted():
    """The other batch entry is one segment, and compares none."""
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.chunks import ITEMS

    segment_ids = torch.stack([segments((0, 303)), segments((0, 150), (1, 151), (0, 2))])
    (B, N), H, D = segment_ids.shape, 2, 48
    q, k, v = (torch.randn(B, N, H, D).bfloat16() for _ in range(3))
    exact = reference(*(x.double().transpose(1, 2) for x in (q, k, v)), segment_ids=segment_ids, scale=0.1)
    found, lse, ids = overlapped_forward_of_segments(q, k, v, segment_ids)
    assert ids[4][ITEMS] == 4
    assert error(found, exact) < TOLERANCE[torch.bfloat16]
    assert jnp.isinf(lse[:, :, N:320]).all() and jnp.isfinite(lse[:, :, :N]).all()


@pytest.mark.usefixtures("detects_races")
@pytest.mark.slow
@needs_new_jax
def test_overlapped_forward__stores_nothing_if_all_segments_are_in_quads__interpreted():
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.chunks import ITEMS

    segment_ids = torch.stack([segments((0, 150), (1, 153))] * 2)
    q, k, v = (torch.randn(*segment_ids.shape, 2, 48).bfloat16() for _ in range(3))
    found, lse, ids = overlapped_forward_of_segments(q, k, v, segment_ids)
    assert ids[4][ITEMS] == 0
    assert found.isnan().all() and jnp.isnan(lse).all()


def overlapped_forward_of_segments(q, k, v, segment_ids) -> tuple:
    """Return the output (B, H, N, D), the log-sum-exp, and what token_ids returned, of arrays (B, N, H, D)."""
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.overlapped_forward import OverlappedForward
    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule
    from vitkernels.attention.pallas_flash.hopper.token_ids import given, token_ids

    B, N, H, D = q.shape
    ids = [jnp.asarray(x.numpy()) for x in given(token_ids((B, H, N, D), N, None, segment_ids, moves_chunks=True))]
    chunks = ids[2].shape[1], ids[3].shape[1]
    schedule = Schedule(128, 3, 3, is_listed=True)
    problem = (B, H, N, N, D, "bfloat16", 0.1, False, H, (0, 0, 0), schedule, True, 3, chunks)
    out, lse = OverlappedForward(*problem)(*(jnp.asarray(x.float().numpy(), "bfloat16") for x in (q, k, v)), *ids)
    return torch.tensor(out.astype("float32").tolist()).transpose(1, 2), lse, ids


@pytest.mark.usefixtures("detects_races")
@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize("is_long, scale", [(True, 0.1), (True, -0.1), (False, 0.1)])
def test_fused_backward__with_segments__interpreted(is_long, scale):
    """Entries with 6 and 3 items; segments in quads, which the kernel leaves alone.

    If the segments are not long, the kernels find nothing to do, else the pair does. In one thread block, no turn is
    waited for.
    """
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.backward import Backward
    from vitkernels.attention.pallas_flash.hopper.chunks import LONG_CHUNKS, LONG_SURPLUS
    from vitkernels.attention.pallas_flash.hopper.forward import Forward
    from vitkernels.attention.pallas_flash.hopper.fused_backward import FusedBackward
    from vitkernels.attention.pallas_flash.hopper.fused_order import Starts
    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule
    from vitkernels.attention.pallas_flash.hopper.short_forward import ShortForward
    from vitkernels.attention.pallas_flash.hopper.token_ids import given, token_ids

    entries = [
        segments((0, 257), (1, 320)),
        segments((0, 100), (1, 321), (2, 156)),
    ]
    segment_ids = torch.stack(entries)
    (B, N), H, D = segment_ids.shape, 1, 48
    q, k, v, do = (torch.randn(B, N, H, D).bfloat16() for _ in range(4))
    # Low scores: a padded key's score of 0 would have an infinite weight.
    q[1, ..., 0], k[1, ..., 0] = math.copysign(60, scale), -60
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    exact = reference(*leaves, segment_ids=segment_ids, scale=scale)
    wanted = torch.autograd.grad(exact, leaves, do.double().transpose(1, 2))

    ids = [jnp.asarray(x.numpy()) for x in given(token_ids((B, H, N, D), N, None, segment_ids, moves_chunks=True))]
    # No segment is long enough for the kernel to be faster. Items of both entries alternate, also empty ones.
    ids[4] = ids[4].at[LONG_SURPLUS].set(int(is_long)).at[LONG_CHUNKS].set(1)
    chunks = ids[2].shape[1], ids[3].shape[1]
    schedule = Schedule(64, 3, 3, is_listed=True)
    problem = (B, H, N, N, D, "bfloat16", scale, False, H, (0, 0, 0), schedule, True, 1, chunks)
    q, k, v, do = (jnp.asarray(x.float().numpy(), "bfloat16") for x in (q, k, v, do))
    long, lse = Forward(*problem)(q, k, v, *ids)
    short, _ = ShortForward(*problem[:10], None, *problem[11:])(q, k, v, *ids)
    out = jnp.where(jnp.isnan(long), short, long)
    wide = (*problem[:10], Schedule(128, 2, 2), *problem[11:])
    starts = Starts(*wide)(out, do, lse, *ids)
    fused = FusedBackward(*wide)(q, k, v, do, *starts, *ids)[:3]
    pair = Backward(*problem, yields=True)
    dq, of_pair = pair.dq(q, k, v, out, do, lse, *ids)
    results = fused if is_long else (dq, *pair.dkdv(q, k, v, do, lse, of_pair, *ids))
    in_quads = (segment_ids[:, :, None] == segment_ids[:, None]).sum(2) <= 256
    for name, x, y in zip(("dq", "dk", "dv"), results, wanted, strict=True):
        x, y = torch.tensor(x.astype("float32").tolist()), y.transpose(1, 2)
        x_stored, y_stored = (
            x[~in_quads][..., 1:],
            y[~in_quads][..., 1:],
        )  # column 0 of dq sums large numbers that cancel
        assert x_stored.isfinite().all() and error(x_stored, y_stored) < TOLERANCE[torch.bfloat16], name
        assert x[in_quads].isnan().all(), name  # nothing was stored
    idle = (dq, of_pair) if is_long else (*starts[:2], *fused)
    assert all(jnp.isnan(x).all() for x in idle)


@pytest.mark.usefixtures("detects_races")
@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize(
    "N, M, D, has_segments, has_mask",
    [(130, 140, 64, False, True), (135, 135, 40, True, True), (197, 197, 64, True, False), (70, 100, 64, False, True)],
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
