import time

import numpy as np
import pytest
import torch
from expecting import error
from finished_batches import finished_epoch
from sklearn.datasets import load_digits

from vitkernels.data import digits


def build(**kwargs):
    return digits.build(**{"image_size": 16, "in_chans": 1, "seed": 0, "batch_size": 64} | kwargs)


def test_digits__shapes_and_counts():
    data = build(in_chans=3, image_size=20)
    assert (data.num_classes, data.class_names) == (10, list("0123456789"))
    assert (data.train.num_samples, data.val.num_samples) == (1437, 360)
    assert (data.train.batches_per_epoch, data.val.batches_per_epoch) == (1437 // 64, 6)
    for loader in (data.train, data.val):
        images, targets = next(finished_epoch(loader, 0))
        assert images.shape == (64, 3, 20, 20) and images.dtype == torch.float32
        assert targets.shape == (64,) and targets.dtype == torch.int64
        assert torch.equal(images[:, 0], images[:, 2])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_digits__resume_within_an_epoch_is_exact(num_workers, same, rng_state):
    mixup = {"mixup_alpha": 0.5, "mode": "elem"}
    full = list(finished_epoch(build(mixup=mixup).train, 1))
    before = rng_state()
    loader = build(mixup=mixup, num_workers=num_workers).train
    next(finished_epoch(loader, 0))  # abandoned in the middle
    assert same(finished_epoch(loader, 1, start=9), full[9:])
    assert same(finished_epoch(loader, 1), full)
    assert rng_state() == before


def test_digits__differ_by_epoch_and_seed(same):
    batches = [next(finished_epoch(build(seed=seed).train, epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert not any(same([a], [b]) for i, a in enumerate(batches) for b in batches[:i])


def test_digits__sample_is_independent_of_its_batch():
    """A sample is augmented differently in another epoch, and equally in batches of other sizes."""

    def sample_17(epoch, batch_size):
        loader = build(batch_size=batch_size).train
        for batch, (images, _) in enumerate(finished_epoch(loader, epoch)):
            if 17 in (ids := loader.sample_ids(epoch, batch)):
                return images[ids.index(17)]
        raise AssertionError("sample 17 is not in the epoch")

    torch.testing.assert_close(sample_17(0, 32), sample_17(0, 100), atol=1e-5, rtol=0)
    assert (sample_17(0, 32) - sample_17(1, 32)).abs().max() > 0.1


def test_digits__every_training_image_at_most_once():
    loader = build().train
    ids = [i for batch in range(loader.batches_per_epoch) for i in loader.sample_ids(3, batch)]
    assert len(ids) == len(set(ids)) == 1437 // 64 * 64


def test_digits__split_is_stratified_and_equal_for_every_seed():
    one, other = build(seed=0), build(seed=1)
    val = one.val.describe(list(range(360)))
    assert val == other.val.describe(list(range(360)))
    train = one.train.describe(list(range(1437)))
    assert sorted(train + val) == sorted(f"digits[{i}]" for i in range(1797))
    targets = torch.cat([targets for _, targets in finished_epoch(one.val, 0)])
    counts = targets[targets >= 0].bincount()
    assert counts.min() >= 34 and counts.max() <= 37
    assert targets[360:].tolist() == [-100] * 24


def test_digits__evaluation_images_are_the_originals(same):
    """At 8 pixels nothing is enlarged: pixels and classes are scikit-learn's."""
    source = load_digits()
    loader = build(image_size=8, batch_size=360).val
    images, targets = next(finished_epoch(loader, 0))
    numbers = [int(name[7:-1]) for name in loader.describe(list(range(360)))]
    assert np.array_equal(source.target[numbers], targets.numpy())
    pixels = (images * digits.STD + digits.MEAN).view(360, 64) * 16
    np.testing.assert_allclose(pixels.numpy(), source.data[numbers], atol=1e-3)
    assert same([(images, targets)], finished_epoch(loader, 5))


def test_digits__unaugmented_training_images_are_the_originals():
    for kwargs in ({"augment": False}, {"degrees": 0, "translate": 0, "scale": [1, 1]}):
        loader = build(image_size=8, batch_size=1437, **kwargs).train
        images, _ = next(finished_epoch(loader, 0))
        pixels = (images * digits.STD + digits.MEAN) * 16
        assert (pixels - pixels.round()).abs().max() < 1e-3


def test_digits__shift_is_limited_to_its_share():
    images, _ = next(
        finished_epoch(build(image_size=64, degrees=0, translate=0.1, scale=[1, 1], batch_size=1437).train, 0)
    )
    unshifted, _ = next(finished_epoch(build(image_size=64, augment=False, batch_size=1437).train, 0))
    ink, unshifted_ink = (
        (x * digits.STD + digits.MEAN).clamp(min=0).sum(2)[:, 0] for x in (images, unshifted)
    )  # (N, 64): ink per column
    columns = torch.arange(64.0)
    moved = (ink @ columns / ink.sum(1) - unshifted_ink @ columns / unshifted_ink.sum(1)).abs()
    assert moved.max() < 0.1 * 64 * 1.2 and moved.mean() > 0.1 * 64 * 0.3


def test_digits__mixup_gives_soft_targets_for_training_only():
    data = build(mixup={"off_epoch": 1})
    _, soft = next(finished_epoch(data.train, 0))
    assert soft.shape == (64, 10) and soft.dtype == torch.float32
    torch.testing.assert_close(soft.sum(1), torch.ones(64))
    assert soft.max(1).values.min() < 1
    _, hard = next(finished_epoch(data.train, 1))
    assert hard.max(1).values.min() == 1
    assert next(finished_epoch(data.val, 0))[1].dtype == torch.int64


def test_digits__without_training_set():
    data = build(train=False)
    assert data.train is None and data.val.num_samples == 360


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("degrees", -1),
        ("degrees", "abc"),
        ("augment", "maybe"),
        ("scale", [0.5]),
        ("scale", None),
        ("scale", [1.1, 0.9]),
    ],
)
def test_digits__refuses_invalid_values(setting, value):
    with error("data.value", setting=setting, value=value):
        build(**{setting: value})


def test_digits__refuses_batches_that_are_too_large_or_odd_with_mixup():
    with error("data.batch_size", batch_size=2000, num_samples=1437):
        build(batch_size=2000)
    with error("data.mixup", batch_size=63):
        build(batch_size=63, mixup={})


def test_digits__invalid_value_message():
    with error("data.value") as refused:
        build(scale=(1.1, 0.9))
    assert str(refused.value) == "scale=[1.1, 0.9]: expected [least, greatest], both above 0, such as [0.8, 1.0]"


def test_digits__arguments_of_the_call_are_checked():
    for arguments in ({"degree": 5}, {"seed": None, "imagesize": 8}):
        with pytest.raises(TypeError):
            build(**arguments)
    with pytest.raises(TypeError):
        digits.build(image_size=8)


def test_digits__epoch_takes_little_cpu_time():
    loader = build(image_size=28).train

    def seconds() -> float:
        start = time.thread_time()
        assert len(list(finished_epoch(loader, 0))) == 22
        return time.thread_time() - start

    assert min(seconds() for _ in range(3)) < 0.3  # CPU time of one core, independent of the machine's load
