"""Several hosts of a TPU slice, without one: what each host does by itself, with others, and with a slice that is none.

A CPU client of XLA has one process. Two processes here have each a client of its own, so that they share no program:
what they say to each other on the host is tested, and that training is refused. That it is right on a slice is not.
"""

import json
import logging
import os
import signal
import socket
import time

import pytest
from ranks import Ranks

from vitkernels import parallel
from vitkernels.errors import UsageError
from vitkernels.parallel import Parallel
from vitkernels.runtime import Runtime, xla
from vitkernels.training.history import History
from vitkernels.training.signals import EXIT_INTERRUPTED

HAS_XLA = xla.unavailable() is None
needs_xla = pytest.mark.skipif(not HAS_XLA, reason="torch_xla is not installed")
if HAS_XLA:
    from vitkernels.parallel import tpu_multihost, tpu_spmd


# ---- which host this is, before anything is opened ----


@pytest.fixture
def on_host(monkeypatch):
    """Sets which host of a slice this is."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def be(rank, world):
        addresses = tuple(f"10.0.0.{n}" for n in range(world))
        monkeypatch.setattr(xla, "host", lambda: xla.Host(rank, addresses) if world > 1 else None)

    return be


def test_the_first_host_alone_writes_and_others_say_who_they_are(on_host):
    words = ["train.py", "hydra.run.dir=runs/a", "seed=1"]
    on_host(0, 4)
    assert parallel.is_main("xla") and parallel.rank_arguments(words) == words
    on_host(3, 4)
    assert not parallel.is_main("xla") and not parallel.is_main("auto")
    quiet = parallel.rank_arguments(words)
    assert "hydra.run.dir=." in quiet and "hydra.run.dir=runs/a" not in quiet and any("[rank 3]" in w for w in quiet)
    on_host(0, 1)
    assert parallel.is_main("xla") and parallel.rank_arguments(words) == words


def test_a_host_of_a_slice_that_trains_on_its_cpu_is_alone(on_host):
    on_host(3, 4)
    assert parallel.is_main("cpu") and parallel.rank_arguments(["train.py", "runtime=cpu"])[1:] == ["runtime=cpu"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sweep_is_refused_on_every_host(on_host, rank):
    on_host(rank, 2)
    with pytest.raises(UsageError, match="a sweep starts its own processes"):
        parallel.rank_arguments(["train.py", "-m"])


def metadata(monkeypatch, addresses, number=1, chips=4, bounds=None):
    from torch_xla._internal import tpu

    def told(value):
        def tell():
            if isinstance(value, Exception):
                raise value
            return value

        return tell

    monkeypatch.setattr(xla, "has_tpu", lambda: True)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    for name, value in (
        ("get_worker_ips", addresses),
        ("worker_id", number),
        ("num_available_chips", chips),
        ("process_bounds_size", bounds),
    ):
        monkeypatch.setattr(tpu, name, told(value))
    return xla.host.__wrapped__()


@needs_xla
def test_a_host_finds_its_place_in_the_slice_s_metadata(monkeypatch, caplog):
    assert metadata(monkeypatch, ["10.0.0.2", "10.0.0.3"]) == xla.Host(1, ("10.0.0.2", "10.0.0.3"))
    assert metadata(monkeypatch, ["localhost"]) is None, "one host"
    assert metadata(monkeypatch, ["10.0.0.2", "10.0.0.3"], bounds=1) is None, "set to be alone"
    assert metadata(monkeypatch, AssertionError("asked"), chips=0) is None, "no chip of Google's: not even asked"
    with caplog.at_level(logging.WARNING):
        assert metadata(monkeypatch, ConnectionError("no route")) is None
    assert "cannot be read" in caplog.text
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert xla.host.__wrapped__() is None


# ---- sums: once each, whoever has them ----


class Three(Parallel):
    """Three processes that all have the same to say."""

    world = 3

    def gather(self, value):
        return [value] * 3


def test_figures_of_one_program_are_of_all_images_already():
    engine = Three(Runtime())
    assert engine.total({"images": 10}) == {"images": 30} and engine.shares(1.5) == [1.5] * 3
    engine.rank = 2
    assert engine.stream == 2 and engine.writes
    engine.one_program = True
    assert engine.total({"images": 10}) == {"images": 10} and engine.shares(1.5) == [1.5]
    assert engine.stream == 0 and not engine.writes, "all draw the same, and the first has it all"


def test_what_must_be_the_same_everywhere_is_compared():
    engine = Three(Runtime())
    engine.expect_same("the data sets", (5, 2), "mend it")
    engine.gather = lambda value: [value, value, "other"]
    with pytest.raises(UsageError, match="the data sets on rank 2 and on rank 0 are not the same: mend it"):
        engine.expect_same("the data sets", (5, 2), "mend it")


def test_a_loss_of_one_program_that_is_not_finite_blames_no_rank():
    import torch

    engine = Three(Runtime())
    for one_program, broken in ((False, (0, 1, 2)), (True, ())):
        engine.one_program = one_program
        history = History(engine)
        history.add(1, torch.tensor(float("nan")), torch.tensor(1.0), 0.1)
        assert history.read()[0].broken_ranks == broken
        history.add(2, torch.tensor(2.5), torch.tensor(1.0), 0.1)
        assert history.read()[0].loss == 2.5


# ---- the order of the chips ----


def chips_of(monkeypatch, everyone):
    """The mesh's order where hosts, by rank, have these chips."""
    host = object.__new__(tpu_multihost.PodData)
    host.rank, host.world = 0, len(everyone)
    host.gather = lambda value: everyone
    monkeypatch.setattr(tpu_multihost, "_own_chips", lambda: everyone[0])
    monkeypatch.setattr(tpu_spmd.SpmdData, "_chips", lambda self: list(range(8)))
    return host._chips()


@needs_xla
def test_each_host_s_chips_are_side_by_side_in_the_order_of_the_hosts(monkeypatch):
    assert chips_of(monkeypatch, [[4, 5, 7, 6], [0, 1, 2, 3]]) == [4, 5, 7, 6, 0, 1, 2, 3]


@needs_xla
@pytest.mark.parametrize("everyone", [[[0, 1, 2, 3]] * 2, [[0, 1, 2, 3], [4, 5, 6]], [[0, 1, 2, 3, 4], [5, 6, 7]]])
def test_chips_that_are_not_shared_out_evenly_are_refused(monkeypatch, everyone):
    with pytest.raises(UsageError, match="do not share its 8 chips evenly"):
        chips_of(monkeypatch, everyone)


ON_FOUR = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}


def probe(port, orders):
    """In a process with four CPU devices: what a pod of one host finds that has them in these orders."""
    os.environ |= ON_FOUR | {"MASTER_PORT": str(port)}
    for order in orders:
        tpu_multihost._own_chips = lambda order=order: order
        runtime = xla.XlaRuntime()
        # As on several hosts: torch_xla deals rows out to a process's chips in its own order, not in the mesh's.
        feed = runtime.feed
        runtime.feed = lambda batches, sharding, feed=feed: feed(batches, lambda rank: by_minibatch(sharding(rank)))
        try:
            with tpu_multihost.PodFsdp(runtime, xla.Host(0, ("127.0.0.1",)), 30) as host:
                print("fits", host.describe(), host.checkpoint_group)
        except UsageError as error:
            print("refused", error)


def by_minibatch(spec):
    spec.minibatch = True
    return spec


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@needs_xla
def test_what_training_relies_on_is_tried_with_rows_and_a_parameter(tmp_path):
    one = Ranks.of(1, tmp_path / "probe", probe, free_port(), [[0, 1, 2, 3], [2, 3, 0, 1]])
    assert one.finish() == [0], one.said()
    said = one.said()
    assert "fits fsdp, SPMD over 4 devices of 1 hosts None" in said
    assert "the rows of a batch came to [4.0, 5.0, 6.0, 7.0, 0.0, 1.0, ...] and not to [0, 1, 2, 3, 4, 5, ...]" in said


# ---- two processes ----

HOST = """
import os
os.environ |= {{"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "MASTER_PORT": "{port}"}}
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"):
    del os.environ[name]
import torch_xla.runtime
from vitkernels.parallel import pod
from vitkernels.runtime import xla
xla.host = lambda: xla.Host({rank}, ("127.0.0.1",) * 2)
torch_xla.runtime.process_count = lambda: 2
"""
# Each trains by itself, on its own rows: nobody who trains may have this. The rest is as on a slice.
APART = """
pod.Pod._chips = lambda self: [0, 1]
"""
UNCHECKED = """
pod.Pod._check = lambda self: None
"""
WORDS = ["runtime=xla", "runtime.precision=fp32", "data.batch_size=16", "++model.kwargs.depth=1"]
WORDS += ["trainer.eval_every=null", "resume=auto", "checkpoints.every_steps=2", "parallel.lost_after=10"]


def two_hosts(folder, *words, code=""):
    port = free_port()
    before = {rank: HOST.format(port=port, rank=rank) + code for rank in range(2)}
    return Ranks(2, folder, *WORDS, *words, before=before)


REFUSED = {
    "ddp": ("", "do not share its 2 chips evenly, each chip on one host: by rank they have [[0, 1], [0, 1]]"),
    "fsdp": (
        APART,
        "2 hosts cannot train together: on rank 0, the rows of a batch came to [0.0, 1.0] and not to",
    ),
}


@needs_xla
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_hosts_that_share_no_program_are_refused(tmp_path, engine):
    code, why = REFUSED[engine]
    hosts = two_hosts(tmp_path / "run", f"parallel={engine}", "trainer.max_steps=2", code=code)
    assert hosts.finish() == [2, 2], hosts.said()
    for rank in range(2):
        assert why in hosts.said(rank), hosts.said()
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


@needs_xla
def test_one_host_of_a_slice_that_torch_xla_sees_whole_is_refused(tmp_path):
    code = "torch_xla.runtime.process_count = lambda: 4\n"
    hosts = two_hosts(tmp_path / "run", "parallel=ddp", "trainer.max_steps=2", code=code)
    assert hosts.finish() == [2, 2], hosts.said()
    assert "2 hosts by its metadata, and torch_xla finds 4 processes" in hosts.said(1)


def losses(folder):
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@needs_xla
def test_sigterm_to_one_host_stops_both_and_they_go_on_from_what_the_first_wrote(tmp_path):
    folder = tmp_path / "run"
    code = APART + UNCHECKED
    hosts = two_hosts(folder, "parallel=ddp", "trainer.max_steps=100000", code=code)
    hosts.wait_until(lambda: len(losses(folder)) >= 4)
    hosts.processes[1].terminate()
    assert hosts.finish() == [EXIT_INTERRUPTED] * 2, hosts.said()
    assert "stopped by SIGTERM at step" in hosts.said(0)
    last = max(losses(folder))
    newest = folder / f"checkpoints/step_{last:08d}"
    assert sorted(p.name for p in newest.iterdir()) == ["rank_00000.safetensors", "state.json"], "one has it all"
    # The other host has no such files: what it goes on from, the first one has read for it.
    blind = "from vitkernels.training import checkpoint\n"
    blind += "if xla.host().rank: checkpoint.load_state = checkpoint.load_tensors = None\n"
    hosts = two_hosts(folder, "parallel=ddp", f"trainer.max_steps={last + 2}", code=code + blind)
    assert hosts.finish() == [0, 0], hosts.said()
    assert f"resumed from {newest}" in hosts.said(0) and "step" not in hosts.said(1), "only the first talks"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["devices"], summary["batch_size"], summary["steps"]) == (2, 32, last + 2)
    assert list(losses(folder)) == list(range(1, last + 3))
    words = [word for word in WORDS if not word.startswith(("runtime", "data.batch_size"))]
    alone = Ranks(1, folder, *words, "data.batch_size=32", f"trainer.max_steps={last + 4}")
    assert alone.finish() == [0] and "resumed from" in alone.said(), alone.said()
    assert list(losses(folder)) == list(range(1, last + 5))


@needs_xla
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_dies_ends_the_other(tmp_path, lost):
    folder = tmp_path / "run"
    hosts = two_hosts(folder, "parallel=ddp", "trainer.max_steps=100000", code=APART + UNCHECKED)
    hosts.wait_until(lambda: len(losses(folder)) >= 2)
    os.kill(hosts.processes[lost].pid, signal.SIGKILL)
    begin = time.monotonic()
    hosts.processes[1 - lost].join(60)
    assert time.monotonic() - begin < 30 and hosts.finish()[1 - lost] == EXIT_INTERRUPTED, hosts.said()
    why = "the store at 127.0.0.1:" if lost == 0 else f"rank 1 (process {hosts.processes[1].pid} on "
    assert why in hosts.said(1 - lost), hosts.said()


@needs_xla
def test_weights_that_differ_between_hosts_are_refused(tmp_path):
    code = APART + UNCHECKED + "if xla.host().rank: pod._checksum = lambda model: -1\n"
    hosts = two_hosts(tmp_path / "run", "parallel=ddp", "trainer.max_steps=2", code=code)
    assert hosts.finish() == [2, 2], hosts.said()
    assert "the model's weights on rank 1 and on rank 0 are not the same" in hosts.said(0)


@needs_xla
def test_a_mistake_on_one_host_alone_is_told_to_the_other(tmp_path):
    code = APART + UNCHECKED + "import vitkernels.models as models\n"
    code += "from vitkernels.errors import UsageError\n"
    code += "def missing(*args): raise UsageError('no such file: weights')\n"
    code += "if xla.host().rank: models.input_spec = missing\n"
    hosts = two_hosts(tmp_path / "run", "parallel=ddp", "trainer.max_steps=2", code=code)
    assert hosts.finish() == [EXIT_INTERRUPTED, 2], hosts.said()
    assert "[rank 1] error: no such file: weights" in hosts.said(1)
    assert "rank 1 ended with UsageError: no such file: weights" in hosts.said(0)
