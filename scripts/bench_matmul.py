"""Time matmuls in bfloat16, int8 and fp8 against the vendor library's, and show the share of the chip's peak.

    python scripts/bench_matmul.py                              # 1024 to 8192, on this machine
    python scripts/bench_matmul.py --sizes 8192 --dtypes int8
    python scripts/bench_matmul.py --on estimate                # TPU v5e, from its compiler's schedule

Measures on an NVIDIA GPU (fp8 only there) or a TPU; elsewhere prints an ESTIMATE for TPU v5e from the schedule of
libtpu's compiler, about 20 seconds per figure. Every row is labeled accordingly. --results appends the rows to a file
as JSON lines.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vitkernels.benchmarks import matmul  # noqa: E402
from vitkernels.errors import UsageError  # noqa: E402


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=matmul.SIZES, type=int, metavar="N")
    parser.add_argument("--dtypes", nargs="+", default=tuple(matmul.DTYPES), choices=tuple(matmul.DTYPES))
    parser.add_argument("--on", default="auto", choices=("auto", "gpu", "tpu", "estimate"))
    parser.add_argument("--results", type=Path, metavar="FILE", help="append the rows to this file as JSON lines")
    options = parser.parse_args(arguments)
    where = matmul.place() if options.on == "auto" else options.on
    print("| size | dtype | contender | ms | Top/s | of peak | × library | how |\n" + "|---" * 8 + "|")
    try:
        for dtype in options.dtypes:
            for size in options.sizes:
                _show(size, dtype, list(matmul.rows(where, dtype, size)), options.results)
    except UsageError as error:
        parser.error(str(error))
    if where == "estimate":
        print("\nEvery time is an ESTIMATE from libtpu's schedule; no TPU was used. Differences under 10 % are noise.")
    elif where == "gpu":
        print("\nMedians of CUDA graph replays: GPU time, with operands in the L2 cache if they fit.")


def _show(size: int, dtype: str, rows: list[matmul.MatmulRow], results: Path | None) -> None:
    if not rows:
        print(f"| {size} | {dtype} | not supported by this chip | | | | | |")
    for row in rows:
        share = "unknown" if row.utilization is None else f"{row.utilization:.0%}"
        cells = (row.size, row.dtype, row.contender, f"{row.ms:.4f}", f"{row.tera:.0f}", share)
        ratio = f"{rows[0].ms / row.ms:.2f}"
        print("| " + " | ".join(map(str, (*cells, ratio, f"{row.how}, {row.device}"))) + " |", flush=True)
    if results:
        with results.open("a") as file:
            file.writelines(json.dumps(row.json()) + "\n" for row in rows)


if __name__ == "__main__":
    main()
