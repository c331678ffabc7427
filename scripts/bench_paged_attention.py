"""Time paged attention on this GPU against gathering the pages for SDPA and flex_attention, or estimate it for TPU v5e.

    python scripts/bench_paged_attention.py                 # measure; needs an NVIDIA GPU
    python scripts/bench_paged_attention.py --tpu           # ESTIMATE pallas_tpu and JAX's own kernel, on any machine

Prints a table, and appends measured rows to results/paged_attention.jsonl. Each estimate takes 10 to 30 seconds to
compile and needs the tpu extra (libtpu, Linux x86-64).
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vitkernels.benchmarks import paged_attention, timing  # noqa: E402
from vitkernels.errors import UsageError  # noqa: E402
from vitkernels.tpu_estimate.paged_attention_case import CASES, PagedAttentionCase  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tpu", action="store_true", help="estimate for TPU v5e, without a TPU")
    names = [case.what for case in CASES]
    parser.add_argument("--cases", nargs="+", default=names, choices=names, metavar="CASE", help=f"of {names}")
    parser.add_argument("--no-flex", action="store_true", help="skip flex_attention, which compiles slowly")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "paged_attention.jsonl")
    options = parser.parse_args()
    if options.tpu:
        estimate_for_tpu(options)
        return
    if not torch.cuda.is_available():
        parser.error("measuring needs an NVIDIA GPU; --tpu estimates for TPU v5e on any machine")
    measure(options)


def measure(options) -> None:
    """Measure the chosen cases on this GPU and print a table."""
    machine, bandwidth = timing.machine(), timing.copy_bandwidth()
    print(", ".join(f"{name} {value}" for name, value in machine.items()), f"copy {bandwidth / 1e12:.2f} TB/s")
    print("MEASURED in bfloat16, median ms [20 %, 80 %]: calls on a cold L2 cache, host included, and graph replays")
    print("| case | contender | ms | graph ms | of copy bandwidth | error |\n|---|---|---|---|---|---|")
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a") as file:
        for case in _chosen(options):
            for row in paged_attention.measure(case, flex=not options.no_flex):
                _print(case, row, bandwidth)
                file.write(json.dumps(machine | {"copy_bytes_per_second": bandwidth} | row) + "\n")
                file.flush()  # a benchmark that is stopped keeps the rows it has timed


def _print(case: PagedAttentionCase, row: dict, bandwidth: float) -> None:
    floor_ms = row.pop("min_bytes") / bandwidth * 1e3
    cells = [case.what, row["contender"]]
    if "problem" in row:
        cells.append(row["problem"])
    else:
        cells += [f"{t['median']:.4f} [{t['low']:.4f}, {t['high']:.4f}]" for t in (row["ms"], row["graph_ms"])]
        cells += [f"{floor_ms / row['graph_ms']['median']:.0%}", f"{row['error']:.1e}"]
    print("| " + " | ".join(cells) + " |", flush=True)


def estimate_for_tpu(options) -> None:
    """Estimate the chosen cases for TPU v5e, in blocks of 512 tokens, and print a table."""
    from vitkernels.tpu_estimate.paged_attention import CONTENDERS, estimate

    print("ESTIMATED for TPU v5e from libtpu's schedules; no TPU was used; bfloat16, blocks of 512 tokens")
    print("| case | contender | ESTIMATE ms | compute ms | HBM ms | untimed operations |\n|---|---|---|---|---|---|")
    for case in _chosen(options):
        lens = np.random.default_rng(0).integers(1, case.tokens + 1, case.sequences)
        lens = lens if case.ragged else np.full(case.sequences, case.tokens)
        for contender in CONTENDERS:
            try:
                program = estimate(contender, case, 512 // case.page_size, lens)
            except UsageError as error:
                cells = [str(error).splitlines()[0][:150], "", "", ""]
            else:
                cells = [f"{ms:.3f}" for ms in (program.estimate_ms, program.compute_ms, program.memory_ms)]
                cells += [str(len(program.untimed))]
            print("| " + " | ".join([case.what, contender, *cells]) + " |", flush=True)


def _chosen(options) -> list[PagedAttentionCase]:
    return [case for case in CASES if case.what in options.cases]


if __name__ == "__main__":
    main()
