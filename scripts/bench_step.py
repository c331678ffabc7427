"""Time training steps: bare loops of timm's model and of this package's, and train.py, in one run.

    python scripts/bench_step.py                                    ViT-B/16 at 256 px, batch 128, AdamW, bf16
    python scripts/bench_step.py --model vit_digits --batch 8 --steps 4 --warmup 2 --results /tmp/step.jsonl
                                                                   on any machine, to try it out

Prints a table relative to timm's compiled model with SDPA, and the losses of 200 steps from the same weights on the
same images; appends the rows to results/step.jsonl. "train.py" runs in its own process, with only model and data set,
and once more with speed=max; "cold" has no compiled kernels on disk. "accelerate" is timm's model after
vitkernels.models.accelerate. "best" is `ops=auto` with a bf16 residual stream and stored MLP activations, in a bare
loop. `--peers` and `--ours` select rows; "compiled max-autotune" is torch.compile's slowest compilation.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vitkernels import models  # noqa: E402
from vitkernels import runtime as runtimes  # noqa: E402
from vitkernels.benchmarks import step  # noqa: E402
from vitkernels.benchmarks.step_variants import BASELINE, OURS, TRAIN_PY, StepBenchmark  # noqa: E402
from vitkernels.errors import UsageError  # noqa: E402

MODEL = "vit_b16_256"


def main() -> None:
    args = parse_arguments()
    runtime = runtimes.create(args.runtime)
    if args.model is None and runtime.device.type == "cpu":
        raise UsageError(
            f"{MODEL} at batch {args.batch} needs a GPU, but the device is {runtime.describe()}; try a small --model, "
            "as in --help",
            code="benchmarks.needs_gpu",
        )
    name = args.model or MODEL
    benchmark = StepBenchmark(name, args.attn, args.batch, args.classes, args.warmup, args.steps, args.runtime)
    ours = benchmark.available(runtime, args.ours)
    image_size, in_chans = models.input_spec(name)
    context = {
        "model": name, "batch_size": args.batch, "device": runtime.device_name, "precision": runtime.precision,
    }  # fmt: skip
    rows = []
    for row in step.run_variants(
        benchmark.variants(runtime, args.peers, ours), runtime, args.learning_steps,
        image_size=image_size, in_chans=in_chans, batch_size=args.batch, num_classes=args.classes,
        warmup=args.warmup, steps=args.steps,
    ):  # fmt: skip
        rows.append(row)
        step.append_results(args.results, [row], context)
    step.free(runtime)
    with tempfile.TemporaryDirectory() as caches:
        for row_name in [row for row in TRAIN_PY if row in ours]:
            rows.append(benchmark.time_train_py(ROOT, row_name, Path(caches)))
            step.append_results(args.results, rows[-1:], context)
    print(f"\n{name}, batch {args.batch}, {runtime.describe()}\n")
    print(step.table(rows, args.batch, BASELINE), "", step.losses_table(rows, BASELINE), sep="\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"default: {MODEL}, on a GPU")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--classes", type=int, default=1024)
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--attn", default="auto", help="attention backend of our rows")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--learning-steps", type=int, default=200, help="0 skips the losses")
    parser.add_argument("--peers", nargs="*", default=["eager native", "eager sdpa", "compiled max-autotune"])
    parser.add_argument("--ours", nargs="*", choices=OURS, metavar="ROW", help=f"of {', '.join(OURS)}; default: all")
    parser.add_argument("--results", type=Path, default=ROOT / "results/step.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(f"error: {error}")
