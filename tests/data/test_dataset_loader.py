"""The loader over a data set of numbers, where a batch shows which samples it holds."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitkernels.data.loader import IGNORE, BadImagesError, DatasetLoader, Problem, WorkerDiedError
from vitkernels.errors import UsageError

sizes = given(
    n=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 9),
    data=st.data(),
)


class Numbers:
    """Sample i is an image filled with i + 1, of class i; `bad` cannot be read, `odd` has a warning."""

    def __init__(self, n, bad=(), odd=()):
        self.n, self.bad, self.odd = n, set(bad), set(odd)

    def __len__(self):
        return self.n

    def load(self, ids, epoch):
        ids = torch.tensor(ids)
        unreadable = torch.tensor([i in self.bad for i in ids.tolist()])
        images = (ids + 1.0).masked_fill(unreadable, 0).view(-1, 1, 1, 1).repeat(1, 3, 2, 2)
        problems = [Problem(i, "broken", True) for i in ids.tolist() if i in self.bad]
        problems += [Problem(i, "odd", False) for i in ids.tolist() if i in self.odd]
        return images, ids.masked_fill(unreadable, IGNORE), problems

    def describe(self, ids):
        return [f"number-{i}" for i in ids]


def make(n, batch_size=4, seed=0, training=True, **kwargs):
    samples = kwargs.pop("samples", None) or Numbers(n)
    return DatasetLoader(samples, batch_size=batch_size, seed=seed, training=training, **kwargs)


@settings(max_examples=50, deadline=None)
@sizes
def test_training_sees_every_image_at_most_once(n, batch_size, seed, epoch, data):
    if n < batch_size:
        with pytest.raises(UsageError, match=rf"batch_size={batch_size} is more than the {n} images"):
            make(n, batch_size)
        return
    loader = make(n, batch_size, seed)
    batches = list(loader.epoch(epoch))
    assert len(batches) == loader.batches_per_epoch == n // batch_size
    seen = torch.cat([targets for _, targets in batches]).tolist()
    assert len(seen) == len(set(seen)) == n // batch_size * batch_size
    assert set(seen) <= set(range(n))
    start = data.draw(st.integers(0, len(batches)))
    rest = [targets.tolist() for _, targets in loader.epoch(epoch, start)]
    assert rest == [targets.tolist() for _, targets in batches[start:]]


@settings(max_examples=50, deadline=None)
@sizes
def test_evaluation_sees_every_image_once_in_order(n, batch_size, seed, epoch, data):
    loader = make(n, batch_size, seed, training=False)
    batches = list(loader.epoch(epoch))
    assert len(batches) == loader.batches_per_epoch == -(-n // batch_size)
    assert all(len(images) == len(targets) == batch_size for images, targets in batches)
    images, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert targets[:n].tolist() == list(range(n))
    assert (targets[n:] == IGNORE).all() and not images[n:].any()
    assert (images[:n, 0, 0, 0] == torch.arange(n) + 1).all()


@settings(max_examples=25, deadline=None)
@sizes
def test_sample_ids_are_those_of_the_batch(n, batch_size, seed, epoch, data):
    training = n >= batch_size and data.draw(st.booleans())
    loader = make(n, batch_size, seed, training)
    for batch, (_, targets) in enumerate(loader.epoch(epoch)):
        loader.sample_ids(epoch + 1, 0)  # asking about another epoch in between disturbs nothing
        assert loader.sample_ids(epoch, batch) == targets[targets != IGNORE].tolist()


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [tuple(make(40, 40, seed).sample_ids(epoch, 0)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert all(order != tuple(range(40)) for order in orders)


def test_streams_of_the_training_process_are_left_alone(rng_state):
    before = rng_state()
    list(make(12).epoch(0))
    assert rng_state() == before


def test_a_new_epoch_ends_the_iterator_of_the_last():
    loader = make(12)
    old = loader.epoch(0)
    next(old)
    new = loader.epoch(1)
    with pytest.raises(RuntimeError, match=r"epoch\(\) was called again"):
        next(old)
    assert len(list(new)) == 3


def test_start_beyond_the_epoch():
    assert list(make(12).epoch(0, start=3)) == []
    for start in (-1, 4):
        with pytest.raises(ValueError, match=f"start={start}: an epoch has batches 0 to 2"):
            make(12).epoch(0, start=start)


def test_counts_and_names():
    loader = make(13)
    assert (loader.num_samples, loader.batch_size, loader.batches_per_epoch) == (13, 4, 3)
    assert loader.describe([3, 1]) == ["number-3", "number-1"]


def test_bad_images_are_logged_once_and_counted(caplog):
    log = logging.getLogger("data.test")
    loader = make(8, training=False, samples=Numbers(8, bad=[2], odd=[5]), log=log)
    for _ in range(2):
        images, targets = next(loader.epoch(0))
        assert targets.tolist() == [0, 1, IGNORE, 3] and not images[2].any()
        list(loader.epoch(0))
    assert loader.bad_images == {"number-2": "broken"}
    assert [record.name for record in caplog.records] == ["data.test"] * 2
    first, second = (record.getMessage() for record in caplog.records)
    assert "number-2" in first and "broken" in first and "1 such of 8" in first
    assert second == "number-5: odd"


@pytest.mark.parametrize(
    ("n", "share", "allowed"), [(8, 0.0, 1), (8, 0.01, 1), (100, 0.01, 1), (101, 0.01, 2), (10, 0.3, 3)]
)
def test_too_many_bad_images_stop_the_run_with_the_list(n, share, allowed):
    fine = make(n, 1, training=False, samples=Numbers(n, bad=range(allowed)), max_bad_share=share)
    assert len(list(fine.epoch(0))) == n
    loader = make(n, 1, training=False, samples=Numbers(n, bad=range(allowed + 1)), max_bad_share=share)
    with pytest.raises(BadImagesError, match=rf"{allowed + 1} of {n} images could not be read") as stop:
        list(loader.epoch(0))
    for i in range(allowed + 1):
        assert f"\n  number-{i}: broken" in str(stop.value)
    assert stop.value.bad_images == loader.bad_images


def test_a_very_long_list_is_cut():
    loader = make(300, 300, training=False, samples=Numbers(300, bad=range(150)))
    with pytest.raises(BadImagesError, match=r"and 50 more$") as stop:
        list(loader.epoch(0))
    assert len(stop.value.bad_images) == 150


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_size": 0}, r"data\.batch_size=0"),
        ({"seed": -1}, "seed=-1"),
        ({"pin_memory": True}, "pin_memory=True needs"),
    ],
)
def test_values_that_cannot_work(kwargs, message):
    if "pin_memory" in kwargs and torch.cuda.is_available():
        pytest.skip("there is a GPU to pin memory for")
    with pytest.raises(UsageError, match=message):
        make(12, **kwargs)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), WorkerDiedError),
        (ConnectionResetError("Connection reset by peer"), WorkerDiedError),  # it died while it handed over a batch
        (EOFError(), WorkerDiedError),
        (RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nbad stripe"), RuntimeError),
        (ConnectionError("Caught ConnectionError in DataLoader worker process 0.\nno server"), ConnectionError),
    ],
)
def test_a_worker_that_died_is_told_from_one_whose_work_failed(monkeypatch, error, expected):
    class Broken:
        num_workers = 1

        def __iter__(self):
            raise error
            yield

    loader = make(8)
    monkeypatch.setattr(loader, "_dataloader", Broken())
    with pytest.raises(expected) as caught:
        next(loader.epoch(0))
    assert type(caught.value) is expected
