"""What a TPU would make of a training step, or of attention alone, with no TPU: estimates from libtpu's own schedules.

    python scripts/tpu_report.py attn=pallas_flash model=vit_b16_256 chip=v5e        # the whole training step
    python scripts/tpu_report.py model=vit_b16_256 --compare native,sdpa,pallas_flash
    python scripts/tpu_report.py --shapes 128,12,256,64 64,16,256,72                  # attention alone, by kernels
    python scripts/tpu_report.py --shapes vit --results results/tpu_attention.jsonl   # ... at the shapes of ViTs
    python scripts/tpu_report.py --tune chip=v5e --shapes 16,16,577,64                # pallas_flash's blocks
    python scripts/tpu_report.py --validate                                           # published timings, estimated

The first two take any setting of train.py (data.batch_size=64, optim=sgd, ops=..., +model.kwargs.depth=2), record the
step that train.py would run, compile it with libtpu for the chip, and write report.json and report.png (--output).
--tune writes what it finds into the table that the kernels read (--table), where it is clearly better than their rule.
Every time printed or written is an ESTIMATE; the method's validation stands below the tables, as recorded; --validate
estimates those of its cases anew that it can, in about a minute. Needs the tpu extra
(libtpu, Linux x86-64). ViT-B/16 at batch 128 takes 4 to 7 minutes of processor time a backend and 4 GB of memory,
attention 5 to 20 s a figure.
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
from vitkernels.tpu_estimate import attention as tpu_attention  # noqa: E402
from vitkernels.tpu_estimate import chips, compiler, report  # noqa: E402
from vitkernels.tpu_estimate import validate as tpu_validation  # noqa: E402

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
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="train.py's settings, and chip=v5e|v5p|v6e")
    parser.add_argument("--compare", type=lambda text: text.split(","), metavar="A,B", help="attention backends")
    parser.add_argument("--output", type=Path, default=Path("runs/tpu_report"), help="folder of the step's report")
    parser.add_argument(
        "--shapes", nargs="+", default=[VIT_SHAPES[:1]], type=_shapes, metavar="B,H,N,D", help="or vit, for ViTs' own"
    )
    names = tpu_attention.contenders()
    parser.add_argument(
        "--contenders", nargs="+", default=tpu_attention.CONTENDERS, choices=names, metavar="NAME",
        help=f"of {', '.join(names)}; by default the first {len(tpu_attention.CONTENDERS)}",
    )  # fmt: skip
    passes = tpu_attention.PASSES
    parser.add_argument("--passes", nargs="+", default=passes, choices=passes, metavar="PASS", help=", ".join(passes))
    parser.add_argument("--operations", action="store_true", help="also list each attention program's operations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the attention report to this file")
    parser.add_argument("--results", type=Path, metavar="FILE", help="append attention's rows to it")
    parser.add_argument("--tune", action="store_true", help="search pallas_flash's blocks for --shapes")
    parser.add_argument("--validate", action="store_true", help="estimate what was published for v5e, and compare")
    parser.add_argument("--table", type=Path, metavar="FILE", help="another table to write than the package's own")
    options = parser.parse_intermixed_args(arguments)  # settings may stand before, between and after the options
    wanted = [text.removeprefix("chip=") for text in options.settings if text.startswith("chip=")]
    overrides = [text for text in options.settings if not text.startswith("chip=")]
    try:
        chip = chips.chip(wanted[-1] if wanted else "v5e")
        if (reason := compiler.unavailable()) is not None:
            raise UsageError(reason)
        if options.validate:
            validate()
        elif options.tune:
            tune(options, chip)
        elif overrides or options.compare:
            report_step(options, overrides, chip)
        else:
            report_attention(options, chip)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def report_step(options, overrides: list[str], chip: chips.Chip) -> None:
    """Each backend's whole step, side by side."""
    from vitkernels import attention
    from vitkernels.tpu_estimate import record_step, step_report

    for name in options.compare or ():
        attention.get(name)  # an unknown name is told before anything is compiled
    variants = {name: [*overrides, f"attn={name}"] for name in options.compare or ()}
    if not variants:
        variants = {record_step.compose(tuple(overrides)).attn.name: overrides}
    cfg = record_step.compose(tuple(next(iter(variants.values()))))
    batch, flops = cfg.data.batch_size * cfg.trainer.accum_steps, record_step.model_flops(cfg)
    steps, kernels = {}, {}
    for name, settings in variants.items():
        print(f"compiling the step with attn={name} for {chip.name} ...", flush=True)
        try:
            program = step_report.estimate(settings, chip)
        except UsageError as error:
            steps[name] = {"error": str(error)}
            continue
        steps[name] = step_report.step(program, batch, flops)
        kernels[name] = step_report.kernels(program)
        print(f"\nESTIMATES for TPU {chip.name}, attn={name}\n\n{step_report.kernel_table(kernels[name])}\n")
        print(step_report.untimed(steps[name]), flush=True)
    title = f"{cfg.model.name}, batch {batch}, training step on TPU {chip.name}: ESTIMATES"
    print(f"\n{title}\n\n{step_report.step_table(steps, chip)}\n\n{report.validation(chip)}")
    options.output.mkdir(parents=True, exist_ok=True)
    document = report.document([], chip) | {"settings": overrides, "steps": steps, "kernels": kernels}
    (options.output / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    step_report.picture(steps, title, chip, options.output / "report.png")
    print(f"\nwritten: {options.output / 'report.json'}, {options.output / 'report.png'}")
    if all("error" in row for row in steps.values()):
        raise UsageError("no step compiled; the reasons stand in the table")


def report_attention(options, chip: chips.Chip) -> None:
    """Attention alone, contender by contender."""
    rows = []
    for shape in itertools.chain.from_iterable(options.shapes):
        found = []
        for which, name in itertools.product(options.passes, options.contenders):
            found.append(report.row(name, which, shape, chip))
            if options.results is not None:
                report.append(found[-1], options.results)
        print(f"\nESTIMATES for TPU {chip.name}, (B, H, N, D) = {shape}, bfloat16\n\n{report.table(found)}")
        print(f"\n{report.against_the_best(found)}", flush=True)
        if options.operations:
            for row in found:
                print(f"\n{row['contender']}, {row['pass']}\n\n{report.operations_table(row)}", flush=True)
        rows += found
    print(f"\n{report.validation(chip)}")
    if options.json is not None:
        options.json.write_text(json.dumps(report.document(rows, chip), indent=1) + "\n")


def tune(options, chip: chips.Chip) -> None:
    """pallas_flash's blocks for each shape: searched, told, and written where they are clearly better."""
    from vitkernels.attention.pallas_flash.tpu import block_plans
    from vitkernels.tpu_estimate import tune as tpu_tune

    table = options.table or block_plans.TABLE
    if not os.access(table if table.exists() else table.parent, os.W_OK):
        raise UsageError(f"{table} cannot be written, where the result of a long search would go: --table FILE")
    for shape in itertools.chain.from_iterable(options.shapes):
        print(f"\n(B, H, N, D) = {shape}, bfloat16, TPU {chip.name}", flush=True)
        problem = tpu_tune.problem(shape)
        found = tpu_tune.search(problem, tpu_tune.libtpu_estimate(problem, chip), lambda text: print(text, flush=True))
        told = {"rule": (found.rule, found.rule_ms), "chosen": (found.plan, found.ms)}
        told |= {f"best in the {form} form": best for form, best in found.best.items()}
        for what, (plan, ms) in told.items():
            times = ", ".join(f"{which} {ms[which]:.3f}" for which in ms)
            print(f"{what}: ESTIMATED ms {times}; {plan}", flush=True)
        entry = found.entry(problem, chip.name)
        if found.plan == found.rule:
            block_plans.remove(entry, table)
            print("nothing is 10 % better than the rule, which answers: no entry")
        else:
            block_plans.write(entry, table)
            print(f"written: {table}")
    print(f"\n{report.validation(chip)}")


def validate() -> None:
    """The published timings, each beside its estimate as recorded and by this checkout."""
    print(
        "ESTIMATES for TPU v5e\n\n| case | recorded ms | again ms | published ms | again / published |\n"
        + "|---" * 5
        + "|"
    )
    for case in tpu_validation.CASES:
        cells = [case.what, f"{case.recorded_ms:g}", "–", f"{case.published_ms:g}", "–"]
        if case.program:
            ms = tpu_validation.again(case)
            cells[2], cells[4] = f"{ms:.3f}", f"{ms / case.published_ms:.2f}"
        print("| " + " | ".join(cells) + " |", flush=True)
    print(f"\n{tpu_validation.CAVEAT}")


def _shapes(text: str) -> tuple[tuple[int, int, int, int], ...]:
    if text == "vit":
        return VIT_SHAPES
    try:
        B, H, N, D = (int(part) for part in text.split(","))
    except ValueError:
        hint = "; settings go before --shapes" if "=" in text else ""
        raise argparse.ArgumentTypeError(f"{text!r} is neither four numbers B,H,N,D nor vit{hint}") from None
    return ((B, H, N, D),)


if __name__ == "__main__":
    main()
