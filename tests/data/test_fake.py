import pytest
import torch
from expecting import error
from hypothesis import given, settings
from hypothesis import strategies as st

from vitkernels.data import fake


def build(**kwargs):
    return fake.build(**{"image_size": 8, "in_chans": 3, "seed": 0, "batch_size": 4, "items": 103} | kwargs)


def test_fake__defaults():
    data = fake.build(image_size=4, in_chans=1, seed=0, batch_size=128)
    assert (data.num_classes, data.class_names) == (1024, None)
    assert (data.train.num_samples, data.train.batches_per_epoch) == (1_000_000, 7812)
    assert (data.val.num_samples, data.val.batches_per_epoch) == (512, 4)


@settings(max_examples=30, deadline=None)
@given(val_items=st.integers(1, 30), pool_batches=st.integers(1, 5), start=st.integers(0, 5))
def test_fake__counts_padding_and_resume(val_items, pool_batches, start):
    data = build(val_items=val_items, pool_batches=pool_batches, num_classes=5)
    pool = torch.cat([images for images, _ in data.train.epoch(0)][:pool_batches])
    for loader, batches, real in ((data.train, 25, 100), (data.val, -(-val_items // 4), val_items)):
        full = list(loader.epoch(0))
        assert len(full) == loader.batches_per_epoch == batches
        images, targets = (torch.cat(parts) for parts in zip(*full, strict=True))
        assert images.shape == (batches * 4, 3, 8, 8) and images.dtype == torch.float32
        assert targets.dtype == torch.int64 and (targets[:real] >= 0).all() and (targets[:real] < 5).all()
        assert (targets[real:] == -100).all() and not images[real:].any()
        assert images[:real].flatten(1).any(1).all()
        ids = [i for batch in range(batches) for i in loader.sample_ids(0, batch)]
        assert len(ids) == real and max(ids) < 4 * pool_batches
        assert torch.equal(images[:real], pool[ids])
        skip = min(start, batches)
        rest = list(loader.epoch(0, skip))
        assert len(rest) == batches - skip
        assert all(torch.equal(a[0], b[0]) for a, b in zip(rest, full[skip:], strict=True))


def test_fake__cycles_through_the_pool():
    loader = build(pool_batches=3).train
    pointers = [images.data_ptr() for images, _ in loader.epoch(0)]
    assert len(set(pointers)) == 3 and pointers[:3] == pointers[3:6]


def test_fake__content_depends_on_the_seed_alone(same, rng_state):
    before = rng_state()
    assert same(build().train.epoch(0), build(num_workers=2).train.epoch(0))
    assert not same(build().train.epoch(0), build(seed=1).train.epoch(0))
    assert rng_state() == before
    images = torch.cat([images for images, _ in build(image_size=64).train.epoch(0, 21)])
    assert abs(images.mean()) < 0.01 and abs(images.std() - 1) < 0.01


def test_fake__names_and_no_training_set():
    assert build().train.describe(build().train.sample_ids(0, 5)) == ["fake[4]", "fake[5]", "fake[6]", "fake[7]"]
    assert build(train=False).train is None


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("items", "abc"),
        ("pool_batches", 1.5),
        ("val_items", 0),
        ("num_classes", 0),
        ("pool_batches", 0),
        ("batch_size", 0),
        ("seed", -1),
    ],
)
def test_fake__refuses_invalid_values(setting, value):
    with error("data.value", setting=setting, value=value):
        build(**{setting: value})


def test_fake__refuses_fewer_items_than_a_batch():
    with error("data.batch_size", batch_size=4, num_samples=3):
        build(items=3)


def test_fake__refuses_a_start_beyond_the_epoch():
    with pytest.raises(ValueError, match="start=26: an epoch has batches 0 to 24"):
        build().train.epoch(0, start=26)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs an NVIDIA GPU")
def test_fake__pins_memory():
    data = build(pin_memory=True, val_items=5)
    assert all(tensor.is_pinned() for loader in (data.train, data.val) for batch in loader.epoch(0) for tensor in batch)


def test_fake__refuses_a_pool_larger_than_memory(monkeypatch):
    monkeypatch.setattr(fake, "host_memory_bytes", lambda: 3 * 1024)
    assert build(pool_batches=1).train is not None  # 1 batch of 4 images, 3 channels and 8 × 8 pixels: 3 KiB
    with error("data.value", setting="pool_batches", value=2, needed_bytes=6 * 1024, total_bytes=3 * 1024):
        build(pool_batches=2)
