"""Several processes together get the batches of one process, each image once."""

import pytest
import torch
from finished_batches import finished_epoch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dataset_loader import Numbers

from vitkernels.data import IGNORE, DatasetLoader, Shard, digits, fake


@settings(max_examples=60, deadline=None)
@given(batch_size=st.integers(1, 9), world=st.integers(1, 6))
def test_rows__belong_to_one_process_with_their_mirror_images(batch_size, world):
    rows = [Shard(rank, world).rows(batch_size) for rank in range(world)]
    size = world * batch_size
    assert sorted(row for own in rows for row in own) == list(range(size))
    assert all(len(own) == batch_size for own in rows)
    if batch_size % 2 == 0:
        assert all(own == [size - 1 - row for row in reversed(own)] for own in rows)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 40), batch_size=st.integers(1, 5), world=st.integers(1, 4), training=st.booleans())
def test_shards__union_equals_one_process(n, batch_size, world, training):
    if training and n < batch_size * world:
        return

    def targets(size, shard):
        loader = DatasetLoader(Numbers(n), batch_size=size, seed=3, training=training, shard=shard)
        return [batch[1].tolist() for batch in finished_epoch(loader, 1)], loader

    unsharded, one = targets(batch_size * world, Shard())
    shares = [targets(batch_size, Shard(rank, world)) for rank in range(world)]
    for number, batch in enumerate(unsharded):
        together = sorted(x for share, _ in shares for x in share[number])
        assert together == sorted(batch)
        named = [i for rank in range(world) for i in shares[0][1].sample_ids(1, number, rank)]
        assert sorted(named) == sorted(one.sample_ids(1, number)) == [x for x in together if x != IGNORE]
    if not training:
        assert sorted(x for batch in unsharded for x in batch if x != IGNORE) == list(range(n))


@pytest.mark.parametrize("mixup", [None, {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}])
def test_rows__have_equal_bits_on_any_process_mixed_or_not(mixup):
    def first(size, shard):
        data = digits.build(image_size=8, in_chans=1, seed=0, batch_size=size, mixup=mixup, shard=shard)
        return next(finished_epoch(data.train, 2, start=1))

    unsharded = first(8, Shard())
    for rank in range(2):
        shard = Shard(rank, 2)
        for mine, all_rows in zip(first(4, shard), unsharded, strict=True):
            assert torch.equal(mine, all_rows[shard.rows(4)])


def test_elementwise_mixing__draws_differ_by_process():
    mixup = {"mixup_alpha": 0.8, "cutmix_alpha": 0.0, "mode": "elem"}
    shares = [
        digits.build(image_size=8, in_chans=1, seed=0, batch_size=4, mixup=mixup, shard=Shard(rank, 2)).train
        for rank in range(2)
    ]
    weights = [next(finished_epoch(share, 0))[1].sort(dim=1).values for share in shares]
    assert not torch.equal(*weights)


def test_fake_shards__union_equals_one_process():
    def build(size, shard):
        return fake.build(
            image_size=4, in_chans=1, seed=0, batch_size=size, items=50, val_items=13, pool_batches=3, shard=shard
        )

    unsharded = build(6, Shard())
    for rank in range(3):
        shard = Shard(rank, 3)
        mine = build(2, shard)
        for split in ("train", "val"):
            ours, theirs = list(getattr(mine, split).epoch(0)), list(getattr(unsharded, split).epoch(0))
            assert len(ours) == len(theirs)
            for a, b in zip(ours, theirs, strict=True):
                assert torch.equal(a[0], b[0][shard.rows(2)]) and torch.equal(a[1], b[1][shard.rows(2)])
        assert mine.train.sample_ids(0, 4) == [unsharded.train.sample_ids(0, 4)[row] for row in shard.rows(2)]
