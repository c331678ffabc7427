"""Attention on this GPU, as a model sees it: our backends beside SDPA's kernels and flex_attention.

    python scripts/bench_attention.py                        # the shapes of the README's table, triton_flash
    python scripts/bench_attention.py --backends triton_flash --shapes 64,12,145,64 33,6,901,72

Prints a table per shape and appends its rows, with GPU and versions, to results/attention.jsonl.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vitkernels.benchmarks import attention as bench  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["triton_flash"], metavar="NAME")
    parser.add_argument("--shapes", nargs="+", default=bench.SHAPES, type=_shape, metavar="B,H,N,D")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "attention.jsonl")
    parser.add_argument("--no-flex", action="store_true", help="skip flex_attention, which takes long to compile")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs an NVIDIA GPU")
    machine = _machine()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a") as file:
        for shape in options.shapes:
            for row in rows(shape, tuple(options.backends), not options.no_flex):
                file.write(json.dumps(machine | row) + "\n")


def rows(shape: tuple[int, int, int, int], backends: tuple[str, ...], flex: bool) -> list[dict]:
    """Prints the table of one shape, bfloat16, milliseconds; returns its rows."""
    torch._dynamo.reset()  # flex_attention's limit on recompilations is per process
    contenders = bench.attends(backends)
    if not flex:
        del contenders["flex compiled"]
    found = []
    for name, attend in [*contenders.items(), (f"{backends[0]} again", contenders[backends[0]])]:
        row = {"shape_BHND": shape, "dtype": "bfloat16", "contender": name}
        try:
            forward, both = bench.module_times(attend, shape)
            row |= {"forward_ms": asdict(forward), "both_ms": asdict(both)}
            if not name.startswith("flex"):
                device_forward, device_both = bench.module_times(attend, shape, bench.Timing.on_device)
                row |= {"device_forward_ms": asdict(device_forward), "device_both_ms": asdict(device_both)}
            if name in ("triton_flash", "sdpa cudnn", "sdpa flash"):
                kernel_forward, kernel_backward = bench.kernel_times(name, shape)
                row |= {"kernel_forward_ms": asdict(kernel_forward), "kernel_backward_ms": asdict(kernel_backward)}
        except Exception as error:  # a peer without a kernel for this shape is a result too
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        found.append(row)
    _print(shape, found, backends)
    return found


def _print(shape, found: list[dict], backends: tuple[str, ...]) -> None:
    peers = [row for row in found if row["contender"].removesuffix(" again") not in backends]
    best = {
        key: min((row[key]["median"] for row in peers if key in row), default=float("nan"))
        for key in ("forward_ms", "both_ms", "device_forward_ms", "device_both_ms")
    }
    keys = [*best, "kernel_forward_ms", "kernel_backward_ms"]
    print(f"\n(B, H, N, D) = {shape}: median ms [20 %, 80 %] (× faster than the best peer)")
    print("| contender | " + " | ".join(key.removesuffix("_ms").replace("_", " ") for key in keys) + " |")
    print("|---" * (len(keys) + 1) + "|")
    for row in found:
        cells = [_cell(row.get(key), best.get(key), row not in peers) for key in keys]
        print(f"| {row['contender']} | " + " | ".join(cells) + f" | {row.get('error', '')}", flush=True)


def _cell(timing: dict | None, best: float | None, ours: bool) -> str:
    if timing is None:
        return "–"
    text = f"{timing['median']:.3f} [{timing['low']:.3f}, {timing['high']:.3f}]"
    return f"{text} ({best / timing['median']:.2f} ×)" if ours and best else text


def _machine() -> dict[str, str]:
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
        "date": time.strftime("%Y-%m-%d"),
    }


def _shape(text: str) -> tuple[int, int, int, int]:
    B, H, N, D = (int(part) for part in text.split(","))
    return B, H, N, D


if __name__ == "__main__":
    main()
