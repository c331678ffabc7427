"""Time functions on a GPU, with and without the host, and describe the machine."""

import time
from collections.abc import Callable
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
        with torch.cuda.stream(torch.cuda.Stream()):
            function()
            once = _replay_ms(_captured(function, 1))
            calls = max(1, int(milliseconds / 10 / once))
            graph = _captured(function, calls)
            times = [_replay_ms(graph) / calls for _ in range(10)]
        return cls(*torch.tensor(times).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist())


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
