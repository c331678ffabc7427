"""Time attention backends against SDPA, flex_attention and FlashAttention-4, from packed qkv to (B, N, H * D).

Shape suffixes: B batch, H heads, N tokens, D head dim, E = H * D, 3 = q, k, v.
"""

import argparse
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitkernels import attention
from vitkernels.benchmarks.timing import Replays, Timing

# (batch, heads, tokens, head dim) of ViT-B, L and H at the usual resolutions, with and without a class token.
SHAPES = (
    (128, 12, 197, 64),
    (128, 12, 256, 64),
    (128, 16, 257, 64),
    (64, 16, 256, 80),
    (64, 16, 257, 88),
    (96, 6, 313, 96),
    (64, 16, 577, 64),
    (48, 12, 601, 56),
    (40, 16, 777, 64),
    (32, 16, 1025, 64),
    (16, 12, 2304, 64),
    (8, 16, 4096, 64),
    (8, 16, 4096, 128),
)
FA4 = "flash-attention-4"


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """Return the sizes of "B,H,N,D"; raise argparse.ArgumentTypeError unless these are four positive integers."""
    try:
        B, H, N, D = (int(size) for size in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not B,H,N,D, such as 64,16,577,64") from None
    if min(B, H, N, D) < 1:
        raise argparse.ArgumentTypeError(f"all sizes of {text!r} must be positive")
    return B, H, N, D


Attend = Callable[[Tensor], Tensor]  # qkv_BN3HD -> out_BNE


def contenders(backends: tuple[str, ...]) -> dict[str, Attend]:
    """Return the contenders by name: SDPA's kernels, flex_attention, FlashAttention-4, and the named backends."""
    return {
        "sdpa flash": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
        "sdpa efficient": functools.partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION),
        "flex compiled": functools.partial(_unpacked, flex()),
        FA4: _packed_flash4,
        **{name: attention.get(name).qkvpacked for name in backends},
    }


def _unpacked(attend, qkv_BN3HD: Tensor) -> Tensor:
    q_BHND, k_BHND, v_BHND = qkv_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
    return attend(q_BHND, k_BHND, v_BHND).transpose(1, 2).flatten(2)


def _sdpa(backend: SDPBackend, qkv_BN3HD: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return _unpacked(F.scaled_dot_product_attention, qkv_BN3HD)


def _packed_flash4(qkv_BN3HD: Tensor) -> Tensor:
    return _flash4(*qkv_BN3HD.unbind(2)).flatten(2)


def _flash4(q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
    """Run FlashAttention-4 (the extra `peers`); raise ImportError if it is not installed."""
    from flash_attn.cute import flash_attn_func

    out = flash_attn_func(q_BNHD, k_BNHD, v_BNHD)
    return out[0] if isinstance(out, tuple) else out


@functools.cache
def flex():
    """Return flex_attention, compiled for each shape."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def module_calls(attend: Attend, shape: tuple[int, int, int, int]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions that run forward, and forward + backward, in bfloat16 at the shape (B, H, N, D).

    The gradient is made contiguous in qkv's layout, as the backward matmul of the projection needs it.
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

    return forward, both


def kernel_times(name: str, shape: tuple[int, int, int, int]) -> tuple[Timing, Timing]:
    """Return the times of the forward and backward kernels alone; peers get contiguous tensors in their own layout."""
    if name == "triton_flash":
        return _triton_flash_kernels(shape)
    B, H, N, D = shape
    backend = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION, FA4: None}[name]
    layout = (B, H, N, D) if backend else (B, N, H, D)
    q, k, v = (torch.randn(layout, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    attend = F.scaled_dot_product_attention if backend else _flash4
    with sdpa_kernel(backend) if backend else nullcontext():
        out = attend(q, k, v)
        do = torch.randn_like(out)

        def forward():
            with torch.no_grad():
                attend(q, k, v)

        def backward():
            torch.autograd.grad(out, (q, k, v), do, retain_graph=True)

        return Timing.of_calls(forward), Timing.of_calls(backward)


def _triton_flash_kernels(shape: tuple[int, int, int, int]) -> tuple[Timing, Timing]:
    from vitkernels.attention.triton_flash.inputs import FlashInputs
    from vitkernels.attention.triton_flash.launch import backward, forward

    B, H, N, D = shape
    qkv, dqkv = (torch.randn(B, N, 3, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, do = (torch.randn(B, N, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    lse = torch.empty(B, H, N, device="cuda")
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    call = FlashInputs.of(q, k, v, None, None, None, False, D**-0.5)
    dq, dk, dv = dqkv.permute(2, 0, 3, 1, 4).unbind(0)
    forward(call, out, lse)
    return Timing.of_calls(lambda: forward(call, out, lse)), Timing.of_calls(
        lambda: backward(call, out, lse, do, (dq, dk, dv))
    )


def measure_shape(shape: tuple[int, int, int, int], backends: tuple[str, ...], flex: bool = True) -> list[dict]:
    """Return the row of each contender at the shape (B, H, N, D) in bfloat16; a failure becomes a row with its error.

    Device times are measured in turns, so the graphs of all contenders are in memory together. The first backend is
    measured twice, to show the noise.
    """
    torch._dynamo.reset()  # flex_attention's limit on recompilations is per process
    found = contenders(backends)
    if not flex:
        del found["flex compiled"]
    rows: list[dict] = []
    replays: dict[str, tuple[Replays, Replays]] = {}
    for name, attend in [*found.items(), (f"{backends[0]} again", found[backends[0]])]:
        row: dict[str, Any] = {"shape_BHND": shape, "dtype": "bfloat16", "contender": name}
        try:
            forward, both = module_calls(attend, shape)
            row |= {"forward_ms": asdict(Timing.of_calls(forward)), "both_ms": asdict(Timing.of_calls(both))}
            if not name.startswith("flex"):
                replays[name] = Replays(forward), Replays(both)
            if name in ("triton_flash", "sdpa cudnn", "sdpa flash", FA4):
                of_forward, of_backward = kernel_times(name, shape)
                row |= {"kernel_forward_ms": asdict(of_forward), "kernel_backward_ms": asdict(of_backward)}
        except Exception as error:  # a peer without a kernel for this shape
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        rows.append(row)
    return _with_device_times(rows, replays)


def _with_device_times(rows: list[dict], replays: dict[str, tuple[Replays, Replays]]) -> list[dict]:
    """Return the rows with the times of the contenders' graphs, of forward and of forward + backward."""
    try:
        times = iter(Timing.in_turns([x for pair in replays.values() for x in pair]))
    except Exception as error:  # the times of calls remain
        return [row | {"error": f"{type(error).__name__}: {str(error)[:200]}"} for row in rows]
    return [
        row | {"device_forward_ms": asdict(next(times)), "device_both_ms": asdict(next(times))}
        if row["contender"] in replays
        else row
        for row in rows
    ]
