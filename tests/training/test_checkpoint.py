"""Checkpoints are whole or absent, whatever happens while they are written."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from vitkernels import runtime
from vitkernels.training import checkpoint as ckpt

STATE = {"model": {"w": torch.arange(1000.0)}, "best": {"top1": 1.0}}


def test_round_trip_keeps_the_newest_and_the_best(tmp_path):
    store = ckpt.Checkpoints(tmp_path, keep=2)
    for step in range(1, 6):
        path = store.save({**STATE, "mark": step}, step)
        if step == 2:
            store.mark_best(path)
    assert [p.name for p in store.paths()] == ["step_00000005.pt", "step_00000004.pt"]
    path, state = store.newest_whole()
    assert state["mark"] == 5 and state["step"] == 5 and path == store.paths()[0]
    torch.testing.assert_close(state["model"]["w"], STATE["model"]["w"], rtol=0, atol=0)
    assert ckpt.load(tmp_path / "best.pt")["mark"] == 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "not torch"])
def test_a_damaged_checkpoint_is_refused_and_passed_over(tmp_path, damage, caplog):
    store = ckpt.Checkpoints(tmp_path)
    store.save({**STATE, "mark": 1}, 1)
    path = store.save({**STATE, "mark": 2}, 2)
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "empty":
        content = bytearray()
    elif damage == "flipped":
        spot = content.find(np.float32(500.0).tobytes() + np.float32(501.0).tobytes())
        assert spot > 0
        content[spot] ^= 0xFF
    else:
        content = bytearray(b"PK not a checkpoint")
    path.write_bytes(content)
    with pytest.raises(ckpt.CheckpointError, match="not a whole checkpoint"):
        ckpt.load(path)
    assert store.newest_whole()[1]["mark"] == 1
    assert path.name in caplog.text


def test_other_files_are_not_checkpoints(tmp_path):
    torch.save({"weights": 1}, tmp_path / "other.pt")
    with pytest.raises(ckpt.CheckpointError, match="not a training checkpoint"):
        ckpt.load(tmp_path / "other.pt")
    with pytest.raises(ckpt.CheckpointError, match="no such file"):
        ckpt.load(tmp_path / "none.pt")
    torch.save({"format": 99}, tmp_path / "new.pt")
    with pytest.raises(ckpt.CheckpointError, match="format 99"):
        ckpt.load(tmp_path / "new.pt")


def test_nothing_in_a_checkpoint_is_executed(tmp_path):
    class Malice:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path}/ran",))

    torch.save({"format": 1, "x": Malice()}, tmp_path / "evil.pt")
    with pytest.raises(ckpt.CheckpointError):
        ckpt.load(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    store = ckpt.Checkpoints(tmp_path)
    store.save({**STATE, "mark": 1}, 1)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.save({**STATE, "mark": 2}, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001.pt"]


def test_a_disk_that_fills_while_torch_writes(tmp_path):
    """The kernel refuses to let the file grow, as on a full disk; torch reports it as an error of its own."""
    resource = pytest.importorskip("resource")
    store = ckpt.Checkpoints(tmp_path)
    store.save({**STATE, "mark": 1}, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"could not be written|too large"):
            store.save({"w": torch.zeros(10**6)}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001.pt"]


def test_a_new_checkpoint_stays_beside_broken_ones_of_later_steps(tmp_path):
    store = ckpt.Checkpoints(tmp_path, keep=1)
    (tmp_path / "step_00000009.pt").write_bytes(b"torn")
    store.save({**STATE, "mark": 3}, 3)
    assert store.newest_whole()[1]["mark"] == 3


WRITER = """
import sys, torch
from vitkernels.training.checkpoint import Checkpoints
store = Checkpoints(sys.argv[1])
first = store.newest_whole()[1]["step"] + 1 if store.paths() else 1
print("ready", flush=True)
for step in range(first, 10**6):
    path = store.save({"w": torch.full((300_000,), float(step))}, step)
    if step % 3 == 0:
        store.mark_best(path)
"""


def test_killed_while_writing(tmp_path):
    """SIGKILL at random moments of a process that does nothing but write checkpoints."""
    chance, last = random.Random(0), 0
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(chance.uniform(0.02, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for path in tmp_path.glob("*.pt"):  # each file that has its final name is whole
            state = ckpt.load(path)
            assert bool((state["w"] == state["step"]).all())
        newest = ckpt.Checkpoints(tmp_path).newest_whole()
        assert newest[1]["step"] >= last
        last = newest[1]["step"]
    assert last > 5


def test_random_state_round_trip(tmp_path):
    cpu = runtime.create("cpu")
    random.gauss(0, 1), np.random.randn(3)
    ckpt.Checkpoints(tmp_path).save({"rng": ckpt.rng_state(cpu)}, 1)
    expected = (random.random(), random.gauss(0, 1), np.random.randn(), torch.rand(3).tolist())
    ckpt.set_rng_state(ckpt.Checkpoints(tmp_path).newest_whole()[1]["rng"], cpu)
    assert (random.random(), random.gauss(0, 1), np.random.randn(), torch.rand(3).tolist()) == expected


def test_to_cpu_keeps_the_nesting():
    state = {"a": [torch.ones(1, requires_grad=True), (1, "x")], "b": None}
    copied = ckpt.to_cpu(state)
    assert copied["a"][1] == (1, "x") and not copied["a"][0].requires_grad
