"""`vitkernels tpu-estimate`: times on a TPU from the schedule that libtpu's compiler writes, without a TPU.

    vitkernels tpu-estimate my_kernels:attention --shapes bf16[128,197,64],bf16[128,197,64]   # a kernel of yours
    vitkernels tpu-estimate my_kernels:attention --shapes ... --tune block_q=128,256 block_k=128,256
    vitkernels tpu-estimate step model=vit_b16_256 attn=pallas_flash --json a.json --picture a.png   # a training step
    vitkernels tpu-estimate step model=vit_b16_256 --compare attn=sdpa attn=pallas_flash             # two settings
    vitkernels tpu-estimate --compare a.json b.json                                                  # two results
    vitkernels tpu-estimate scaling a.json --chips 4,8,16 --strategies ddp,fsdp         # the same step on a slice
    vitkernels tpu-estimate --against runs/my_tpu_run     # compare a run's measured times on a TPU with their estimate
    vitkernels tpu-estimate published                     # compare the method with published timings

Every time is an ESTIMATE. A kernel is a function of JAX arrays that calls pallas_call; it is imported from the current
folder or from an installed package. `step` takes every setting of `vitkernels train`; a step of ViT-B/16 at batch 128
takes 2 to 7 minutes of CPU time and 4 GB of memory. Needs libtpu: pip install "vitkernels[tpu]" (Linux x86-64).
"""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from vitkernels.errors import UsageError


def main(arguments: list[str] | None = None) -> int:
    """Run `vitkernels tpu-estimate`; return its exit status."""
    options = _parser().parse_intermixed_args(arguments)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for a kernel in the user's own module
    try:
        _check_outputs(options)
        if options.compare and not options.words:
            return compare_files(options)
        if options.words[:1] == ["scaling"]:
            return estimate_scaling(options)
        if options.against is not None:
            return estimate_against(options)
        _checked(options)
        commands = {"step": estimate_step, "published": estimate_published}
        return commands.get(options.words[0], estimate_kernel)(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vitkernels tpu-estimate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="WHAT", help="MODULE:FUNCTION, or step and settings")
    parser.add_argument("--chip", default="v5e", metavar="NAME,...", help="v5e, v5p, v6e, or several (default: v5e)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS", help="limit for compiling a kernel")
    parser.add_argument("--shapes", metavar="DTYPE[N,...],...", help="the kernel's arrays, such as bf16[128,197,64]")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="keyword arguments of the kernel")
    parser.add_argument(
        "--tune", nargs="+", default=[], metavar="NAME=V1,V2", help="try all combinations of these keyword arguments"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the step (.png or .svg)")
    parser.add_argument("--top", type=int, default=25, metavar="N", help="kernels to list (default: 25; 0: all)")
    parser.add_argument("--operations", action="store_true", help="also list every operation of the step in order")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two JSON files, or two settings of the step")
    parser.add_argument("--chips", default="4,8,16", metavar="N,...", help="sizes of slices (default: 4,8,16)")
    parser.add_argument(
        "--strategies", default="ddp,fsdp", metavar="NAME,...", help="ddp, fsdp, or both (default: ddp,fsdp)"
    )
    parser.add_argument("--against", type=Path, metavar="RUN", help="folder of a run on a TPU")
    return parser


def _checked(options: argparse.Namespace) -> None:
    """Look up the chips by name; raise UsageError for options that cannot work, before any compilation."""
    from vitkernels.tpu_estimate import chips, compiler

    if not options.words:
        message = "nothing to estimate: name a kernel (MODULE:FUNCTION) or a step (step model=...); see --help"
        raise UsageError(message, code="tpu_estimate.words", word="")
    options.chosen = [chips.chip(name) for name in options.chip.split(",")]
    if (reason := compiler.unavailable()) is not None:
        raise UsageError(reason, code="tpu_estimate.no_libtpu")


def estimate_kernel(options: argparse.Namespace) -> int:
    """Print the estimate of a user's kernel on each chip, or of all combinations to tune."""
    from vitkernels.tpu_estimate import report, user_kernel

    (target, *more) = options.words
    if more:
        message = f"unexpected {more[0]!r}; keyword arguments of the kernel follow --set or --tune"
        raise UsageError(message, code="tpu_estimate.words", word=more[0])
    if ":" not in target:
        message = f"{target!r}: expected MODULE:FUNCTION, such as my_kernels:attention"
        raise UsageError(message, code="tpu_estimate.target", target=target)
    if options.shapes is None:
        message = "--shapes is missing: the arrays of the kernel, such as --shapes bf16[128,197,64],f32[64]"
        raise UsageError(message, code="tpu_estimate.shapes", shapes=None)
    shapes = user_kernel.parse_shapes(options.shapes)
    fixed = {name: values[0] for name, values in user_kernel.parse_keywords(options.set).items()}
    tuned = user_kernel.combinations(user_kernel.parse_keywords(options.tune))
    found: list[dict[str, Any]] = []
    for chip in options.chosen:
        rows = []
        for keywords in tuned:
            arguments = fixed | keywords
            try:
                program = user_kernel.estimate(target, shapes, arguments, chip, options.timeout)
            except UsageError as error:
                if not options.tune or error.code not in _REFUSED:
                    raise
                note = ", ".join(f"{name}={value}" for name, value in arguments.items())
                rows.append({"label": "ESTIMATE", "chip": chip.name, "arguments": note, "error": _reason(error)})
                print(f"{note}: {rows[-1]['error'][:160]}", file=sys.stderr, flush=True)
                continue
            rows.append(user_kernel.facts(program))
            if options.tune:
                print(f"{program.note}: {program.estimate_ms:.4f} ms", file=sys.stderr, flush=True)
        what = f"{target} {options.shapes}"
        if options.tune:
            print(f"ESTIMATES for TPU {chip.name} (no TPU was used): {what}\n\n{user_kernel.tuning_table(rows)}\n")
        else:
            print(user_kernel.text(rows[0], what), end="\n\n")
        found += rows
    print("\n".join({report.trust(chip): None for chip in options.chosen}))
    if options.json is not None:
        document = {"label": "ESTIMATE", "kernel": target, "shapes": options.shapes, "rows": found}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 2 if all("error" in row for row in found) else 0


def estimate_step(options: argparse.Namespace) -> int:
    """Print the estimate of a training step on each chip, or compare two settings of it."""
    from vitkernels.tpu_estimate import record_step, report, step_comparison, step_picture, step_report

    variants = [[*options.words[1:], *shlex.split(words)] for words in options.compare or [""]]
    for words in variants:
        record_step.compose(tuple(words))  # raises before anything is compiled
    if len(options.chosen) > 1:
        message = f"--chip {options.chip}: a step is estimated for one chip; repeat the command for each"
        raise UsageError(message, code="tpu_estimate.words", word="step")
    (chip,) = options.chosen
    found = []
    for words in variants:
        print(f"compiling the step for {chip.name}: {' '.join(words)}", file=sys.stderr, flush=True)
        found.append(step_report.estimate_document(words, chip))
    if options.compare:
        print(f"{step_comparison.text(found[0], found[1])}\n\n{report.trust(chip)}")
        return 0
    print(step_report.text(found[0], options.top))
    if options.operations:
        print(f"\n{step_report.operation_table(found[0]['operations'])}")
    print(f"\n{report.trust(chip)}")
    if options.json is not None:
        options.json.write_text(json.dumps(found[0], indent=1) + "\n")
    if options.picture is not None:
        step_picture.timeline(found[0], options.picture)
    return 0


def compare_files(options: argparse.Namespace) -> int:
    """Print where the difference between two estimated steps comes from."""
    from vitkernels.tpu_estimate import step_comparison

    first, second = (step_comparison.read(Path(name)) for name in options.compare)
    print(step_comparison.text(first, second))
    return 0


def _check_outputs(options: argparse.Namespace) -> None:
    """Raise UsageError for a comparison with --json or --picture, whose files describe one step."""
    given = [f"--{name}" for name in ("json", "picture") if getattr(options, name) is not None]
    if options.compare and given:
        raise UsageError(
            f"{' and '.join(given)} with --compare: such a file describes one step. Estimate the two steps one by one, "
            "each with `vitkernels tpu-estimate step SETTINGS --json a.json --picture a.png`, then compare the results "
            "with `vitkernels tpu-estimate --compare a.json b.json`",
            code="tpu_estimate.compare",
            given=given,
        )


def estimate_scaling(options: argparse.Namespace) -> int:
    """Print how the step of a JSON file, or of these settings, scales to slices of several chips."""
    from vitkernels.tpu_estimate import chips, collectives, step_comparison, step_report

    settings = options.words[1:]
    try:
        counts = [int(number) for number in options.chips.split(",")]
    except ValueError:
        message = f"--chips {options.chips!r}: expected numbers of chips, such as 4,8,16"
        raise UsageError(message, code="tpu_estimate.chips", chips=options.chips) from None
    if len(settings) == 1 and settings[0].endswith(".json"):
        found = step_comparison.read(Path(settings[0]))
    else:
        _checked(options)
        found = step_report.estimate_document(settings, options.chosen[0])
    rows = collectives.scaling(found, counts, options.strategies.split(","))
    chip = chips.chip(found["chip"])
    print(f"ESTIMATES, no TPU was used: {' '.join(found['settings'])}, {found['batch']} images per chip\n")
    print(collectives.scaling_table(rows, chip))
    if options.json is not None:
        options.json.write_text(json.dumps({"label": "ESTIMATE", "rows": rows}, indent=1) + "\n")
    return 0


def estimate_against(options: argparse.Namespace) -> int:
    """Print the step times that a run recorded on a TPU, next to the estimate for its configuration."""
    from vitkernels.tpu_estimate import against, collectives, report, step_report

    run = against.read(options.against)
    _checked(argparse.Namespace(words=["step"], chip=run.chip.name))
    print(f"compiling the step for {run.chip.name}: {' '.join(run.overrides)}", file=sys.stderr, flush=True)
    found = step_report.estimate_document([*run.overrides, *options.words], run.chip)
    communication = None
    if run.devices in collectives.GRIDS[run.chip.name]:
        strategy = "fsdp" if run.parallel == "fsdp" else "ddp"
        communication = collectives.scaling(found, [run.devices], [strategy])[0]["estimate_communication_ms"]
    print(f"{against.text(run, found, communication)}\n\n{report.trust(run.chip)}")
    if options.json is not None:
        options.json.write_text(json.dumps({"measured": run.step_ms, "estimate": found}, indent=1) + "\n")
    return 0


def estimate_published(options: argparse.Namespace) -> int:
    """Print the published timings, each with the estimate of this checkout."""
    from vitkernels.tpu_estimate import collectives, report

    for line in report.published_lines():
        print(line, flush=True)
    print(f"\n{collectives.published_table()}")
    return 0


_REFUSED = ("tpu_estimate.compile", "tpu_estimate.vmem", "tpu_estimate.timeout", "tpu_estimate.call")


def _reason(error: UsageError) -> str:
    if error.code == "tpu_estimate.vmem":
        return str(error).partition(" is ")[2].partition(";")[0]
    return error.fields.get("reason") or str(error)


if __name__ == "__main__":
    sys.exit(main())
