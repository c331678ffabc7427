"""Options that the commands on image files share."""

import argparse
import sys
from pathlib import Path

from vitkernels import runtime as runtimes
from vitkernels.inference import WHICH, open_trained
from vitkernels.inference.run_model import ModelOnFiles


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the run, the images, the batch size and the device."""
    parser.add_argument("run", type=Path, help="folder of a run, a weights file in it, or a folder in timm's layout")
    parser.add_argument("images", nargs="+", help="image files, and folders of images")
    parser.add_argument("--which", choices=sorted(WHICH), default="best", help="which weights of the run to use")
    parser.add_argument("--batch-size", type=int, default=64, help="images per forward pass")
    parser.add_argument("--runtime", choices=runtimes.names(), default="auto", help="auto uses a GPU if there is one")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16", "fp16"), default="auto")


def on_device(options: argparse.Namespace) -> ModelOnFiles:
    """Load the model that the options select, on its device."""
    if options.batch_size < 1:
        sys.exit(f"error: --batch-size must be at least 1; got {options.batch_size}")
    runtime = runtimes.create(options.runtime, options.precision)
    return ModelOnFiles(open_trained(options.run, options.which), options.batch_size, runtime)


def report(count: int, model: ModelOnFiles) -> int:
    """Print how many files could not be read; return the exit status, 1 if no file could."""
    bad = len(model.unreadable)
    if bad:
        print(f"{bad} of {count + bad} files could not be read", file=sys.stderr)
    return int(count == 0)
