"""Time quantized linear layers on this GPU against bfloat16, at the sizes of ViT-L with 64 images of 197 tokens.

    python scripts/bench_quant.py
    python scripts/bench_quant.py --schemes w8a8 w4a16_block64 --tokens 12608 --sizes 1024,4096 768,3072

Prints two tables, one of CUDA graph replays and one of calls on a cold cache, where the host may be slower than the
GPU, and appends their rows to results/quant.jsonl. The times include rounding the tokens.
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

from vitkernels.benchmarks.quant import SCHEMES, SIZES, linear_times  # noqa: E402
from vitkernels.benchmarks.timing import Timing  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, metavar="SCHEME")
    parser.add_argument("--sizes", nargs="+", default=SIZES, type=_size, metavar="IN,OUT")
    parser.add_argument("--tokens", type=int, default=64 * 197)
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "quant.jsonl")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs an NVIDIA GPU")
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    options.results.parent.mkdir(parents=True, exist_ok=True)
    for how, timing in {"graph replays": Timing.on_device, "calls, cold L2": Timing.of_calls}.items():
        print(f"\n{options.tokens} tokens, {how}: µs (× bf16)")
        print("| in, out | " + " | ".join(("bf16", *options.schemes, "bf16 again")) + " |")
        sums: dict[str, float] = {}
        for size in options.sizes:
            times = linear_times(size, options.tokens, options.schemes, timing)
            medians = {name: t.median for name, t in times.items()}
            _show(f"{size[0]}, {size[1]}", medians)
            sums = {name: sums.get(name, 0) + median for name, median in medians.items()}
            with options.results.open("a") as file:
                for name, t in times.items():
                    row = {"tokens": options.tokens, "in_out": size, "linear": name, "how": how, "ms": asdict(t)}
                    file.write(json.dumps(machine | row) + "\n")
        _show("sum", sums)


def _show(title: str, medians: dict[str, float]) -> None:
    cells = [f"{ms * 1e3:.0f} ({medians['bf16'] / ms:.2f})" for ms in medians.values()]
    print(f"| {title} | " + " | ".join(cells) + " |", flush=True)


def _size(text: str) -> tuple[int, int]:
    in_features, out_features = (int(part) for part in text.split(","))
    return in_features, out_features


if __name__ == "__main__":
    main()
