"""The procedural shapes: the same everywhere, drawn by class, with separate evaluation images."""

import numpy as np
import pytest
import torch
from expecting import error
from finished_batches import finished_epoch

from vitkernels.data import shapes


def build(**arguments):
    defaults = {"image_size": 32, "in_chans": 3, "seed": 0, "batch_size": 32, "items": 96, "val_items": 40}
    return shapes.build(**defaults | arguments)


def drawn(ids, side=32):
    samples = shapes.ShapeSamples(0, 1000, side)
    raw, targets, _ = samples.load(ids, 0)
    return samples.device_transforms(raw | {"targets": targets})


# The first is SplitMix64's first output for seed 0, 0xE220A8397B1DCDAF, of which 24 bits are kept.
RECORDED = [[0xE220A8, 7239838, 443485], [16288696, 1784201, 5491615], [7861596, 12254069, 1107271]]


def test_numbers__match_the_recorded_ones():
    found = shapes.uniform_numbers(np.array([0, 1, 2**40]), 3)
    np.testing.assert_array_equal((found * 2**24).astype(int), RECORDED)
    assert found.dtype == np.float32


def test_numbers__are_uniform_and_uncorrelated():
    numbers = shapes.uniform_numbers(np.arange(20_000), shapes.NUMBERS)
    assert abs(numbers.mean(0) - 0.5).max() < 0.01 and abs(numbers.std(0) - 12**-0.5).max() < 0.01
    correlation = np.corrcoef(np.concatenate([numbers, np.roll(numbers, 1, 0)], axis=1), rowvar=False)
    assert abs(correlation - np.eye(2 * shapes.NUMBERS)).max() < 0.03  # 20,000 samples: 4 standard deviations


def test_image__depends_on_its_number_alone():
    images, targets = drawn([5, 6, 7])
    torch.testing.assert_close(drawn([7, 1])[0][0], images[2], rtol=0, atol=0)
    assert targets.tolist() == [5, 6, 7]
    again = next(finished_epoch(build(seed=1).val, 0))[0]
    torch.testing.assert_close(next(finished_epoch(build().val, 0))[0], again, rtol=0, atol=0)


def test_images__are_normalized():
    images, _ = drawn(list(range(256)))
    assert abs(float(images.mean())) < 0.15 and abs(float(images.std()) - 1) < 0.15


def test_shapes_and_textures__differ():
    x, y = torch.meshgrid(*[torch.linspace(-1.2, 1.2, 25)] * 2, indexing="xy")
    inside = shapes._distances(x[None, None], y[None, None])[0] < 0
    assert len({tuple(mask.flatten().tolist()) for mask in inside}) == len(shapes.SHAPES)
    area = inside.float().mean((1, 2))
    assert (area > 0.1).all() and (area < 0.6).all()
    marked = shapes._textures(x[None, None], y[None, None], torch.full((1, shapes.NUMBERS), 0.5))[0] > 0
    shares = marked.float().mean((1, 2)).tolist()
    assert shares[0] == 0 and all(0.3 < share < 0.7 for share in shares[1:])


def test_evaluation__has_its_own_images_and_zeros_for_padding():
    data = build()
    batches = list(finished_epoch(data.val, 0))
    assert sum(int((targets >= 0).sum()) for _, targets in batches) == 40
    images, targets = batches[-1]
    assert (targets[8:] == -100).all() and not images[8:].any() and images[7].any()
    first = next(finished_epoch(data.open_plain_train(), 0))[0]
    assert not torch.equal(first, batches[0][0])


def test_classes__are_equally_frequent():
    data = build()
    targets = torch.cat([targets for _, targets in finished_epoch(data.train, 0)])
    assert torch.bincount(targets).tolist() == [3] * 32 and data.num_classes == len(data.class_names) == 32


@pytest.mark.parametrize(("arguments", "code"), [({"in_chans": 1}, "data.in_chans"), ({"items": 0}, "data.value")])
def test_wrong_argument__is_refused(arguments, code):
    with error(code):
        build(**arguments)
