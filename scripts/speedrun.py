"""Time how long training takes until a model classifies 95 % of the held-out shapes correctly: one number.

    python scripts/speedrun.py                                          on one GPU, three seeds
    python scripts/speedrun.py ops=fused compile=reduce-overhead        with other settings of train.py
    python scripts/speedrun.py runtime=cpu model.img_size=32 +model.kwargs.depth=2 data.batch_size=64 \\
        data.val_items=256 trainer.max_steps=40 --eval-every 20 --target 3 --seeds 0 --results /tmp/speedrun.jsonl
                                                                        on a CPU, to try out the script

The clock runs during training steps; compilation and evaluations are not counted. If every seed reaches the target, a
row is appended to results/speedrun.jsonl, from which scripts/docs_benchmarks.py makes the table of records. The rules
are in docs/howto/speedrun.md.
"""

import argparse
import logging
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> int:
    from vitkernels.benchmarks import speedrun
    from vitkernels.errors import UsageError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="settings of train.py, added to experiment=speedrun")
    parser.add_argument("--target", type=float, default=speedrun.TARGET, help="top-1 accuracy in percent")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--eval-every", type=int, default=100, help="steps between evaluations")
    parser.add_argument("--note", default="", help="what is new, for the table of records")
    parser.add_argument("--results", type=Path, default=ROOT / "results/speedrun.jsonl")
    options = parser.parse_intermixed_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        row = speedrun.measure(options.settings, options.seeds, options.target, options.eval_every)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    each = ", ".join(f"{one['seconds']:.1f} s ({one['steps']} steps, {one['top1']:.2f} %)" for one in row["attempts"])
    print(f"{row['mean_seconds']:.1f} s to {row['target']:g} % on {row['device']}: {each}")
    if not row["reached"]:
        print(f"the target of {row['target']:g} % was not reached by every seed; nothing was recorded")
        return 1
    speedrun.append({**row, "note": options.note}, options.results)
    print(f"recorded in {options.results}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
