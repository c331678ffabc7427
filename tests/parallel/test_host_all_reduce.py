"""An Exchange between processes, and on streams that are threads and do what they are given late.

Without GPUs, nothing else tries its waits. Ranks are threads too then, and after `end` each overwrites what it sent, as
an allocator would that gives the memory to others.
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

WORLDS, PASSES, LONGEST = (1, 2, 3, 4), 8, 60  # seconds that a rank may take
of_thread = threading.local()


def send_in_any_order():
    """Gradients of a rank's own order, some twice, and passes that end early, each rank's at a place of its own."""
    with parallel.create("ddp", Runtime()) as engine:
        sizes, large = [70, 3, 900, 65, 128, 2, 1], 5
        dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, *[torch.float32] * 4]
        with mock.patch.object(host_all_reduce, "_LEAST", 1):
            groups = host_all_reduce.grouped(sizes, dtypes, large, order=[3, 0, 4, 1, 2])
        assert groups == [[3, 4], [0, 2], [1], [5, 6]]
        flags = host_all_reduce.number_of_flags(groups)
        host = Late(host_all_reduce.row_bytes(sizes, dtypes), flags, engine.rank, torch.device("cpu"), engine.gather)
        host.most = 0.01 * engine.rank
        ways = host_all_reduce.Exchange([torch.Size([size]) for size in sizes], dtypes, groups, host)
        alike, own = random.Random(0), random.Random(engine.rank)
        for number in range(40):
            again = alike.sample(range(large), alike.choice([0, 1, 3]))
            ends_early = alike.random() < 0.2
            order = [*range(large), *again]
            own.shuffle(order)
            order = order[: own.randint(0, len(order))] if ends_early else order
            torch.manual_seed(number)
            all_values = [
                [torch.randn(size).to(dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
                for _ in range(engine.world)
            ]  # known to all, so that nothing but the Exchange keeps ranks together
            values = all_values[engine.rank]
            # Only the last of what is sent twice is the gradient.
            is_last = [i not in order[n + 1 :] for n, i in enumerate(order)]
            for index, last in zip(order, is_last, strict=True):
                ways.send(index, values[index] * last)
            if ends_early:
                ways.break_off()
                continue
            for index in range(large, len(values)):
                ways.send(index, values[index])
            ways.end()
            for average, of_all in zip(ways.averages(), zip(*all_values, strict=True), strict=True):
                assert torch.equal(average, sum(value.float() for value in of_all) / engine.world)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_may_send_in_different_orders_and_some_twice(tmp_path, world):
    ranks = Ranks.of(world, tmp_path / "log", send_in_any_order)
    assert ranks.finish(120) == [0] * world, ranks.said()


class Stream:
    """Does one thing after another, each up to 4 ms later than it could."""

    def __init__(self, seed: str):
        self._work, self._chance, self.error = queue.Queue(), random.Random(seed), None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while (work := self._work.get()) is not None:
            time.sleep(self._chance.choice([0, 0, 0, 0, 0, 0.0002, 0.0004, 0.004]))
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
        assert done.wait(LONGEST), "ranks wait for each other"
        if self.error:
            raise self.error


@contextlib.contextmanager
def on(stream: Stream):
    before, of_thread.stream = of_thread.stream, stream
    yield
    of_thread.stream = before


class Later(TorchFunctionMode):
    """Copies take their turn in the current stream."""

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

    def announce(self, flag, value):
        of_thread.stream.do(lambda: self._flags[self.rank].__setitem__(flag, value))

    def expect(self, rank, flag, value):
        def wait():
            while self._flags[rank][flag] < value:
                time.sleep(2e-5)

        of_thread.stream.do(wait)


class OnStreams(host_all_reduce.Exchange):
    def __init__(self, *args, name: str):
        super().__init__(*args)
        self._out, self._into = Stream(f"{name} out"), Stream(f"{name} into")

    def _means(self):
        means = [torch.empty(received_RL.shape[1]) for received_RL in self._received]
        for mean, received_RL in zip(means, self._received, strict=True):
            of_thread.stream.do(lambda mean=mean, received_RL=received_RL: mean.copy_(self._mean(received_RL)))
        return means

    def finish(self):
        self._out.finish()
        self._into.finish()


class Case:
    """What all ranks know: sizes, dtypes, groups, and what each will send."""

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
        self.groups = host_all_reduce.grouped(self.sizes, self.dtypes, large, order)
        self.rows = [
            torch.zeros(host_all_reduce.row_bytes(self.sizes, self.dtypes), dtype=torch.uint8) for _ in range(world)
        ]
        self.flags = [[0] * host_all_reduce.number_of_flags(self.groups) for _ in range(world)]
        self.again = [choice([0, 0, 2]) and self.chance.choices(range(large or 1), k=2) for _ in range(PASSES)]
        self.ends_early = [self.chance.random() < 0.25 for _ in range(PASSES)]
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
        ways = OnStreams([torch.Size([size]) for size in case.sizes], case.dtypes, case.groups, host, name=name)
        with Later(), torch.no_grad():
            for number in range(PASSES):
                run_pass(case, number, ways, rank, own, main)
        main.finish()
        ways.finish()
    except Exception as error:
        failures.append(error)


def run_pass(case: Case, number: int, ways: OnStreams, rank: int, own: random.Random, main: Stream) -> None:
    values = case.values[number]
    order = [*range(len(case.sizes)), *(case.again[number] or [])]
    own.shuffle(order)
    if case.ends_early[number]:
        order = order[: own.randint(0, len(order))]
    sent = []
    for place, index in enumerate(order):
        is_last = index not in order[place + 1 :]  # only the last of what is sent twice is the gradient
        gradient = torch.full_like(values[rank][index], 777.0)
        main.do(lambda gradient=gradient, value=values[rank][index] * is_last: gradient.copy_(value))
        ways.send(index, gradient)
        sent.append(gradient)
    ways.break_off() if case.ends_early[number] else ways.end()
    for gradient in sent:
        main.do(lambda gradient=gradient: gradient.fill_(99.0))
    if case.ends_early[number]:
        return

    def check(averages):
        for average, of_all in zip(averages, zip(*values, strict=True), strict=True):
            expected = host_all_reduce._mean(torch.stack(of_all))
            assert torch.equal(average, expected), f"pass {number}, rank {rank}"

    averages = ways.averages()
    main.do(lambda: check(averages))


@pytest.mark.parametrize("world", WORLDS)
def test_whatever_streams_do_late(world, monkeypatch):
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: of_thread.stream)
    monkeypatch.setattr(host_all_reduce, "_LEAST", 100)
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
