import time

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from vitkernels.data import digits
from vitkernels.errors import UsageError


def build(**kwargs):
    return digits.build(**{"image_size": 16, "in_chans": 1, "seed": 0, "batch_size": 64} | kwargs)


def test_shapes_and_counts():
    data = build(in_chans=3, image_size=20)
    assert (data.num_classes, data.class_names) == (10, list("0123456789"))
    assert (data.train.num_samples, data.val.num_samples) == (1437, 360)
    assert (data.train.batches_per_epoch, data.val.batches_per_epoch) == (1437 // 64, 6)
    for loader in (data.train, data.val):
        images, targets = next(loader.epoch(0))
        assert images.shape == (64, 3, 20, 20) and images.dtype == torch.float32
        assert targets.shape == (64,) and targets.dtype == torch.int64
        assert torch.equal(images[:, 0], images[:, 2])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_in_an_epoch_is_exact(num_workers, same, rng_state):
    mixup = {"mixup_alpha": 0.5, "mode": "elem"}
    whole = list(build(mixup=mixup).train.epoch(1))
    before = rng_state()
    loader = build(mixup=mixup, num_workers=num_workers).train
    next(loader.epoch(0))  # left in the middle
    assert same(loader.epoch(1, start=9), whole[9:])
    assert same(loader.epoch(1), whole)
    assert rng_state() == before


def test_epochs_and_seeds_differ(same):
    batches = [next(build(seed=seed).train.epoch(epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert not any(same([a], [b]) for i, a in enumerate(batches) for b in batches[:i])


def test_a_sample_does_not_depend_on_its_batch():
    """The same sample moves differently in the next epoch, and alike in batches of other sizes."""

    def sample_17(epoch, batch_size):
        loader = build(batch_size=batch_size).train
        for batch, (images, _) in enumerate(loader.epoch(epoch)):
            if 17 in (ids := loader.sample_ids(epoch, batch)):
                return images[ids.index(17)]
        raise AssertionError("sample 17 is not in the epoch")

    torch.testing.assert_close(sample_17(0, 32), sample_17(0, 100), atol=1e-5, rtol=0)
    assert (sample_17(0, 32) - sample_17(1, 32)).abs().max() > 0.1


def test_every_training_image_at_most_once():
    loader = build().train
    ids = [i for batch in range(loader.batches_per_epoch) for i in loader.sample_ids(3, batch)]
    assert len(ids) == len(set(ids)) == 1437 // 64 * 64


def test_the_split_is_stratified_and_the_same_for_every_seed():
    one, other = build(seed=0), build(seed=1)
    val = one.val.describe(list(range(360)))
    assert val == other.val.describe(list(range(360)))
    train = one.train.describe(list(range(1437)))
    assert sorted(train + val) == sorted(f"digits[{i}]" for i in range(1797))
    targets = torch.cat([targets for _, targets in one.val.epoch(0)])
    counts = targets[targets >= 0].bincount()
    assert counts.min() >= 34 and counts.max() <= 37
    assert targets[360:].tolist() == [-100] * 24


def test_evaluation_images_are_the_originals(same):
    """At 8 pixels nothing is left to enlarge: pixels and classes are scikit-learn's."""
    source = load_digits()
    loader = build(image_size=8, batch_size=360).val
    images, targets = next(loader.epoch(0))
    numbers = [int(name[7:-1]) for name in loader.describe(list(range(360)))]
    assert np.array_equal(source.target[numbers], targets.numpy())
    pixels = (images * digits.STD + digits.MEAN).view(360, 64) * 16
    np.testing.assert_allclose(pixels.numpy(), source.data[numbers], atol=1e-3)
    assert same([(images, targets)], loader.epoch(5))


def test_without_augmentation_training_images_are_still():
    for kwargs in ({"augment": False}, {"degrees": 0, "translate": 0, "scale": [1, 1]}):
        loader = build(image_size=8, batch_size=1437, **kwargs).train
        images, _ = next(loader.epoch(0))
        pixels = (images * digits.STD + digits.MEAN) * 16
        assert (pixels - pixels.round()).abs().max() < 1e-3


def test_a_shift_moves_by_at_most_its_share():
    images, _ = next(build(image_size=64, degrees=0, translate=0.1, scale=[1, 1], batch_size=1437).train.epoch(0))
    still, _ = next(build(image_size=64, augment=False, batch_size=1437).train.epoch(0))
    ink, still_ink = (
        (x * digits.STD + digits.MEAN).clamp(min=0).sum(2)[:, 0] for x in (images, still)
    )  # (N, 64): ink per column
    columns = torch.arange(64.0)
    moved = (ink @ columns / ink.sum(1) - still_ink @ columns / still_ink.sum(1)).abs()
    assert moved.max() < 0.1 * 64 * 1.2 and moved.mean() > 0.1 * 64 * 0.3


def test_mixup_makes_soft_targets_for_training_alone():
    data = build(mixup={"off_epoch": 1})
    _, soft = next(data.train.epoch(0))
    assert soft.shape == (64, 10) and soft.dtype == torch.float32
    torch.testing.assert_close(soft.sum(1), torch.ones(64))
    assert soft.max(1).values.min() < 1
    _, hard = next(data.train.epoch(1))
    assert hard.max(1).values.min() == 1
    assert next(data.val.epoch(0))[1].dtype == torch.int64


def test_evaluation_alone():
    data = build(train=False)
    assert data.train is None and data.val.num_samples == 360


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_size": 2000}, r"batch_size=2000 is more than the 1437.*data\.batch_size=1437 or less"),
        ({"batch_size": 63, "mixup": {}}, "odd"),
        ({"degrees": -1}, r"data\.degrees=-1"),
        ({"degrees": "abc"}, r"data\.degrees=abc: expected a number"),
        ({"augment": "maybe"}, r"data\.augment=maybe: expected true or false"),
        ({"scale": [0.5]}, r"data\.scale=\[0\.5\]"),
        ({"scale": None}, r"data\.scale=None"),
        ({"scale": [1.1, 0.9]}, r"data\.scale=\[1\.1, 0\.9\]"),
    ],
)
def test_values_that_cannot_work(kwargs, message):
    with pytest.raises(UsageError, match=message):
        build(**kwargs)


def test_an_epoch_takes_little_time():
    loader = build(image_size=28).train

    def seconds() -> float:
        start = time.thread_time()
        assert len(list(loader.epoch(0))) == 22
        return time.thread_time() - start

    assert min(seconds() for _ in range(3)) < 0.3  # of one core, whatever else the machine is doing
