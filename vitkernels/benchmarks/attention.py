"""What a user would otherwise pick for attention, timed as a model sees it: packed qkv in, (B, N, H * D) out.

Shape suffixes: B batch, H heads, N tokens, D head dim, E = H * D, 3 = q, k, v.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitkernels import attention

# (batch, heads, tokens, head dim) of ViT-B, L and H at the usual resolutions, with and without a class token.
SHAPES = (
    (128, 12, 197, 64),
    (128, 12, 256, 64),
    (128, 16, 257, 64),
    (64, 16, 256, 80),
    (64, 16, 257, 88),
    (64, 16, 577, 64),
    (32, 16, 1025, 64),
    (8, 16, 4096, 64),
)

Attend = Callable[[Tensor], Tensor]  # qkv_BN3HD -> out_BNE


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the 20th, 50th and 80th percentile."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, function: Callable[[], object], milliseconds: float = 150) -> "Timing":
        """Of calls on a cold L2 cache, host time included where the host is the slower side."""
        from triton.testing import do_bench

        low, median, high = do_bench(function, warmup=30, rep=milliseconds, quantiles=[0.2, 0.5, 0.8])
        return cls(low, median, high)

    @classmethod
    def on_device(cls, function: Callable[[], object], milliseconds: float = 100) -> "Timing":
        """Of replays of a CUDA graph: what the GPU needs, without the host."""
        with torch.cuda.stream(torch.cuda.Stream()):
            function()
            once = _replay_ms(_captured(function, 1))
            calls = max(1, int(milliseconds / 10 / once))
            graph = _captured(function, calls)
            times = [_replay_ms(graph) / calls for _ in range(10)]
        return cls(*torch.tensor(times).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist())


def _captured(function: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of some calls. What other threads do meanwhile (JAX has some) must not invalidate it: thread_local."""
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


def attends(backends: tuple[str, ...]) -> dict[str, Attend]:
    """Each contender by name: SDPA's kernels, flex_attention, and the named backends."""
    return {
        "sdpa flash": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
        "sdpa efficient": functools.partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION),
        "flex compiled": functools.partial(_unpacked, _flex()),
        **{name: attention.get(name).qkvpacked for name in backends},
    }


def _unpacked(attend, qkv_BN3HD: Tensor) -> Tensor:
    q_BHND, k_BHND, v_BHND = qkv_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
    return attend(q_BHND, k_BHND, v_BHND).transpose(1, 2).flatten(2)


def _sdpa(backend: SDPBackend, qkv_BN3HD: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return _unpacked(F.scaled_dot_product_attention, qkv_BN3HD)


@functools.cache
def _flex():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def module_times(attend: Attend, shape: tuple[int, int, int, int], timing=Timing.of) -> tuple[Timing, Timing]:
    """Forward, and forward + backward, in bfloat16.

    The gradient is made contiguous in qkv's layout, as the projection's backward product will need it.
    """
    B, H, N, D = shape
    qkv_BN3HD = torch.randn(B, N, 3, H, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    do_BNE = torch.randn(B, N, H * D, device="cuda", dtype=torch.bfloat16)

    def forward():
        with torch.no_grad():
            attend(qkv_BN3HD)

    def both():
        (dqkv_BN3HD,) = torch.autograd.grad(attend(qkv_BN3HD), qkv_BN3HD, do_BNE)
        dqkv_BN3HD.contiguous()

    return timing(forward), timing(both)


def kernel_times(name: str, shape: tuple[int, int, int, int]) -> tuple[Timing, Timing]:
    """Forward and backward kernels alone: SDPA's on contiguous (B, H, N, D) and so without any copies."""
    B, H, N, D = shape
    if name == "triton_flash":
        return _triton_flash_kernels(shape)
    backend = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}[name]
    q, k, v = (torch.randn(B, H, N, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v)
        do = torch.randn_like(out)

        def forward():
            with torch.no_grad():
                F.scaled_dot_product_attention(q, k, v)

        def backward():
            torch.autograd.grad(out, (q, k, v), do, retain_graph=True)

        return Timing.of(forward), Timing.of(backward)


def _triton_flash_kernels(shape: tuple[int, int, int, int]) -> tuple[Timing, Timing]:
    from vitkernels.attention.triton_flash.launch import FlashInputs, backward, forward

    B, H, N, D = shape
    qkv, dqkv = (torch.randn(B, N, 3, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, do = (torch.randn(B, N, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    lse = torch.empty(B, H, N, device="cuda")
    call = FlashInputs.of(*qkv.permute(2, 0, 3, 1, 4).unbind(0), None, None, None, False, D**-0.5)
    grads = dqkv.permute(2, 0, 3, 1, 4).unbind(0)
    forward(call, out, lse)
    return Timing.of(lambda: forward(call, out, lse)), Timing.of(lambda: backward(call, out, lse, do, *grads))
