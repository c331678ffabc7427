"""Estimate the attention backends on a TPU from libtpu's schedules, without a TPU, and search block sizes.

    python scripts/tpu_report.py --shapes 128,12,256,64 64,16,256,72                  # next to XLA's and JAX's
    python scripts/tpu_report.py --shapes vit --results results/tpu_attention.jsonl   # attention at the shapes of ViTs
    python scripts/tpu_report.py --tune chip=v5e --shapes 16,16,577,64                # block sizes of pallas_flash
    python scripts/tpu_report.py --validate                                           # estimates of published timings

The first two commands take any setting of train.py (data.batch_size=64, optim=sgd, ops=..., +model.kwargs.depth=2).
They record the step that train.py would run, compile it with libtpu for the chip, and write report.json and report.png
(--output). --tune writes significantly better block sizes into the table that the kernels read (--table). --validate
repeats the published cases that this checkout can build, in about a minute.

Every time is an ESTIMATE; the tables are followed by the recorded validation of the method. Needs the tpu extra
(libtpu, Linux x86-64). ViT-B/16 at batch 128 takes 4 to 7 minutes of processor time per backend and 4 GB of memory;
attention takes 5 to 20 s per figure.
"""

import argparse
import itertools
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vitkernels.errors import UsageError  # noqa: E402
from vitkernels.tpu_estimate import attention_contenders, chips, compiler, report  # noqa: E402

# (B, H, N, D): ViT-B at 256 and 224 pixels, ViT-L at 384 and 512, and the head sizes of SoViT-400m, ViT-H and ViT-g.
VIT_SHAPES = (
    (128, 12, 256, 64),
    (128, 12, 197, 64),
    (64, 16, 577, 64),
    (32, 16, 1025, 64),
    (64, 16, 256, 72),
    (64, 16, 256, 80),
    (64, 16, 256, 88),
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="chip=NAME", help="chip=v5e, chip=v5p or chip=v6e")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=[VIT_SHAPES[:1]],
        type=_shapes,
        metavar="B,H,N,D",
        help="or vit for the shapes of ViTs",
    )
    names = attention_contenders.contenders()
    parser.add_argument(
        "--contenders", nargs="+", default=attention_contenders.CONTENDERS, choices=names, metavar="NAME",
        help=f"of {', '.join(names)}; default: the first {len(attention_contenders.CONTENDERS)}",
    )  # fmt: skip
    passes = attention_contenders.PASSES
    parser.add_argument("--passes", nargs="+", default=passes, choices=passes, metavar="PASS", help=", ".join(passes))
    parser.add_argument("--operations", action="store_true", help="also list the operations of each attention program")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the attention report to this file")
    parser.add_argument("--results", type=Path, metavar="FILE", help="append the attention rows to this file")
    parser.add_argument("--tune", action="store_true", help="search block sizes of pallas_flash for --shapes")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="table of block sizes to write; default: the package's"
    )
    options = parser.parse_intermixed_args(arguments)  # settings may come before, between and after options
    wanted = [text.removeprefix("chip=") for text in options.settings if text.startswith("chip=")]
    overrides = [text for text in options.settings if not text.startswith("chip=")]
    try:
        chip = chips.chip(wanted[-1] if wanted else "v5e")
        if (reason := compiler.unavailable()) is not None:
            raise UsageError(reason, code="tpu_estimate.no_libtpu")
        if overrides:
            message = f"unexpected {overrides[0]!r}; for a training step: vitkernels tpu-estimate step {overrides[0]}"
            raise UsageError(message, code="tpu_estimate.words", word=overrides[0])
        if options.tune:
            tune(options, chip)
        else:
            report_attention(options, chip)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def report_attention(options, chip: chips.Chip) -> None:
    """Estimate attention alone, per shape, pass and contender."""
    rows = []
    for shape in itertools.chain.from_iterable(options.shapes):
        found = []
        for pass_name, name in itertools.product(options.passes, options.contenders):
            found.append(report.row(name, pass_name, shape, chip))
            if options.results is not None:
                report.append(found[-1], options.results)
        print(f"\nESTIMATES for TPU {chip.name}, (B, H, N, D) = {shape}, bfloat16\n\n{report.table(found)}")
        print(f"\n{report.speedup_over_best(found)}", flush=True)
        if options.operations:
            for row in found:
                print(f"\n{row['contender']}, {row['pass']}\n\n{report.operations_table(row)}", flush=True)
        rows += found
    print(f"\n{report.validation(chip)}")
    if options.json is not None:
        options.json.write_text(json.dumps(report.document(rows, chip), indent=1) + "\n")


def tune(options, chip: chips.Chip) -> None:
    """Search block sizes of pallas_flash for each shape, and write those that are significantly better."""
    from vitkernels.attention.pallas_flash.tpu import block_plans
    from vitkernels.tpu_estimate.tune import libtpu_estimator, plain_problem, search

    table = options.table or block_plans.TABLE
    if not os.access(table if table.exists() else table.parent, os.W_OK):
        raise UsageError(f"{table} is not writable; choose another with --table FILE", code="tpu_estimate.table")
    for shape in itertools.chain.from_iterable(options.shapes):
        print(f"\n(B, H, N, D) = {shape}, bfloat16, TPU {chip.name}", flush=True)
        problem = plain_problem(shape)
        found = search(problem, libtpu_estimator(problem, chip), lambda text: print(text, flush=True))
        plans = {"rule": (found.rule, found.rule_ms), "chosen": (found.plan, found.ms)}
        plans |= {f"best {form}": best for form, best in found.best.items()}
        for what, (plan, ms) in plans.items():
            times = ", ".join(f"{pass_name} {ms[pass_name]:.3f}" for pass_name in ms)
            print(f"{what}: ESTIMATED ms {times}; {plan}", flush=True)
        entry = found.entry(problem, chip.name)
        if found.plan == found.rule:
            block_plans.remove(entry, table)
            print("no plan is 10 % better than the rule: no entry in the table")
        else:
            block_plans.write(entry, table)
            print(f"written: {table}")
    print(f"\n{report.validation(chip)}")


def _shapes(text: str) -> tuple[tuple[int, int, int, int], ...]:
    if text == "vit":
        return VIT_SHAPES
    try:
        B, H, N, D = (int(part) for part in text.split(","))
    except ValueError:
        hint = "; settings go before --shapes" if "=" in text else ""
        raise argparse.ArgumentTypeError(f"{text!r} is neither B,H,N,D nor vit{hint}") from None
    return ((B, H, N, D),)


if __name__ == "__main__":
    main()
