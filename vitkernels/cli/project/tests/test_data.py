"""The data set's images and classes."""

from mine.data import build


def test_data__has_two_classes_of_the_requested_size():
    data = build(image_size=16, in_chans=3, seed=0, batch_size=8, items=32)
    assert (data.num_classes, data.train.num_samples, data.val.num_samples) == (2, 32, 100)
