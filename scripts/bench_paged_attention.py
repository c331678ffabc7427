"""Paged attention on this GPU beside gathering the pages for SDPA, and flex_attention; on TPU v5e, estimated.

    python scripts/bench_paged_attention.py                 # where an NVIDIA GPU is: measured
    python scripts/bench_paged_attention.py --tpu           # anywhere: pallas_tpu beside JAX's own kernel, ESTIMATED

Prints a table and, measured on a GPU, appends its rows to results/paged_attention.jsonl. Each estimate takes 10 to 30
seconds to compile and needs the tpu extra (libtpu, Linux x86-64).
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vitkernels.benchmarks import paged_attention as bench  # noqa: E402
from vitkernels.benchmarks.attention import Timing  # noqa: E402
from vitkernels.errors import UsageError  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tpu", action="store_true", help="estimate for TPU v5e; no TPU is needed, none is used")
    names = [case.what for case in bench.CASES]
    parser.add_argument("--cases", nargs="+", default=names, choices=names, metavar="CASE", help=f"of {names}")
    parser.add_argument("--no-flex", action="store_true", help="skip flex_attention, which takes long to compile")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "paged_attention.jsonl")
    options = parser.parse_args()
    if options.tpu:
        estimate(options)
        return
    if not torch.cuda.is_available():
        parser.error("measuring needs an NVIDIA GPU; --tpu estimates for a TPU v5e on any machine")
    measure(options)


def measure(options) -> None:
    """The table of the GPU at hand."""
    machine = _machine()
    bandwidth = copy_bandwidth()
    print(", ".join(f"{name} {value}" for name, value in machine.items()), f"copy {bandwidth / 1e12:.2f} TB/s")
    print("MEASURED; bfloat16; median ms [20 %, 80 %], host included on a cold L2, and of CUDA-graph replays")
    print("| case | contender | ms | graph ms | of copy bandwidth | error |\n|---|---|---|---|---|---|")
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a") as file:
        for case in _chosen(options):
            for row in rows(case, bandwidth, not options.no_flex):
                file.write(json.dumps(machine | {"copy_bytes_per_second": bandwidth} | row) + "\n")


def rows(case: bench.Case, bandwidth: float, flex: bool) -> list[dict]:
    """Times every contender of a case, and holds its result against the reference's."""
    torch.manual_seed(0)
    tensors = bench.Tensors.of(case)
    exact = bench.exact(tensors)
    found = []
    for name, call in bench.contenders(tensors, flex).items():
        row = {"case": asdict(case), "contender": name}
        try:
            error = float((call().double() - exact).norm() / exact.norm())
            row |= {"error": error, "ms": asdict(Timing.of(call, 50)), "graph_ms": asdict(Timing.on_device(call, 20))}
        except Exception as problem:  # a peer that cannot take the case is a result too
            row["problem"] = f"{type(problem).__name__}: {str(problem)[:200]}"
        found.append(row)
        _print(case, row, tensors.bytes() / bandwidth * 1e3)
    return found


def _print(case: bench.Case, row: dict, floor_ms: float) -> None:
    cells = [case.what, row["contender"]]
    if "problem" in row:
        cells.append(row["problem"])
    else:
        cells += [f"{t['median']:.4f} [{t['low']:.4f}, {t['high']:.4f}]" for t in (row["ms"], row["graph_ms"])]
        cells += [f"{floor_ms / row['graph_ms']['median']:.0%}", f"{row['error']:.1e}"]
    print("| " + " | ".join(cells) + " |", flush=True)


def estimate(options) -> None:
    """The table of a TPU v5e, from what libtpu scheduled; blocks of 512 tokens."""
    from vitkernels.tpu_estimate import paged_attention as tpu

    print("ESTIMATED for TPU v5e from libtpu's schedules; no TPU was used; bfloat16, blocks of 512 tokens")
    print("| case | contender | ESTIMATE ms | compute ms | HBM ms | operations not timed |\n|---|---|---|---|---|---|")
    for case in _chosen(options):
        lens = np.random.default_rng(0).integers(1, case.tokens + 1, case.sequences)
        lens = lens if case.ragged else np.full(case.sequences, case.tokens)
        for contender in tpu.CONTENDERS:
            try:
                program = tpu.estimate(contender, case, 512 // case.page_size, lens)
            except UsageError as problem:
                cells = [str(problem).splitlines()[0][:150], "", "", ""]
            else:
                cells = [f"{ms:.3f}" for ms in (program.estimate_ms, program.compute_ms, program.memory_ms)]
                cells += [str(len(program.untimed))]
            print("| " + " | ".join([case.what, contender, *cells]) + " |", flush=True)


def _chosen(options) -> list[bench.Case]:
    return [case for case in bench.CASES if case.what in options.cases]


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy on the device."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / Timing.of(lambda: target.copy_(source)).median * 1e3


def _machine() -> dict[str, str]:
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
