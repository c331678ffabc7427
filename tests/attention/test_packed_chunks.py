"""Segments and masks of keys in the Hopper kernels of pallas_flash: the contents of their chunks."""

import pytest
import torch
from hopper import MIXED, ODD, SHORT, TWO, jax, needs_new_jax, segments


@needs_new_jax
def test_packed_chunks__start_where_segments_start():
    from vitkernels.attention.pallas_flash.hopper.chunks import PADDING
    from vitkernels.attention.pallas_flash.hopper.packed_segments import packed_chunks

    ids, chunks, used = packed_chunks(torch.stack([MIXED, TWO, torch.cat([ODD, ODD[:30]]), SHORT]), False, 1)
    assert used.tolist() == [8, 8, 10, 0, 0, 0, 0] and chunks.shape == (4, 18, 32) and ids.shape == (4, 18 * 64)
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
        assert chunks[entry, :6, :5].tolist() == [[0, 5, 0, 64 * i, min(64, 260 - 64 * i)] for i in range(5)] + [
            [0, 5, 0, 260, 0]
        ]


@needs_new_jax
def test_masked_ids__name_the_chunks_that_need_a_comparison():
    """Keys 0 to 99 are kept: the first chunk entirely, the second partly, the third not at all."""
    from vitkernels.attention.pallas_flash.hopper.chunks import MASKED, PADDING
    from vitkernels.attention.pallas_flash.hopper.token_ids import token_ids

    mask = (torch.arange(150) < 100).expand(2, 1, 1, 150)
    q_ids, k_ids, q_chunks, k_chunks, used = token_ids((2, 3, 70, 64), 150, mask, None)
    assert used.tolist() == [2, 3, 0, 0, 0, 0, 0] and q_chunks.shape == k_chunks.shape == (2, 4, 32)
    # First and end of the needed chunks, the first that needs a comparison, first row and number of rows.
    assert q_chunks[1, :3, :5].tolist() == [[0, 2, 1, 0, 64], [0, 2, 1, 64, 64], [4, 0, 4, 128, 0]]
    assert k_chunks[1, :4, :5].tolist() == [[0, 2, 1, 0, 64], [0, 2, 0, 64, 64], [4, 0, 4, 128, 64], [4, 0, 4, 192, 0]]
    assert q_ids[1].tolist() == [0] * 70 + [PADDING] * 186
    assert k_ids[1].tolist() == [0] * 100 + [MASKED] * 50 + [PADDING] * 106


@needs_new_jax
def test_packed_chunks__leave_an_odd_chunk_empty_before_a_longer_segment():
    from vitkernels.attention.pallas_flash.hopper.packed_segments import packed_chunks

    _, chunks, used = packed_chunks(ODD[None], False, 1)
    assert used.tolist() == [8, 8, 4, 0, 0, 0, 0]
    assert chunks[0, :8, 3].tolist()[::2] == [0, 30, 130, 210] and chunks[0, 5, 3] == 163
    assert chunks[0, :8, 4].tolist() == [30, 0, 64, 36, 33, 47, 20, 0]


@needs_new_jax
def test_packed_chunks__are_listed_as_work_items():
    """10 chunks become items of 2, 3, 2 and 3; a pair of chunks of two short segments is one item."""
    from vitkernels.attention.pallas_flash.hopper.packed_segments import packed_chunks

    ids = segments((0, 577), (1, 60), (2, 40), (3, 30), (4, 256), (5, 197))
    _, chunks, used = packed_chunks(ids[None].to(torch.uint8), False, 1)
    assert used.tolist() == [22, 22, 10, 0, 0, 0, 0]
    # The item's first chunk and number of chunks; first and end of those it needs, and the first to be compared.
    assert chunks[0, :10, 8:13].tolist() == [
        [0, 2, 0, 10, 9], [2, 3, 0, 10, 9], [5, 2, 0, 10, 9], [7, 3, 0, 10, 9], [10, 2, 10, 12, 10],
        [12, 2, 12, 14, 12], [14, 2, 14, 18, 18], [16, 2, 14, 18, 18], [18, 2, 18, 22, 21], [20, 2, 18, 22, 21],
    ]  # fmt: skip
    # The length of the item's segment, or of the first, its first row, and the batch entry.
    assert chunks[0, :10, 13:16].tolist() == [
        *[[577, 0, 0]] * 4, [60, 577, 0], [30, 677, 0], *[[256, 707, 0]] * 2, *[[197, 963, 0]] * 2,
    ]  # fmt: skip


@needs_new_jax
def test_packed_chunks__of_segments_that_need_all_chunks():
    """36 segments fill all 36 chunks, which are not a power of two; each pair of chunks remains an item."""
    from vitkernels.attention.pallas_flash.hopper.packed_segments import packed_chunks

    _, chunks, used = packed_chunks(torch.arange(36).repeat_interleave(16)[None], False, 1)
    assert chunks.shape[1] == 36 and used[:3].tolist() == [36, 36, 18]
    assert chunks[0, :18, 8:13].tolist() == [[2 * i, 2, 2 * i, 2 * i + 2, 2 * i] for i in range(18)]


@needs_new_jax
@pytest.mark.parametrize("chunks, rows", [(1, [320, 320, 320]), (2, [320, 384, 384]), (3, [320, 384, 448])])
def test_listed_items__have_no_rows_beyond_their_chunks(chunks, rows):
    from vitkernels.attention.pallas_flash.hopper.forward import Forward
    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule
    from vitkernels.attention.pallas_flash.hopper.work_items import WorkItem

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
    ids, chunks, used = packed_chunks(torch.stack([mixed, recurring]), True, 1)
    assert used.tolist() == [14, 14, 7, 3, -(13**2) - 5**2, 1, 0]
    # The long segment's chunks come first, in two work items.
    assert chunks[0, :6, :5].tolist() == [
        [0, 5, 4, 64, 64], [0, 5, 4, 128, 64], [0, 5, 4, 192, 64], [0, 5, 4, 256, 64], [0, 5, 4, 320, 44],
        [0, 5, 4, 384, 0],
    ]  # fmt: skip
    items = sorted(chunks.flatten(0, 1)[:7, [15, *range(8, 13)]].tolist())
    assert items[:2] == [[0, 0, 2, 0, 5, 4], [0, 2, 3, 0, 5, 4]]
    divided = [(0, 2), (2, 3), (5, 2), (7, 3), (10, 3)]
    assert items[2:] == [[1, first, count, 0, 13, 0] for first, count in divided]  # ids are compared
    # No rows, and no other chunks, for the other kernels.
    assert not chunks[0, 8:20, 4].any() and not chunks[0, 8:20, 1].any()
    # Of each of a quad's chunks the first row, the number of rows, and the first and end of the needed chunks.
    quads = sorted(chunks.flatten(0, 1)[:3, 16:].view(3, 4, 4).tolist(), key=lambda quad: quad[0][2])
    assert quads == [
        [[558, 64, 8, 12], [622, 64, 8, 12], [686, 64, 8, 12], [750, 64, 8, 12]],
        [[429, 64, 12, 15], [493, 64, 12, 15], [557, 1, 12, 15], [0, 64, 15, 16]],
        [[364, 64, 16, 18], [428, 1, 16, 18], [814, 10, 18, 19], [824, 0, 18, 18]],
    ]
    assert chunks[1, :14, 4].tolist() == [64] * 12 + [56, 0]
    assert [x.unique().tolist() for x in ids[0, 512:1280].view(12, 64)] == [
        [8], [8], [8], [8], [12], [12], [PADDING, 12], [15], [16], [PADDING, 16], [PADDING, 18], [PADDING],
    ]  # fmt: skip


@needs_new_jax
@pytest.mark.parametrize("longest", [20, 70, 140, 300, 900])
@pytest.mark.parametrize("has_quads", [False, True])
def test_packed_chunks__cover_each_row_once(has_quads, longest):
    """Random segments: each chunk needs all chunks of its segment, and each quad holds whole segments."""
    from vitkernels.attention.pallas_flash.hopper.packed_segments import packed_chunks

    B, N = 3, 788
    lengths = torch.randint(1, longest + 1, (B, N), generator=torch.Generator().manual_seed(longest))
    segment_ids = torch.stack([torch.arange(N).repeat_interleave(row)[:N] for row in lengths])
    _, chunks, used = packed_chunks(segment_ids, has_quads, 1)
    C = chunks.shape[1]
    items = chunks.flatten(0, 1)[: used[2], 8:16].tolist()
    listed = sorted((entry, chunk) for first, count, *_, entry in items for chunk in range(first, first + count))
    nonempty = [(b, chunk) for b in range(B) for chunk in range(C) if chunks[b, chunk, 4] > 0]
    assert len(set(listed)) == len(listed) and set(nonempty) <= set(listed)
    quads = chunks.flatten(0, 1)[: used[3], 16:].unflatten(1, (4, 4)).tolist()
    of_quads = {quad[0][2] + i: quad[i] for quad in quads for i in range(4)}
    for b in range(B):
        covered = torch.zeros(N, dtype=torch.int64)
        for chunk in range(C):
            first, end, _, row, count = chunks[b, chunk, :5].tolist()
            _, quad_count, first_in_quad, end_in_quad = of_quads.get(b * C + chunk, (0, 0, 0, 0))
            assert not (count and quad_count) and (not count or chunk < used[0])
            rows = range(row, min(row + count + quad_count, N))
            covered[rows.start : rows.stop] += 1
            needed = {int(row) for row in (segment_ids[b, :, None] == segment_ids[b, list(rows)]).any(1).nonzero()}
            others = range(first_in_quad - b * C, end_in_quad - b * C) if quad_count else range(first, end)
            found = set()
            for other in others:
                start, count = chunks[b, other, 3:5].tolist()
                found |= set(range(start, start + count + of_quads.get(b * C + other, (0, 0))[1]))
            assert needed <= found and (not quad_count or (needed == found and len(needed) <= 256))
        assert (covered == 1).all()
    assert (used[3] > 0) == (has_quads and longest > 20)  # of at most 20 tokens, there are too many


@needs_new_jax
@pytest.mark.parametrize(
    "entries, fewest_chunks, wanted",
    [
        ([((0, 1000), (1, 400)), ((5, 1400),)], 1, True),  # 16² + 22² pairs of chunks against 7²
        ([((0, 320), (1, 880), (2, 200)), ((0, 570), (1, 640), (2, 190))], 1, True),  # 14² + 10² against 5² + 9² + 3²
        ([((0, 320), (1, 640), (2, 320)), ((0, 576), (1, 570), (2, 134))], 1, False),  # 10² against 2 · 5² + 2 · 9²
        ([((0, 900), (1, 640)), ((0, 700), (1, 700), (2, 140))], 1, False),  # 10² against 15² + 2 · 11²
        ([((0, 1025), (1, 375))], 1, False),  # 17 chunks
        ([((0, 1153), (1, 247))], 1, True),  # 19
        ([((0, 640), (1, 640), (2, 120))], 10, True),
        ([((0, 640), (1, 640), (2, 120))], 11, False),  # too few heads for ten chunks
        ([((0, 1300), (1, 100)), ((0, 1200), (1, 100), (0, 100))], 1, False),  # an id recurs
        ([((0, 250), (1, 250), (2, 250), (3, 250), (4, 250), (5, 150))], 1, False),  # all in quads
    ],
)
def test_packed_chunks__choose_the_fused_backward_kernel_for_long_segments(entries, fewest_chunks, wanted):
    from vitkernels.attention.pallas_flash.hopper.chunks import prefers_fused
    from vitkernels.attention.pallas_flash.hopper.packed_segments import packed_chunks

    segment_ids = torch.stack([segments(*runs) for runs in entries])
    *_, counts = packed_chunks(segment_ids, True, fewest_chunks)
    assert prefers_fused(counts) == wanted


@needs_new_jax
@pytest.mark.parametrize(
    "lengths, alternating",
    [((2304,) * 4, 16), ((4608, 4608), 8), ((1024,) * 9, 48), ((1090,) * 8, 24), ((100, 7000, 2116), 6)],
)
def test_fused_backward__alternates_between_as_many_heads_as_segments_need(lengths, alternating):
    """About as many as keep the items of a segment of mean length two turns of 128 queries apart."""
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.fused_backward import FusedBackward
    from vitkernels.attention.pallas_flash.hopper.packed_segments import packed_chunks
    from vitkernels.attention.pallas_flash.hopper.schedule import Schedule

    segment_ids = segments(*enumerate(lengths)).expand(4, -1)
    (B, N), H = segment_ids.shape, 12
    _, chunks, counts = packed_chunks(segment_ids, True, 1)
    ids = None, None, None, None, jnp.asarray(counts.numpy())
    of_chunks = chunks.shape[1], chunks.shape[1]
    call = (B, H, N, N, 64, "bfloat16", 0.1, False, H, (0, 0, 0), Schedule(64, 3, 2), True, 132, of_chunks)
    assert FusedBackward(*call).groups_of_heads(ids) == B * H // alternating
