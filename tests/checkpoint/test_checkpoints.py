"""Checkpoints are complete or absent, whatever happens while they are written."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from expecting import error
from timm.optim import create_optimizer_v2
from torch import nn

from vitkernels import runtime
from vitkernels.checkpoint import checkpoints as ckpt
from vitkernels.checkpoint import optimizer_state
from vitkernels.checkpoint.random_state import random_state, set_random_state
from vitkernels.data.randomness import Stream, seeded_globals
from vitkernels.models import read_state_dict

TENSORS = {"model/w": torch.arange(1000.0), "model/step": torch.tensor(3.0), "rng/0": torch.zeros(3, dtype=torch.uint8)}


def save(store, mark, tensors=TENSORS):
    path = store.save(tensors, {"mark": mark}, mark)
    store.wait()
    return path


def mark(path):
    return ckpt.load_state(path)["mark"]


def test_round_trip__keeps_the_newest_and_the_best(tmp_path):
    store = ckpt.Checkpoints(tmp_path, keep=2)
    for step in range(1, 6):
        path = store.save(TENSORS, {"mark": step}, step)
        if step == 2:
            store.mark_best(path)
    store.wait()
    assert [p.name for p in store.paths()] == ["step_00000005", "step_00000004", "step_00000002"]
    assert store.newest_valid() == store.paths()[0] == path
    state = ckpt.load_state(path)
    assert state["mark"] == 5 and state["step"] == 5
    loaded = ckpt.load_tensors(path, "model")
    assert set(loaded) == {"w", "step"} and loaded["step"].shape == ()
    torch.testing.assert_close(loaded["w"], TENSORS["model/w"], rtol=0, atol=0)
    assert mark(tmp_path / "best") == 2
    store.mark_best(path)
    assert mark(tmp_path / "best") == 5 and not (tmp_path / "step_00000002").exists()
    save(store, 6)
    assert mark(tmp_path / "best") == 5


def test_save__copies_tensors_before_it_returns(tmp_path):
    weights = torch.zeros(3_000_000)
    store = ckpt.Checkpoints(tmp_path)
    path = store.save({"model/w": weights}, {"mark": 1}, 1)
    weights.fill_(1.0)  # training continues while the thread writes
    store.wait()
    assert not ckpt.load_tensors(path, "model")["w"].any()


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "lost", "state"])
def test_damaged_checkpoint__is_refused_and_skipped(tmp_path, damage, caplog):
    store = ckpt.Checkpoints(tmp_path)
    save(store, 1)
    path = save(store, 2)
    file = path / ("state.json" if damage == "state" else "rank_00000.safetensors")
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        spot = content.find(np.float32(500.0).tobytes() + np.float32(501.0).tobytes())
        assert spot > 0
        content[spot] ^= 0xFF
    file.write_bytes(b"" if damage == "empty" else content if damage == "flipped" else content[: len(content) // 2])
    if damage == "lost":
        file.unlink()
    for read in (ckpt.load_state, read_state_dict):
        with error("checkpoint.invalid", ckpt.CheckpointError, path=path):
            read(path)
    assert mark(store.newest_valid()) == 1
    assert path.name in caplog.text


def test_load_state__refuses_paths_without_a_checkpoint(tmp_path):
    torch.save({"weights": 1}, tmp_path / "other.pt")
    with error("checkpoint.missing", ckpt.CheckpointError):
        ckpt.load_state(tmp_path / "other.pt")
    with error("checkpoint.missing", ckpt.CheckpointError):
        ckpt.load_state(tmp_path / "none")
    with error("checkpoint.invalid", ckpt.CheckpointError):
        ckpt.load_state(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps({"format": 99, "files": {}}))
    with error("checkpoint.format", ckpt.CheckpointError, format=99):
        ckpt.load_state(tmp_path)


def test_checkpoint__contains_no_pickle(tmp_path):
    path = save(ckpt.Checkpoints(tmp_path), 1)
    assert sorted(p.name for p in path.iterdir()) == ["rank_00000.safetensors", "state.json"]


def test_full_disk__keeps_earlier_checkpoints(tmp_path, monkeypatch, caplog):
    store = ckpt.Checkpoints(tmp_path)
    save(store, 1)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        save(store, 2)
    assert "the checkpoint of step 2" in caplog.text and "No space left" in caplog.text
    assert [mark(path) for path in store.paths()] == [1]
    assert mark(save(store, 3)) == 3 and not list(tmp_path.glob("*.tmp"))


def test_disk_that_fills_during_a_write__keeps_earlier_checkpoints(tmp_path, caplog):
    """A file size limit stands in for the full disk."""
    resource = pytest.importorskip("resource")
    store = ckpt.Checkpoints(tmp_path)
    save(store, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        save(store, 2, {"w": torch.zeros(10**6)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "the checkpoint of step 2" in caplog.text and "too large" in caplog.text
    assert [mark(path) for path in store.paths()] == [1]


def test_programming_error__is_raised(tmp_path):
    store = ckpt.Checkpoints(tmp_path)
    store.save(TENSORS, {"mark": object()}, 1)
    with pytest.raises(RuntimeError):  # json's TypeError, which is not an OSError
        store.wait()


def test_new_checkpoint__is_kept_next_to_a_broken_later_one(tmp_path):
    store = ckpt.Checkpoints(tmp_path, keep=1)
    (tmp_path / "step_00000009").mkdir()
    save(store, 3)
    assert mark(store.newest_valid()) == 3


WRITER = """
import sys, torch
from vitkernels.checkpoint.checkpoints import Checkpoints, load_state
store = Checkpoints(sys.argv[1])
first = load_state(store.newest_valid())["step"] + 1 if store.paths() else 1
for step in range(first, 10**6):
    path = store.save({"model/w": torch.full((300_000,), float(step))}, {}, step)
    if step % 3 == 0:
        store.mark_best(path)
    if step == first:
        store.wait()
        print("wrote one", flush=True)
"""


def test_kill__leaves_only_complete_checkpoints(tmp_path):
    """Send SIGKILL at random moments to a process that only writes checkpoints."""
    chance, last = random.Random(0), 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(chance.uniform(0.05, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for path in ckpt.Checkpoints(tmp_path).paths():  # a folder with its final name is complete
            step = ckpt.load_state(path)["step"]
            assert bool((ckpt.load_tensors(path, "model")["w"] == step).all())
        newest = ckpt.load_state(ckpt.Checkpoints(tmp_path).newest_valid())["step"]
        assert newest > last
        last = newest


def test_random_state__round_trip(tmp_path):
    cpu = runtime.create("cpu")
    random.gauss(0, 1), np.random.randn(3)
    path = save(ckpt.Checkpoints(tmp_path), 1, {"rng/0": random_state(cpu)})
    expected = (random.random(), random.gauss(0, 1), np.random.randn(), torch.rand(3).tolist())
    set_random_state(ckpt.load_tensors(path, "rng")["0"], cpu)
    assert (random.random(), random.gauss(0, 1), np.random.randn(), torch.rand(3).tolist()) == expected


def test_random_state__is_that_of_training_while_a_thread_prepares_a_batch():
    cpu = runtime.create("cpu")
    before = random_state(cpu)
    seeded, saving = threading.Event(), threading.Event()

    def prepare():
        with seeded_globals(0, Stream.SAMPLE, 1):
            seeded.set()
            assert saving.wait(20)
            time.sleep(0.1)  # without a lock, the states are read now

    with ThreadPoolExecutor(1) as thread:
        prepared = thread.submit(prepare)
        assert seeded.wait(20)
        saving.set()
        assert torch.equal(random_state(cpu), before)
        prepared.result(20)


@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), torch.optim.Rprop]
)
def test_optimizer__resumes_exactly(tmp_path, make):
    torch.manual_seed(0)
    models = [nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    first, second = (make([{"params": [m.weight]}, {"params": [m.bias], "lr": 0.5}]) for m in models)

    def step(model, optimizer):
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(models[0], first)
    tensors, rest = optimizer_state.pack(first, models[0])
    store = ckpt.Checkpoints(tmp_path)
    path = store.save(
        ckpt.prefixed("optimizer", tensors) | ckpt.prefixed("model", models[0].state_dict()), {"o": rest}, 1
    )
    store.wait()
    models[1].load_state_dict(ckpt.load_tensors(path, "model"))
    optimizer_state.load(second, models[1], path, ckpt.load_state(path)["o"])
    for model, optimizer in zip(models, (first, second), strict=True):
        step(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    with error("optimizer.state_mismatch", path=path):
        optimizer_state.load(make(models[1].parameters()), models[1], path, ckpt.load_state(path)["o"])


def test_optimizer__resumes_its_counters_but_keeps_its_own_settings(tmp_path):
    """A run may branch off with another weight decay."""
    model = nn.Linear(3, 2)

    def make(weight_decay, betas):
        return create_optimizer_v2(model, opt="lookahead_lamb", lr=0.1, weight_decay=weight_decay, betas=betas)

    first, second = make(0.1, (0.9, 0.999)), make(0.7, (0.8, 0.9))
    model(torch.ones(4, 3)).square().sum().backward()
    first.step()
    tensors, rest = optimizer_state.pack(first, model)
    store = ckpt.Checkpoints(tmp_path)
    path = store.save(ckpt.prefixed("optimizer", tensors), {"o": rest}, 1)
    store.wait()
    optimizer_state.load(second, model, path, ckpt.load_state(path)["o"])
    for group, decay in zip(second.param_groups, (0.0, 0.7), strict=True):  # the first group has the biases
        assert group["weight_decay"] == decay and tuple(group["betas"]) == (0.8, 0.9)
        assert group["step"] == group["lookahead_step"] == 1
    second.step()
    assert second.param_groups[0]["step"] == 2


def test_changed_state__is_detected(tmp_path):
    path = save(ckpt.Checkpoints(tmp_path), 28)
    file = path / "state.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps(state | {"mark": 29}))
    with error("checkpoint.invalid", ckpt.CheckpointError):
        ckpt.load_state(path)
    file.write_text(json.dumps(state, indent=1))  # the same content in other bytes
    assert mark(path) == 28
    del state["checksum"]
    file.write_text(json.dumps(state))  # as older versions wrote it
    assert mark(path) == 28


def test_renamed_checkpoint__is_detected(tmp_path):
    path = save(ckpt.Checkpoints(tmp_path), 28)
    other = path.rename(tmp_path / "step_00000029")
    with error("checkpoint.invalid", ckpt.CheckpointError, path=other):
        ckpt.load_state(other)
    assert mark(other.rename(tmp_path / "kept_for_the_paper")) == 28


def test_leftovers__are_removed(tmp_path):
    store = ckpt.Checkpoints(tmp_path)
    save(store, 1)
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000000.old.tmp")
    (tmp_path / "best.tmp").symlink_to("step_00000000")
    store.remove_leftovers()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_disk_with_room_for_two_checkpoints__keeps_the_newest(tmp_path, monkeypatch, caplog):
    """With keep=2 the third is written before the first is removed; here the first goes earlier."""
    store = ckpt.Checkpoints(tmp_path, keep=2)

    def free(folder):
        used = sum(ckpt.folder_bytes(path) for path in store.paths())
        return int(2.5 * size) + ckpt.SPARE_BYTES - used

    size = ckpt.folder_bytes(save(store, 1))
    monkeypatch.setattr(ckpt, "free_bytes", free)
    for step in (2, 3, 4):
        save(store, step)
        assert [mark(path) for path in store.paths()] == ([2, 1] if step == 2 else [step, step - 1])
    assert "removed step_00000001" in caplog.text
    store.mark_best(tmp_path / "step_00000003")
    monkeypatch.setattr(ckpt, "free_bytes", lambda _: 0)
    save(store, 5)
    assert [mark(path) for path in store.paths()] == [5, 4, 3], "the newest and the best are never removed first"


def test_disk_without_room__keeps_an_older_checkpoint_if_the_newest_is_broken(tmp_path, monkeypatch):
    store = ckpt.Checkpoints(tmp_path)
    save(store, 1)
    (save(store, 2) / "rank_00000.safetensors").write_bytes(b"")
    monkeypatch.setattr(ckpt, "free_bytes", lambda _: 0)
    monkeypatch.setattr(ckpt._Writer, "write_data", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    save(store, 3)
    assert mark(store.newest_valid()) == 1
