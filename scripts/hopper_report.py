"""Compile the Hopper kernels of attention calls with ptxas, without a GPU, and report spills and serialized products.

    python scripts/hopper_report.py 64,16,577,64 8,16,4096,128          # B,H,N,D in bfloat16, forward and backward
    python scripts/hopper_report.py 64,12,197,64 --bias float32         # with a bias (1, H, N, N) and its gradient

Spills are bytes per thread. Serialized products, and spills in a loop, are slow. Needs Linux, Python 3.12 or newer, a C
compiler, PyTorch for CUDA 13, and the extra `hopper`.
"""

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vitkernels.attention.pallas_flash.hopper.schedule import unsupported_head_dim  # noqa: E402
from vitkernels.benchmarks.attention import parse_shape  # noqa: E402
from vitkernels.benchmarks.tables.markdown import table  # noqa: E402
from vitkernels.bridge import ptxas  # noqa: E402


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", type=_shape_on_hopper, metavar="B,H,N,D")
    parser.add_argument("--causal", action="store_true", help="a query attends to no later key")
    parser.add_argument(
        "--bias", choices=["float32", "bfloat16"], help="the dtype of a bias; by default, there is none"
    )
    options = parser.parse_args(arguments)
    if (reason := ptxas.unavailable()) is not None:
        parser.error(reason)
    rows = [row for shape in options.shapes for row in _rows(shape, options.causal, options.bias)]
    print(table(["B,H,N,D", "kernel", "spill stores", "spill loads", "products"], rows))


def _shape_on_hopper(text: str) -> tuple[int, int, int, int]:
    shape = parse_shape(text)
    if (reason := unsupported_head_dim(shape[-1])) is not None:
        raise argparse.ArgumentTypeError(f"{text!r}: pallas_flash cannot run this: {reason}")
    return shape


def _rows(shape: tuple[int, int, int, int], is_causal: bool, bias: str | None) -> list[list[str]]:
    from vitkernels.attention.pallas_flash.hopper.kernels import AttentionKernels

    B, H, N, D = shape
    call = AttentionKernels(
        batch=B, heads=H, queries=N, keys=N, head_dim=D, dtype=torch.bfloat16, is_causal=is_causal, scale=D**-0.5,
        packed=True, device=torch.device("cuda", 0), bias_shape=(1, H) if bias else None,
        bias_dtype=getattr(torch, bias or "float32"),
    )  # fmt: skip
    kernels = call.launched(gradient=True, bias_gradient=bias is not None)
    names = {id(value): name for name, value in vars(call).items()}
    return [
        [
            ",".join(map(str, shape)), names[id(kernel)], str(report.spill_stores), str(report.spill_loads),
            "serialized" if report.serialized else "concurrent",
        ]
        for kernel, report in zip(kernels, ptxas.reports([kernel.module for kernel in kernels]), strict=True)
    ]  # fmt: skip


if __name__ == "__main__":
    main()
