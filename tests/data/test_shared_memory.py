"""Workers use memory of batches again, but only after it was handed back."""

import os

import pytest

from vitkernels.data import shared_memory
from vitkernels.data.shared_memory import RecycledMemory, hand_back, new_batch


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
