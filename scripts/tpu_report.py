"""Attention on a TPU v5e with no TPU: estimates from the schedules that libtpu's compiler writes.

    python scripts/tpu_report.py                                          # ViT-B/16 at 256 tokens, batch 128
    python scripts/tpu_report.py --shapes 64,16,256,72 16,16,577,64 --operations
    python scripts/tpu_report.py --contenders pallas_flash --passes forward --json report.json

Every time printed or written is an estimate, bfloat16; the method's validation stands below the tables. Needs the tpu
extra (libtpu, Linux x86-64). Each figure takes 10 to 20 seconds to compile.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vitkernels.bench import tpu_attention, tpu_report, tpu_static  # noqa: E402


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[(128, 12, 256, 64)], type=_shape, metavar="B,H,N,D")
    names = tpu_attention.CONTENDERS
    parser.add_argument("--contenders", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names))
    passes = tpu_attention.PASSES
    parser.add_argument("--passes", nargs="+", default=passes, choices=passes, metavar="PASS", help=", ".join(passes))
    parser.add_argument("--operations", action="store_true", help="also list each program's operations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything, operations too, to this file")
    options = parser.parse_args(arguments)
    if (reason := tpu_static.unavailable()) is not None:
        parser.error(reason)
    rows = []
    for shape in options.shapes:
        found = [tpu_report.row(name, which, shape) for which in options.passes for name in options.contenders]
        print(f"\nESTIMATES for TPU v5e, (B, H, N, D) = {shape}, bfloat16\n\n{tpu_report.table(found)}", flush=True)
        if options.operations:
            for row in found:
                print(f"\n{row['contender']}, {row['pass']}\n\n{tpu_report.operations_table(row)}", flush=True)
        rows += found
    print(f"\n{tpu_report.validation()}")
    if options.json is not None:
        options.json.write_text(json.dumps(tpu_report.document(rows), indent=1) + "\n")


def _shape(text: str) -> tuple[int, int, int, int]:
    B, H, N, D = (int(part) for part in text.split(","))
    return B, H, N, D


if __name__ == "__main__":
    main()
