"""Time attention on this GPU as a model calls it: our backends against SDPA's kernels, flex_attention and
FlashAttention-4 (the extra `peers`; without it, its row says so).

    python scripts/bench_attention.py                        # triton_flash at the shapes of ViTs
    python scripts/bench_attention.py --backends triton_flash --shapes 64,12,145,64 33,6,901,72
    python scripts/bench_attention.py --extras               # what bias, masks, segments, causality and rope add

Prints a table per shape and appends its rows, with GPU and versions, to results/attention.jsonl.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vitkernels.benchmarks import attention, attention_extras, timing  # noqa: E402
from vitkernels.benchmarks.tables.attention import measurement_table  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["triton_flash"], metavar="NAME")
    parser.add_argument("--shapes", nargs="+", default=attention.SHAPES, type=attention.parse_shape, metavar="B,H,N,D")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "attention.jsonl")
    parser.add_argument(
        "--extras", action="store_true", help="time bias, masks, segments, causality and rope; print only"
    )
    parser.add_argument("--no-flex", action="store_true", help="skip flex_attention, which compiles slowly")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs an NVIDIA GPU")
    machine = timing.machine() | {"cudnn": str(torch.backends.cudnn.version())}
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    if options.extras:
        for shape in options.shapes:
            print(f"\n(B, H, N, D) = {shape}: forward + backward, device ms (ratio to the plain call)")
            print(attention_extras.measure_extras(shape, tuple(options.backends)), flush=True)
        return
    options.results.parent.mkdir(parents=True, exist_ok=True)
    backends = tuple(options.backends)
    with options.results.open("a") as file:
        for shape in options.shapes:
            rows = attention.measure_shape(shape, backends, not options.no_flex)
            print(f"\n(B, H, N, D) = {shape}: median ms [20 %, 80 %] (× faster than the best peer)")
            print(measurement_table(rows, backends), flush=True)
            file.writelines(json.dumps(machine | row) + "\n" for row in rows)
            file.flush()  # a benchmark that is stopped keeps the shapes it has timed


if __name__ == "__main__":
    main()
