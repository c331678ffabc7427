"""Time functions on a GPU, with and without the host, and describe the machine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Percentiles of a function's time in milliseconds: the 20th, the median and the 80th."""

    low: float
    median: float
    high: float

    @classmethod
    def of_calls(cls, function: Callable[[], object], milliseconds: float = 150) -> "Timing":
        """Time calls on a cold L2 cache; host time is included if the host is slower than the GPU."""
        from triton.testing import do_bench

        low, median, high = do_bench(function, warmup=30, rep=milliseconds, quantiles=[0.2, 0.5, 0.8])
        return cls(low, median, high)

    @classmethod
    def on_device(cls, function: Callable[[], object], milliseconds: float = 100) -> "Timing":
        """Time replays of a CUDA graph, which exclude host time."""
        (timing,) = cls.in_turns([Replays(function, milliseconds / 10)], rounds=10)
        return timing

    @classmethod
    def in_turns(cls, functions: Sequence["Replays"], rounds: int = 20) -> list["Timing"]:
        """Time functions that are compared, one replay of each per round, in a random order.

        A GPU at its power limit lowers its clock while it is busy, which costs up to 13 % of time. After a function
        that takes little power, the next one runs at a higher clock. Random turns spread these effects over all.
        """
        generator = torch.Generator().manual_seed(0)
        times = torch.empty(len(functions), rounds)
        for turn in range(rounds):
            for i in torch.randperm(len(functions), generator=generator).tolist():
                times[i, turn] = functions[i].milliseconds()
        quantiles = torch.tensor([0.2, 0.5, 0.8])
        return [cls(*of_one.quantile(quantiles).tolist()) for of_one in times]


class Replays:
    """A CUDA graph of a function, with as many calls as take some milliseconds."""

    def __init__(self, function: Callable[[], object], milliseconds: float = 10):
        self._function = function  # keeps the tensors alive that the graph reads
        with torch.cuda.stream(torch.cuda.Stream()):
            function()
            once = _replay_ms(_captured(function, 1))
            self._calls = max(1, int(milliseconds / once))
            self._graph = _captured(function, self._calls)

    def milliseconds(self) -> float:
        """Replay the graph, and return the time of one call."""
        return _replay_ms(self._graph) / self._calls


def _captured(function: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """Return a graph of several calls.

    Capture is thread_local, so that CUDA calls of other threads, such as JAX's, do not invalidate it.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            function()
    _replay_ms(graph)
    return graph


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def machine() -> dict[str, str]:
    """Return the GPU, the package versions and the date, for the rows of a results file."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def copy_bandwidth() -> float:
    """Return the bytes per second, read plus written, of a large copy on the GPU."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / Timing.of_calls(lambda: target.copy_(source)).median * 1e3
