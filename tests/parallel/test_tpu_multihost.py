"""Several hosts of a TPU slice, without a slice: each host alone, two hosts together, and hosts that share no program.

XLA's CPU client spans one process. Two processes here have separate clients and share no program: the tests cover
their communication on the host, and that training is refused. They cannot show that training on a slice is correct.
"""

import json
import logging
import os
import signal
import socket
import time

import pytest
import torch
from expecting import error
from quick_xla import QUICK_XLA
from ranks import Ranks

from vitkernels import parallel
from vitkernels.cli.ranks import rank_arguments
from vitkernels.errors import EXIT_INTERRUPTED, UsageError
from vitkernels.parallel import Parallel
from vitkernels.runtime import Runtime, xla
from vitkernels.training.metrics import StepMetrics

pytestmark = pytest.mark.slow

HAS_XLA = xla.unavailable() is None
needs_xla = pytest.mark.skipif(not HAS_XLA, reason="torch_xla is not installed")
if HAS_XLA:
    from vitkernels.parallel import tpu_multihost, tpu_spmd


# ---- the host's rank, before the TPU is opened ----


@pytest.fixture
def on_host(monkeypatch):
    """Return a function that makes this the given host of a slice."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def be(rank, world):
        addresses = tuple(f"10.0.0.{n}" for n in range(world))
        monkeypatch.setattr(xla, "host", lambda: xla.Host(rank, addresses) if world > 1 else None)

    return be


def test_rank_arguments__only_the_first_host_writes_and_others_log_their_rank(on_host):
    words = ["train.py", "hydra.run.dir=runs/a", "seed=1"]
    on_host(0, 4)
    assert parallel.is_main("xla") and rank_arguments(words) == words
    on_host(3, 4)
    assert not parallel.is_main("xla") and not parallel.is_main("auto")
    quiet = rank_arguments(words)
    assert "hydra.run.dir=." in quiet and "hydra.run.dir=runs/a" not in quiet and any("[rank 3]" in w for w in quiet)
    on_host(0, 1)
    assert parallel.is_main("xla") and rank_arguments(words) == words


def test_is_main__on_a_slice_host_that_trains_on_its_cpu(on_host):
    on_host(3, 4)
    assert parallel.is_main("cpu") and rank_arguments(["train.py", "runtime=cpu"])[1:] == ["runtime=cpu"]


@pytest.mark.parametrize("rank", [0, 1])
def test_sweep__is_refused_on_every_host(on_host, rank):
    on_host(rank, 2)
    with error("cli.sweep_on_ranks", world=2):
        rank_arguments(["train.py", "-m"])


def metadata(monkeypatch, addresses, number=1, chips=4, bounds=None):
    from torch_xla._internal import tpu

    def returning(value):
        def get():
            if isinstance(value, Exception):
                raise value
            return value

        return get

    monkeypatch.setattr(xla, "has_tpu", lambda: True)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    for name, value in (
        ("get_worker_ips", addresses),
        ("worker_id", number),
        ("num_available_chips", chips),
        ("process_bounds_size", bounds),
    ):
        monkeypatch.setattr(tpu, name, returning(value))
    return xla.host.__wrapped__()


@needs_xla
def test_host__reads_its_rank_from_the_slice_metadata(monkeypatch, caplog):
    assert metadata(monkeypatch, ["10.0.0.2", "10.0.0.3"]) == xla.Host(1, ("10.0.0.2", "10.0.0.3"))
    assert metadata(monkeypatch, ["localhost"]) is None, "one host"
    assert metadata(monkeypatch, ["10.0.0.2", "10.0.0.3"], bounds=1) is None, "configured as a single host"
    assert metadata(monkeypatch, AssertionError("read"), chips=0) is None, "no TPU chip: metadata not read"
    with caplog.at_level(logging.WARNING):
        assert metadata(monkeypatch, ConnectionError("no route")) is None
    assert "cannot be read" in caplog.text
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert xla.host.__wrapped__() is None


# ---- totals count each image once ----


class ThreeEqualRanks(Parallel):
    """Three processes with equal values."""

    world = 3

    def gather(self, value):
        return [value] * 3


def test_total__sums_over_ranks_unless_one_program():
    engine = ThreeEqualRanks(Runtime())
    assert engine.total({"images": 10}) == {"images": 30} and engine.shares(1.5) == [1.5] * 3
    engine.rank = 2
    assert engine.stream == 2 and engine.writes
    engine.one_program = True
    assert engine.total({"images": 10}) == {"images": 10} and engine.shares(1.5) == [1.5]
    assert engine.stream == 0 and not engine.writes, "one random stream, and one writer"


def test_expect_same__names_the_ranks_that_differ():
    engine = ThreeEqualRanks(Runtime())
    engine.expect_same("the data sets", (5, 2), "fix it")
    engine.gather = lambda value: [value, value, "other"]
    with error("parallel.mismatch", what="the data sets", ranks=[2]):
        engine.expect_same("the data sets", (5, 2), "fix it")


def test_nonfinite_loss__of_one_program_blames_no_rank():
    engine = ThreeEqualRanks(Runtime())
    for one_program, broken in ((False, (0, 1, 2)), (True, ())):
        engine.one_program = one_program
        metrics = StepMetrics(engine)
        metrics.add(1, torch.tensor(float("nan")), torch.tensor(1.0), 0.1)
        assert metrics.read()[0].nonfinite_ranks == broken
        metrics.add(2, torch.tensor(2.5), torch.tensor(1.0), 0.1)
        assert metrics.read()[0].loss == 2.5


# ---- the order of the chips ----


def chips_of(monkeypatch, everyone):
    """Return the mesh's order if hosts have these chips, by rank."""
    host = object.__new__(tpu_multihost.MultihostDdp)
    host.rank, host.world = 0, len(everyone)
    host.gather = lambda value: everyone
    monkeypatch.setattr(tpu_multihost, "_own_chips", lambda: everyone[0])
    monkeypatch.setattr(tpu_spmd.SpmdDdp, "_mesh_chips", lambda self: list(range(8)))
    return host._mesh_chips()


@needs_xla
def test_mesh__keeps_the_chips_of_each_host_adjacent_in_host_order(monkeypatch):
    assert chips_of(monkeypatch, [[4, 5, 7, 6], [0, 1, 2, 3]]) == [4, 5, 7, 6, 0, 1, 2, 3]


@needs_xla
@pytest.mark.parametrize("everyone", [[[0, 1, 2, 3]] * 2, [[0, 1, 2, 3], [4, 5, 6]], [[0, 1, 2, 3, 4], [5, 6, 7]]])
def test_mesh__refuses_an_uneven_split_of_chips(monkeypatch, everyone):
    with error("parallel.chips", chips_by_rank=everyone):
        chips_of(monkeypatch, everyone)


ON_FOUR = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}


def probe(port, orders):
    """Print what the check of one host with four CPU devices finds for each order of the devices."""
    os.environ |= ON_FOUR | {"MASTER_PORT": str(port)}
    for order in orders:
        tpu_multihost._own_chips = lambda order=order: order
        runtime = xla.XlaRuntime()
        # As on several hosts: torch_xla assigns rows to a process's chips in its own order, not the mesh's.
        feed = runtime.feed
        runtime.feed = lambda batches, sharding, feed=feed: feed(batches, lambda rank: by_minibatch(sharding(rank)))
        try:
            with tpu_multihost.MultihostFsdp(runtime, xla.Host(0, ("127.0.0.1",)), 30) as host:
                print("fits", host.describe(), host.checkpoint_group)
        except UsageError as refused:
            print("refused", refused)


def by_minibatch(spec):
    spec.minibatch = True
    return spec


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@needs_xla
def test_probe__detects_a_wrong_order_of_chips(tmp_path):
    one = Ranks.of(1, tmp_path / "probe", probe, free_port(), [[0, 1, 2, 3], [2, 3, 0, 1]])
    assert one.finish() == [0], one.output()
    output = one.output()
    assert "fits fsdp, SPMD over 4 devices of 1 hosts None" in output
    assert "the rows of a batch should be [0, 1, 2, 3, 4, 5, ...] but is [4.0, 5.0, 6.0, 7.0, 0.0, 1.0, ...]" in output


# ---- two processes ----

HOST = """
import os
os.environ |= {{"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "MASTER_PORT": "{port}"}}
os.environ["XLA_FLAGS"] = "QUICK_XLA"
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"):
    del os.environ[name]
import torch_xla.runtime
from vitkernels.parallel import tpu_multihost
from vitkernels.runtime import xla
xla.host = lambda: xla.Host({rank}, ("127.0.0.1",) * 2)
torch_xla.runtime.process_count = lambda: 2
""".replace("QUICK_XLA", QUICK_XLA)
# Each host trains alone on its own rows, which real training must refuse. The rest is as on a slice.
APART = """
tpu_multihost.Multihost._mesh_chips = lambda self: [0, 1]
"""
UNCHECKED = """
tpu_multihost.Multihost._check = lambda self: None
"""
WORDS = ["runtime=xla", "runtime.precision=fp32", "data.batch_size=16", "++model.kwargs.depth=1"]
WORDS += ["trainer.eval_every=null", "resume=auto", "checkpoints.every_steps=2", "parallel.lost_after=10"]


def two_hosts(folder, *words, code=""):
    port = free_port()
    before = {rank: HOST.format(port=port, rank=rank) + code for rank in range(2)}
    return Ranks(2, folder, *WORDS, *words, before=before)


REFUSED = {
    "ddp": ("", "rank they have [[0, 1], [0, 1]]"),
    "fsdp": (
        APART,
        "2 hosts cannot train together: on rank 0, the rows of a batch",
    ),
}


@needs_xla
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_hosts_without_a_common_program__are_refused(tmp_path, engine):
    code, why = REFUSED[engine]
    hosts = two_hosts(tmp_path / "run", f"parallel={engine}", "trainer.max_steps=2", code=code)
    assert hosts.finish() == [2, 2], hosts.output()
    for rank in range(2):
        assert why in hosts.output(rank), hosts.output()
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


@needs_xla
def test_host_count__must_match_the_processes_of_torch_xla(tmp_path):
    code = "torch_xla.runtime.process_count = lambda: 4\n"
    hosts = two_hosts(tmp_path / "run", "parallel=ddp", "trainer.max_steps=2", code=code)
    assert hosts.finish() == [2, 2], hosts.output()
    assert "metadata lists 2 hosts, but torch_xla finds 4 processes" in hosts.output(1)


def losses(folder):
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@needs_xla
def test_sigterm__to_one_host_stops_both_and_they_resume_from_files_of_the_first(tmp_path):
    folder = tmp_path / "run"
    code = APART + UNCHECKED
    hosts = two_hosts(folder, "parallel=ddp", "trainer.max_steps=100000", code=code)
    hosts.wait_until(lambda: len(losses(folder)) >= 4)
    hosts.processes[1].terminate()
    assert hosts.finish() == [EXIT_INTERRUPTED] * 2, hosts.output()
    assert "SIGTERM at step" in hosts.output(0)
    last = max(losses(folder))
    newest = folder / f"checkpoints/step_{last:08d}"
    assert sorted(p.name for p in newest.iterdir()) == ["rank_00000.safetensors", "state.json"], (
        "the first host writes everything"
    )
    # The other host cannot read the files: the first one reads and broadcasts them.
    blind = "from vitkernels.training import resume, trainer\n"
    blind += "if xla.host().rank: resume.load_state = trainer.load_state = trainer.load_tensors = None\n"
    hosts = two_hosts(folder, "parallel=ddp", f"trainer.max_steps={last + 2}", code=code + blind)
    assert hosts.finish() == [0, 0], hosts.output()
    assert f"resumed from {newest}" in hosts.output(0) and "step" not in hosts.output(1), "only the first logs"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["devices"], summary["batch_size"], summary["steps"]) == (2, 32, last + 2)
    assert list(losses(folder)) == list(range(1, last + 3))
    words = [word for word in WORDS if not word.startswith(("runtime", "data.batch_size"))]
    alone = Ranks(1, folder, *words, "data.batch_size=32", f"trainer.max_steps={last + 4}")
    assert alone.finish() == [0] and "resumed from" in alone.output(), alone.output()
    assert list(losses(folder)) == list(range(1, last + 5))


@needs_xla
@pytest.mark.parametrize("lost", [0, 1])
def test_lost_host__aborts_the_other(tmp_path, lost):
    folder = tmp_path / "run"
    hosts = two_hosts(folder, "parallel=ddp", "trainer.max_steps=100000", code=APART + UNCHECKED)
    hosts.wait_until(lambda: len(losses(folder)) >= 2)
    os.kill(hosts.processes[lost].pid, signal.SIGKILL)
    begin = time.monotonic()
    hosts.processes[1 - lost].join(60)
    assert time.monotonic() - begin < 30 and hosts.finish()[1 - lost] == EXIT_INTERRUPTED, hosts.output()
    why = (
        "lost the connection to the store at 127.0.0.1:"
        if lost == 0
        else f"rank 1 (process {hosts.processes[1].pid} on "
    )
    assert why in hosts.output(1 - lost), hosts.output()


@needs_xla
def test_weights__that_differ_between_hosts_are_refused(tmp_path):
    code = APART + UNCHECKED + "if xla.host().rank: tpu_multihost._checksum = lambda model: -1\n"
    hosts = two_hosts(tmp_path / "run", "parallel=ddp", "trainer.max_steps=2", code=code)
    assert hosts.finish() == [2, 2], hosts.output()
    assert "the model's weights on rank 1 differ from rank 0" in hosts.output(0)


@needs_xla
def test_error_on_one_host__is_reported_on_the_other(tmp_path):
    code = APART + UNCHECKED + "import vitkernels.models as models\n"
    code += "from vitkernels.errors import UsageError\n"
    code += "def missing(*args): raise UsageError('no such file: weights')\n"
    code += "if xla.host().rank: models.input_spec = missing\n"
    hosts = two_hosts(tmp_path / "run", "parallel=ddp", "trainer.max_steps=2", code=code)
    assert hosts.finish() == [EXIT_INTERRUPTED, 2], hosts.output()
    assert "[rank 1] error: no such file: weights" in hosts.output(1)
    assert "rank 1 failed with UsageError: no such file: weights" in hosts.output(0)
