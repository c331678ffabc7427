"""Time the input pipeline on this machine: loaders alone next to timm's, training on JPEG files next to data=fake.

    python scripts/bench_input.py                                      # loaders alone
    python scripts/bench_input.py --train model=vit_b16_256 speed=max  # also train and evaluate with these settings
    python scripts/bench_input.py --size 4000 3000 --images 200

With --train, the benchmark trains on fake data and on the files: without augmentation, with Mixup, CutMix and erasing,
with RandAugment, and through timm's loader. The JPEG files are created once, under --root. Prints a table and appends
each row to results/input.jsonl as soon as it is known.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vitkernels.benchmarks import input as pipelines  # noqa: E402
from vitkernels.cli.wording import in_settings  # noqa: E402
from vitkernels.errors import UsageError  # noqa: E402
from vitkernels.provenance import git_commit, versions  # noqa: E402
from vitkernels.training.step_timer import PARTS  # noqa: E402

LOADERS = {
    "imagefolder, decode=turbo": {"decode": "turbo"},
    "imagefolder, decode=pillow": {"decode": "pillow"},
    "imagefolder, RandAugment": {"auto_augment": "rand-m9-mstd0.5-inc1"},
    "imagefolder, color jitter, erasing, mixup, cutmix": {
        "color_jitter": 0.4, "re_prob": 0.25, "mixup": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0},
    },
    "imagefolder, decode=cuda": {"decode": "cuda"},  # if there is a GPU
}  # fmt: skip
EVALUATION = "evaluation of the files"
RUNS = (
    "data=fake",
    "files",
    "files, mixup, cutmix, erasing",
    "files, RandAugment",
    "files, timm's create_loader",
    EVALUATION,
)
MIXUP = "data.mixup={mixup_alpha: 0.8, cutmix_alpha: 1.0}"


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    width, height = options.size
    root = options.root / f"{width}x{height}"
    runs = {} if options.train is None else settings_of_runs(root, options)
    if runs:
        pipelines.check_settings([*runs.values()])  # before the files are made and the loaders timed
    if not root.exists():
        mean = pipelines.make_jpegs(root, options.images, width, height)
        print(f"{options.images} JPEG files, {width} × {height}, {mean / 1e3:.0f} KB on average, in {root}")
    elif (there := pipelines.count_jpegs(root)) != options.images:
        sys.exit(f"{root} holds {there} images, not {options.images}: pass --images {there}, or delete the folder")
    if options.train is not None:
        pipelines.lengthen(root, options.batch * (untimed_steps(options) + options.steps + 1))
    machine = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", "cores": os.cpu_count(),
        "workers": options.workers, "image": [width, height], "batch_size": options.batch, "image_size": options.side,
        "date": time.strftime("%Y-%m-%d"), "commit": git_commit(), "versions": versions(),
        "settings": options.train,
    }  # fmt: skip
    options.results.parent.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, rates in measure(root, runs, options):
        found[name] = rates
        rounded = [round(rate, 1) for rate in rates]
        with options.results.open("a") as file:  # at once: a later pipeline may fail
            file.write(json.dumps(machine | {"pipeline": name, "images_per_s": rounded}) + "\n")
        print(f"{name}: {statistics.median(rates):,.0f} images/s", flush=True)
    print("\n| pipeline | images/s (least, greatest) |\n|---|---|")
    for name, rates in found.items():
        print(f"| {name} | {statistics.median(rates):,.0f} ({min(rates):,.0f}, {max(rates):,.0f}) |")


def measure(root: Path, runs: dict[str, list[str]], options: argparse.Namespace) -> Iterator[tuple[str, list[float]]]:
    """Yield each pipeline's name and its images/s in each round, as soon as they are known."""
    shape = (root, options.batch, options.side, options.workers)
    makers = {name: partial(pipelines.loader_batches, *shape, **settings) for name, settings in LOADERS.items()}
    if not torch.cuda.is_available():  # asked here, not above: each worker imports this file, and CUDA starts slowly
        del makers["imagefolder, decode=cuda"]
    makers = {name: makers[name] for name in makers if options.loaders is None or name in options.loaders}
    makers["timm's create_loader"] = partial(pipelines.timm_batches, *shape)
    yield from pipelines.rates(makers, options.seconds, options.rounds, options.workers)
    yield from training({name: words for name, words in runs.items() if name != EVALUATION}, options.rounds)
    if EVALUATION in runs:
        yield EVALUATION, pipelines.evaluation_rates(root, runs[EVALUATION], options.rounds)


def settings_of_runs(root: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the settings of train.py for each of the chosen RUNS, by its name."""
    untimed = untimed_steps(options)
    common = [*options.train, f"data.batch_size={options.batch}", f"data.num_workers={options.workers}"]
    steps = [f"trainer.warmup_steps={untimed}", f"trainer.max_steps={untimed + options.steps}"]
    files = pipelines.file_settings(root)
    settings = {
        "data=fake": [*steps, "data=fake", f"data.num_classes={pipelines.CLASSES}"],
        "files": [*steps, *files],
        "files, mixup, cutmix, erasing": [*steps, *files, "data.re_prob=0.25", MIXUP],
        "files, RandAugment": [*steps, *files, "data.auto_augment=rand-m9-mstd0.5-inc1"],
        "files, timm's create_loader": [*steps, *files, "data._target_=vitkernels.benchmarks.input.timm_data"],
        EVALUATION: files,
    }
    return {name: [*common, *words] for name, words in settings.items() if name in options.runs}


def training(runs: dict[str, list[str]], rounds: int) -> Iterator[tuple[str, list[float]]]:
    """Yield images/s of training with the settings of each run, in turns; each run also prints its time's parts."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name, settings in runs.items():
            summary = pipelines.training_summary(settings)
            found[name].append(summary["images_per_s"])
            parts = {part: summary[part] for part in PARTS}
            print(f"training, {name}: first step after {summary['first_step_s']} s, {parts}", flush=True)
            if number == rounds - 1:
                yield f"training, {name}", found[name]


def untimed_steps(options: argparse.Namespace) -> int:
    """Return the number of training steps before the timed ones.

    While the first step compiles, the workers fill their queues, which then empty at the difference between the model's
    rate and the workers': after five times as many steps as they hold, if the workers reach 80 % of the model's rate.
    """
    return 5 * pipelines.queued_batches(options.workers)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("runs/bench_input"), help="folder of the JPEG files")
    parser.add_argument("--images", type=int, default=4000, help="number of JPEG files to create")
    parser.add_argument("--size", type=int, nargs=2, default=(500, 375), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--side", type=int, default=256, help="side of the training images, in pixels")
    parser.add_argument("--batch", type=int, default=128, help="images per batch")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="worker processes of each loader")
    parser.add_argument("--seconds", type=float, default=10, help="duration of one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each pipeline, in turns")
    parser.add_argument("--steps", type=int, default=60, help="timed training steps of one measurement")
    parser.add_argument("--train", nargs="*", metavar="SETTING", help="also train and evaluate, with these settings")
    parser.add_argument("--loaders", nargs="*", choices=LOADERS, metavar="NAME",
                        help=f"loaders to time alone next to timm's: {'; '.join(LOADERS)}; default: all")  # fmt: skip
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS, metavar="NAME",
                        help=f"what to run with --train: {'; '.join(RUNS)}; default: all")  # fmt: skip
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "input.jsonl")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(f"error: {in_settings(error)}")
