"""Options that the commands on image files share."""

import argparse
import sys
from pathlib import Path

from vitkernels import runtime as runtimes
from vitkernels.inference import WHICH, open_trained
from vitkernels.inference.run_model import ModelOnFiles


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the run, the images, and how the model runs on them."""
    parser.add_argument("run", type=Path, help="folder of a run, weights in one, or a folder in timm's layout")
    parser.add_argument("images", nargs="+", help="image files, and folders of them")
    parser.add_argument("--which", choices=sorted(WHICH), default="best", help="which of the run's weights")
    parser.add_argument("--batch-size", type=int, default=64, help="images per forward pass")
    parser.add_argument("--runtime", choices=runtimes.names(), default="auto", help="device; auto takes a GPU")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16", "fp16"), default="auto")


def on_device(options: argparse.Namespace) -> ModelOnFiles:
    """Return the model that the options name, on its device."""
    if options.batch_size < 1:
        sys.exit(f"error: --batch-size {options.batch_size}: at least 1 image")
    runtime = runtimes.create(options.runtime, options.precision)
    return ModelOnFiles(open_trained(options.run, options.which), options.batch_size, runtime)


def report(count: int, model: ModelOnFiles) -> int:
    """Print how many files could not be read; return the exit status, 1 if no file could."""
    bad = len(model.unreadable)
    if bad:
        print(f"{bad} of {count + bad} files could not be read", file=sys.stderr)
    return int(count == 0)
