"""DatasetLoader over a data set of numbers, whose batches show which samples they hold."""

import logging

import pytest
import torch
from expecting import error
from hypothesis import given, settings
from hypothesis import strategies as st

from vitkernels.data import IGNORE, BadImagesError, DatasetLoader, SampleProblem, WorkerDiedError

sizes = given(
    n=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 9),
    data=st.data(),
)


class Numbers:
    """Sample i is an image filled with i + 1, of class i; `bad` samples cannot be read, `odd` ones warn."""

    def __init__(self, n, bad=(), odd=()):
        self.n, self.bad, self.odd = n, set(bad), set(odd)

    def __len__(self):
        return self.n

    def load(self, ids, epoch):
        ids = torch.tensor(ids)
        unreadable = torch.tensor([i in self.bad for i in ids.tolist()])
        images = (ids + 1.0).masked_fill(unreadable, 0).view(-1, 1, 1, 1).repeat(1, 3, 2, 2)
        problems = [SampleProblem(i, "broken", True) for i in ids.tolist() if i in self.bad]
        problems += [SampleProblem(i, "odd", False) for i in ids.tolist() if i in self.odd]
        return images, ids.masked_fill(unreadable, IGNORE), problems

    def describe(self, ids):
        return [f"number-{i}" for i in ids]


def make(n, batch_size=4, seed=0, training=True, **kwargs):
    samples = kwargs.pop("samples", None) or Numbers(n)
    return DatasetLoader(samples, batch_size=batch_size, seed=seed, training=training, **kwargs)


@settings(max_examples=50, deadline=None)
@sizes
def test_training__sees_every_image_at_most_once(n, batch_size, seed, epoch, data):
    if n < batch_size:
        with error("data.batch_size", batch_size=batch_size, num_samples=n):
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
def test_evaluation__sees_every_image_once_in_order(n, batch_size, seed, epoch, data):
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
def test_sample_ids__match_the_batch(n, batch_size, seed, epoch, data):
    training = n >= batch_size and data.draw(st.booleans())
    loader = make(n, batch_size, seed, training)
    for batch, (_, targets) in enumerate(loader.epoch(epoch)):
        loader.sample_ids(epoch + 1, 0)  # a query about another epoch has no effect
        assert loader.sample_ids(epoch, batch) == targets[targets != IGNORE].tolist()


def test_order__differs_by_epoch_and_seed():
    orders = [tuple(make(40, 40, seed).sample_ids(epoch, 0)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert all(order != tuple(range(40)) for order in orders)


def test_loader__leaves_the_global_generators_unchanged(rng_state):
    before = rng_state()
    list(make(12).epoch(0))
    assert rng_state() == before


def test_epoch__ends_the_previous_iterator():
    loader = make(12)
    old = loader.epoch(0)
    next(old)
    new = loader.epoch(1)
    with pytest.raises(RuntimeError, match=r"epoch\(\) was called again"):
        next(old)
    assert len(list(new)) == 3


def test_epoch__refuses_a_start_beyond_its_end():
    assert list(make(12).epoch(0, start=3)) == []
    for start in (-1, 4):
        with pytest.raises(ValueError, match=f"start={start}: an epoch has batches 0 to 2"):
            make(12).epoch(0, start=start)


def test_loader__reports_counts_and_names():
    loader = make(13)
    assert (loader.num_samples, loader.batch_size, loader.batches_per_epoch) == (13, 4, 3)
    assert loader.describe([3, 1]) == ["number-3", "number-1"]


def test_bad_images__are_logged_once_and_counted_message(caplog):
    log = logging.getLogger("data.test")
    loader = make(8, training=False, samples=Numbers(8, bad=[2], odd=[5]), log=log)
    for _ in range(2):
        images, targets = next(loader.epoch(0))
        assert targets.tolist() == [0, 1, IGNORE, 3] and not images[2].any()
        list(loader.epoch(0))
    assert loader.bad_images == {"number-2": "broken"}
    assert [record.name for record in caplog.records] == ["data.test"] * 2
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "could not read number-2 (broken); sample masked (1 unreadable of 8, limit 1)"
    assert second == "number-5: odd"


@pytest.mark.parametrize(
    ("n", "share", "allowed"), [(8, 0.0, 1), (8, 0.01, 1), (100, 0.01, 1), (101, 0.01, 2), (10, 0.3, 3)]
)
def test_too_many_bad_images__raise_with_their_list(n, share, allowed):
    fine = make(n, 1, training=False, samples=Numbers(n, bad=range(allowed)), max_bad_share=share)
    assert len(list(fine.epoch(0))) == n
    loader = make(n, 1, training=False, samples=Numbers(n, bad=range(allowed + 1)), max_bad_share=share)
    with error("data.bad_images", BadImagesError, num_samples=n, allowed=allowed) as stop:
        list(loader.epoch(0))
    for i in range(allowed + 1):
        assert f"\n  number-{i}: broken" in str(stop.value)
    assert stop.value.bad_images == loader.bad_images


def test_bad_images_error__truncates_its_list():
    loader = make(300, 300, training=False, samples=Numbers(300, bad=range(150)))
    with pytest.raises(BadImagesError, match=r"and 50 more$") as stop:
        list(loader.epoch(0))
    assert len(stop.value.bad_images) == 150


@pytest.mark.parametrize(
    ("kwargs", "code"), [({"batch_size": 0}, "value"), ({"seed": -1}, "value"), ({"pin_memory": True}, "pin_memory")]
)
def test_loader__refuses_invalid_values(kwargs, code):
    if "pin_memory" in kwargs and torch.cuda.is_available():
        pytest.skip("this machine has a GPU to pin memory for")
    with error(f"data.{code}"):
        make(12, **kwargs)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), WorkerDiedError),
        (ConnectionResetError("Connection reset by peer"), WorkerDiedError),  # died while handing over a batch
        (EOFError(), WorkerDiedError),
        (RuntimeError("Pin memory thread exited unexpectedly"), WorkerDiedError),  # the same with pin_memory
        (RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nbad stripe"), RuntimeError),
        (RuntimeError("Caught RuntimeError in pin memory thread for device 0.\nout of memory"), RuntimeError),
        (ConnectionError("Caught ConnectionError in DataLoader worker process 0.\nno server"), ConnectionError),
    ],
)
def test_dead_worker__is_distinguished_from_an_error_in_a_worker(monkeypatch, raised, expected):
    class Broken:
        dataset = None
        num_workers = 1

        def __iter__(self):
            raise raised
            yield

    loader = make(8)
    monkeypatch.setattr(loader, "_dataloader", Broken())
    with pytest.raises(expected) as caught:
        next(loader.epoch(0))
    assert type(caught.value) is expected
