"""Workers use memory of batches again, but only after it was handed back; small tensors need no shared memory."""

import os
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from vitkernels.data import shared_memory
from vitkernels.data.shared_memory import Mappings, RecycledMemory, by_value, hand_back, new_batch


@pytest.fixture(autouse=True)
def in_worker(monkeypatch):
    monkeypatch.setattr(shared_memory, "get_worker_info", lambda: "of a worker")


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux")
def test_memory__is_taken_only_for_what_is_written():
    memory = new_batch(2**24)
    memory[:1000] = 7
    file, size = memory.untyped_storage()._share_fd_cpu_()
    assert size == 2**24 and os.fstat(file).st_blocks * 512 <= 2**21  # one page, which may be a huge one


def test_memory__is_used_again_after_any_part_of_it_was_handed_back():
    memory = RecycledMemory()
    first, second = memory.take(1000), memory.take(1000)
    assert first.is_shared() and len(first) >= 1000 and second.data_ptr() != first.data_ptr()
    hand_back(first[:10])
    assert memory.take(999).data_ptr() == first.data_ptr()
    assert memory.take(999).data_ptr() not in (first.data_ptr(), second.data_ptr())


def test_memory__that_is_too_small_is_not_used_again():
    memory = RecycledMemory()
    small = memory.take(1000)
    hand_back(small)
    large = memory.take(1001)
    large[:] = 7  # to the end
    assert large.data_ptr() != small.data_ptr() and memory.take(1000).data_ptr() == small.data_ptr()


def test_memory__that_is_never_handed_back_is_forgotten():
    memory = RecycledMemory()
    lost = [memory.take(1000) for _ in range(5)]
    places = {each.data_ptr() for each in lost}
    assert len(places) == 5 and len(memory._kept) == shared_memory._MOST_KEPT
    hand_back(lost[0])
    assert memory.take(1000).data_ptr() not in places
    hand_back(lost[-1])
    assert memory.take(1000).data_ptr() == lost[-1].data_ptr()


def test_memory__of_the_training_process_is_not_used_again(monkeypatch):
    monkeypatch.setattr(shared_memory, "get_worker_info", lambda: None)
    memory = RecycledMemory()
    first = memory.take(1000)
    hand_back(first)
    assert not first.is_shared() and memory.take(1000).data_ptr() != first.data_ptr()


def test_mappings__keep_the_newest():
    memory, mappings = RecycledMemory(), Mappings(num_workers=1)
    taken = [memory.take(1000) for _ in range(4)]
    for number in (0, 1, 2, 0, 3):
        mappings.keep(taken[number])
    assert list(mappings._kept) == [taken[number].data_ptr() for number in (2, 0, 3)]


@pytest.mark.parametrize("tensor", [
    torch.arange(12).view(3, 4)[:, 1::2], torch.tensor(True), torch.rand(0, 3), torch.full((2**14,), 1.5)
], ids=lambda tensor: f"{tensor.dtype}")  # fmt: skip
def test_small_tensors__are_sent_by_value(tensor):
    sent = pickle.loads(bytes(ForkingPickler.dumps(by_value(tensor))))
    assert torch.equal(sent, tensor) and sent.dtype == tensor.dtype and not (sent.is_shared() and sent.numel())
    sent.zero_()


@pytest.mark.parametrize("value", [torch.zeros(2**14 + 1), torch.zeros(3).bfloat16(), 7, None], ids=str)
def test_other_values__are_sent_by_torch(value):
    assert by_value(value) is value
