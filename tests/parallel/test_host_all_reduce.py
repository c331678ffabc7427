"""HostAllReduce between processes, and on streams simulated by threads that run their work late.

Without GPUs nothing else exercises its waits. In the simulation ranks are threads too, and after `finish` each
overwrites what it sent, as an allocator that reuses the memory would.
"""

import contextlib
import queue
import random
import threading
import time
from unittest import mock

import pytest
import torch
from late import Late
from ranks import Ranks
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitkernels import parallel
from vitkernels.parallel import host_all_reduce
from vitkernels.runtime.base import Runtime

pytestmark = pytest.mark.slow

WORLDS, PASSES, LONGEST = (1, 2, 3, 4), 8, 60  # seconds per rank
of_thread = threading.local()


def send_in_any_order():
    """Send in an order that differs by rank, some gradients twice; some passes abort, each rank at another place."""
    with parallel.create("ddp", Runtime()) as engine:
        sizes, large = [70, 3, 900, 65, 128, 2, 1], 5
        dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, *[torch.float32] * 4]
        with mock.patch.object(host_all_reduce, "_MIN_BUCKET_ELEMENTS", 1):
            buckets = host_all_reduce.assign_buckets(sizes, dtypes, large, order=[3, 0, 4, 1, 2])
        assert buckets == [[3, 4], [0, 2], [1], [5, 6]]
        flags = host_all_reduce.flag_count(buckets)
        host = Late(host_all_reduce.row_bytes(sizes, dtypes), flags, engine.rank, torch.device("cpu"), engine.gather)
        host.max_delay = 0.01 * engine.rank
        all_reduce = host_all_reduce.HostAllReduce([torch.Size([size]) for size in sizes], dtypes, buckets, host)
        common, own = random.Random(0), random.Random(engine.rank)
        for number in range(40):
            again = common.sample(range(large), common.choice([0, 1, 3]))
            aborts = common.random() < 0.2
            order = [*range(large), *again]
            own.shuffle(order)
            order = order[: own.randint(0, len(order))] if aborts else order
            torch.manual_seed(number)
            all_values = [
                [torch.randn(size).to(dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
                for _ in range(engine.world)
            ]  # known to all, so only the all-reduce synchronizes ranks
            values = all_values[engine.rank]
            # Of a gradient that is sent twice only the last counts.
            is_last = [i not in order[n + 1 :] for n, i in enumerate(order)]
            for index, last in zip(order, is_last, strict=True):
                all_reduce.send(index, values[index] * last)
            if aborts:
                all_reduce.abort()
                continue
            for index in range(large, len(values)):
                all_reduce.send(index, values[index])
            all_reduce.finish()
            for average, of_all in zip(all_reduce.averages(), zip(*all_values, strict=True), strict=True):
                assert torch.equal(average, sum(value.float() for value in of_all) / engine.world)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks__may_send_in_different_orders_and_some_twice(tmp_path, world):
    ranks = Ranks.of(world, tmp_path / "log", send_in_any_order)
    assert ranks.finish(120) == [0] * world, ranks.output()


class Stream:
    """Run work in order on a thread, each item up to 4 ms late."""

    def __init__(self, seed: str):
        self._work, self._random, self.error = queue.Queue(), random.Random(seed), None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while (work := self._work.get()) is not None:
            time.sleep(self._random.choice([0, 0, 0, 0, 0, 0.0002, 0.0004, 0.004]))
            try:
                with torch.no_grad():
                    work()
            except Exception as error:
                self.error = self.error or error

    def do(self, work) -> None:
        self._work.put(work)

    def wait_stream(self, other: "Stream") -> None:
        reached = threading.Event()
        other.do(reached.set)
        self.do(reached.wait)

    def finish(self) -> None:
        done = threading.Event()
        self.do(done.set)
        self.do(None)
        assert done.wait(LONGEST), "ranks deadlocked"
        if self.error:
            raise self.error


@contextlib.contextmanager
def on(stream: Stream):
    before, of_thread.stream = of_thread.stream, stream
    yield
    of_thread.stream = before


class Later(TorchFunctionMode):
    """Enqueue copies in the current stream."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not Tensor.copy_ and function is not torch._foreach_copy_:
            return function(*args, **(kwargs or {}))
        pairs = [args] if function is Tensor.copy_ else zip(*args, strict=True)
        for into, source in pairs:
            of_thread.stream.do(lambda into=into, source=source: into.copy_(source))


class Host:
    device = torch.device("cpu")

    def __init__(self, rank: int, rows: list[Tensor], flags: list[list[int]]):
        self.rank, self.rows, self._flags = rank, rows, flags

    def signal(self, flag, value):
        of_thread.stream.do(lambda: self._flags[self.rank].__setitem__(flag, value))

    def wait(self, rank, flag, value):
        def wait():
            while self._flags[rank][flag] < value:
                time.sleep(2e-5)

        of_thread.stream.do(wait)


class OnStreams(host_all_reduce.HostAllReduce):
    def __init__(self, *args, name: str):
        super().__init__(*args)
        self._send_stream, self._receive_stream = Stream(f"{name} out"), Stream(f"{name} into")

    def _means(self):
        means = [torch.empty(received_RL.shape[1]) for received_RL in self._received]
        for mean, received_RL in zip(means, self._received, strict=True):
            of_thread.stream.do(lambda mean=mean, received_RL=received_RL: mean.copy_(self._mean(received_RL)))
        return means

    def join_streams(self):
        self._send_stream.finish()
        self._receive_stream.finish()


class Case:
    """The data shared by all ranks: sizes, dtypes, buckets, and the gradients of each rank."""

    def __init__(self, seed: int, world: int):
        self.world, self.chance = world, random.Random(f"{seed} {world}")
        choice = self.chance.choice
        count = choice([1, 3, 12])
        large = choice([0, count, self.chance.randint(0, count)])
        self.sizes = [choice([1, 3, 65, 1000]) if i < large else choice([0, 1, 64]) for i in range(count)]
        self.sizes[-1] = self.sizes[-1] or 5
        kinds = [torch.bfloat16, torch.float32]
        self.dtypes = [choice(kinds) if i < large else torch.float32 for i in range(count)]
        order = self.chance.sample(range(large), large)
        self.buckets = host_all_reduce.assign_buckets(self.sizes, self.dtypes, large, order)
        self.rows = [
            torch.zeros(host_all_reduce.row_bytes(self.sizes, self.dtypes), dtype=torch.uint8) for _ in range(world)
        ]
        self.flags = [[0] * host_all_reduce.flag_count(self.buckets) for _ in range(world)]
        self.again = [choice([0, 0, 2]) and self.chance.choices(range(large or 1), k=2) for _ in range(PASSES)]
        self.aborts = [self.chance.random() < 0.25 for _ in range(PASSES)]
        self.values = [
            [[torch.randn(n).to(t) for n, t in zip(self.sizes, self.dtypes, strict=True)] for _ in range(world)]
            for _ in range(PASSES)
        ]


def run_rank(case: Case, rank: int, failures: list) -> None:
    try:
        name = f"{case.sizes} {rank}"
        own, main = random.Random(name), Stream(name)
        of_thread.stream = main
        host = Host(rank, case.rows, case.flags)
        all_reduce = OnStreams([torch.Size([size]) for size in case.sizes], case.dtypes, case.buckets, host, name=name)
        with Later(), torch.no_grad():
            for number in range(PASSES):
                run_pass(case, number, all_reduce, rank, own, main)
        main.finish()
        all_reduce.join_streams()
    except Exception as error:
        failures.append(error)


def run_pass(case: Case, number: int, all_reduce: OnStreams, rank: int, own: random.Random, main: Stream) -> None:
    values = case.values[number]
    order = [*range(len(case.sizes)), *(case.again[number] or [])]
    own.shuffle(order)
    if case.aborts[number]:
        order = order[: own.randint(0, len(order))]
    sent = []
    for place, index in enumerate(order):
        is_last = index not in order[place + 1 :]  # of a gradient that is sent twice only the last counts
        gradient = torch.full_like(values[rank][index], 777.0)
        main.do(lambda gradient=gradient, value=values[rank][index] * is_last: gradient.copy_(value))
        all_reduce.send(index, gradient)
        sent.append(gradient)
    all_reduce.abort() if case.aborts[number] else all_reduce.finish()
    for gradient in sent:
        main.do(lambda gradient=gradient: gradient.fill_(99.0))
    if case.aborts[number]:
        return

    def check(averages):
        for average, of_all in zip(averages, zip(*values, strict=True), strict=True):
            expected = host_all_reduce._mean(torch.stack(of_all))
            assert torch.equal(average, expected), f"pass {number}, rank {rank}"

    averages = all_reduce.averages()
    main.do(lambda: check(averages))


@pytest.mark.parametrize("world", WORLDS)
def test_averages__with_late_streams(world, monkeypatch):
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: of_thread.stream)
    monkeypatch.setattr(host_all_reduce, "_MIN_BUCKET_ELEMENTS", 100)
    failures = []
    for seed in range(12):
        torch.manual_seed(seed)
        case = Case(seed, world)
        ranks = [threading.Thread(target=run_rank, args=(case, rank, failures)) for rank in range(world)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()
        assert not failures, (seed, failures)
