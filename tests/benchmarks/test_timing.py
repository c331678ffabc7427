"""Timing in turns."""

from vitkernels.benchmarks import attention
from vitkernels.benchmarks.timing import Timing


class Counted:
    """Replays whose times are 1, 2, 3, ... ms, and that record the order in which they run."""

    def __init__(self, name, order, broken=False):
        self.name, self.order, self.broken, self.runs = name, order, broken, 0

    def milliseconds(self) -> float:
        if self.broken:
            raise RuntimeError("out of memory")
        self.runs += 1
        self.order.append(self.name)
        return float(self.runs)


def test_in_turns__runs_each_function_once_per_round_in_varying_order():
    order = []
    times = Timing.in_turns([Counted(name, order) for name in "abc"], rounds=11)
    assert times == [Timing(3.0, 6.0, 9.0)] * 3
    rounds = [tuple(order[i : i + 3]) for i in range(0, 33, 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds) and len(set(rounds)) > 2
    assert Timing.in_turns([]) == []


def test_device_times__belong_to_their_contender():
    rows = [{"contender": "one"}, {"contender": "without a kernel", "error": "no"}, {"contender": "two"}]
    pair = lambda broken=False: (Counted("forward", []), Counted("both", [], broken))  # noqa: E731
    timed = attention._with_device_times(rows, {"one": pair(), "two": pair()})
    assert [sorted(row) for row in timed] == [
        ["contender", "device_both_ms", "device_forward_ms"],
        ["contender", "error"],
        ["contender", "device_both_ms", "device_forward_ms"],
    ]
    failed = attention._with_device_times(rows[:1], {"one": pair(broken=True)})
    assert failed == [{"contender": "one", "error": "RuntimeError: out of memory"}]
