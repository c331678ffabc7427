"""The `vitkernels` command: dispatch to its subcommands."""

import difflib
import importlib
import importlib.util
import logging
import os
import runpy
import signal
import sys
from collections.abc import Callable

from vitkernels import __version__
from vitkernels.cli.early_stop import ended_by_signals
from vitkernels.cli.printable import print_any_path

USAGE = """usage: vitkernels COMMAND ...

  train [SETTING=VALUE ...]       train, or with -m run a sweep; `vitkernels train --help` lists all settings
  eval RUN [SETTING=VALUE ...]    evaluate a run, a checkpoint or a file of weights
  compare RUN RUN ... [--out DIR] print the verdict table of finished runs
  report RUN [--out FILE]         write an HTML page about a run: curves, results, settings, command
  export RUN [--format onnx ...]  write the weights for timm and the hub, torch.export or ONNX
  predict RUN IMAGES...           print the most likely classes of image files and folders
  embed RUN IMAGES...             write the pooled features of image files and folders
  data shard FOLDER OUT           write an image folder as shards; `vitkernels data check ROOT` verifies a data set
  new DIR                         start a project with your own data set, attention backend and tests
  doctor                          print versions, devices and the backends that run on this machine
  tune [--model NAME ...]         measure the backends of each op on this GPU, for backend="auto"
  tpu-estimate ...                estimate a kernel or a training step on a TPU, without a TPU

  --version                       print the version
"""

EVAL_USAGE = """usage: vitkernels eval RUN [SETTING=VALUE ...]

Evaluate trained weights; the same as `vitkernels train mode=eval checkpoint=RUN ...`. RUN is the folder of a run, a
checkpoint in it, a .safetensors file or a timm state dict.

Unlike train, eval
- changes no weights; it writes eval.json, results per class and pictures to a new folder (hydra.run.dir=FOLDER)
- takes model and data from RUN, if that is a run; settings on the command line take precedence
- accepts evaluation=head, knn or linear_probe, and quant=... for the accuracy after quantization

`vitkernels train --help` lists all other settings, which are those of train.

  -h, --help                      print this text
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand; return its exit status."""
    print_any_path()
    command, *words = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if command == "--version":
        print(f"vitkernels {__version__}")
        return 0
    if command in ("-sc", "--shell-completion"):
        return complete(words)
    if command not in _COMMANDS:
        near = difflib.get_close_matches(command, _COMMANDS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        if "=" in command:
            hint = f" Settings follow a command: vitkernels train {command}"
        print(f"error: unknown command {command!r}; known: {', '.join(_COMMANDS)}.{hint}", file=sys.stderr)
        return 2
    try:
        return _COMMANDS[command](words) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT  # as shells report it


def train(words: list[str]) -> int:
    """Run train.py with these settings and options of Hydra; return its exit status."""
    if importlib.util.find_spec("hydra") is None:
        print("error: training needs further packages: pip install 'vitkernels[train]'", file=sys.stderr)
        return 2
    with ended_by_signals():
        from vitkernels.config.location import train_script

        sys.argv = [str(train_script()), *words]
        try:
            runpy.run_path(str(train_script()), run_name="__main__")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(bool(end.code))
        return 0


def complete(words: list[str]) -> int:
    """Install Hydra's tab completion, or print the completions of $COMP_LINE."""
    program, *typed = os.environ.get("COMP_LINE", "vitkernels").split(" ")
    is_query = any(word.startswith("query=") for word in words)
    if is_query and len(typed) <= 1:
        print(*(command for command in _COMMANDS if command.startswith("".join(typed))))
        return 0
    if is_query and typed[0] not in ("train", "eval"):
        return 0
    os.environ["COMP_LINE"] = " ".join([program, *typed[1:]])  # Hydra knows settings, not commands
    return train([*words, "-sc"])


def evaluate(words: list[str]) -> int:
    """Run train.py with mode=eval; a first word that is a path is the checkpoint."""
    if {"-h", "--help"} & set(words):
        print(EVAL_USAGE, end="")
        return 0
    if words and not words[0].startswith(("-", "checkpoint=")) and ("=" not in words[0] or os.path.exists(words[0])):
        from vitkernels.sweep.job import quoted

        words = [f"checkpoint={quoted(words[0])}", *words[1:]]
    return train(["mode=eval", *words])


def compare(words: list[str]) -> int:
    """Print the verdict table of finished runs."""
    from vitkernels.cli.compare import main as run

    return run(words)


def report(words: list[str]) -> int:
    """Write a page about a run."""
    from vitkernels.cli.report import main as run

    return run(words)


def new(words: list[str]) -> int:
    """Start a project."""
    from vitkernels.cli.new import main as run

    return run(words)


def doctor(words: list[str]) -> None:
    """Print what this machine can run."""
    from vitkernels.cli.doctor import main as run

    run(words)


def tune(words: list[str]) -> None:
    """Measure the backends of each op on this GPU."""
    from vitkernels.cli.tune import main as run

    run(words)


def tpu_estimate(words: list[str]) -> int:
    """Estimate a kernel or a training step on a TPU."""
    from vitkernels.cli.tpu_estimate import main as run

    return run(words)


def _on_trained(module: str) -> Callable[[list[str]], int]:
    """Return the command that vitkernels.cli.MODULE implements; it works on trained models or data sets."""

    def run(words: list[str]) -> int:
        missing = [name for name in ("PIL", "rich", "omegaconf") if importlib.util.find_spec(name) is None]
        if missing:
            print(f"error: {module} needs further packages: pip install 'vitkernels[train]'", file=sys.stderr)
            return 2
        from vitkernels.errors import UsageError
        from vitkernels.files import is_place_error

        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        try:
            return importlib.import_module(f"vitkernels.cli.{module}").main(words) or 0
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except BrokenPipeError:  # the reader of the output, such as `head`, closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except OSError as error:
            if not is_place_error(error):
                raise
            print(f"error: {error}: write the output elsewhere", file=sys.stderr)
            return 2

    return run


_COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "train": train, "eval": evaluate, "export": _on_trained("export"), "predict": _on_trained("predict"),
    "embed": _on_trained("embed"), "compare": compare, "report": report, "data": _on_trained("data"), "new": new,
    "doctor": doctor, "tune": tune, "tpu-estimate": tpu_estimate,
}  # fmt: skip
