"""Record the current results of train.py: PYTHONPATH=tests python tests/golden/record.py [--train-py PATH] [CASE...]

CASE is a name in cases.py, `formats` or `run_folder`; without any, all are recorded. `run_folder` recreates the
committed run folder and the cases that start from it.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from cases import CASES, OLD, OLD_RUN
from layout import of_run, of_sweep
from runs import HERE, TRAIN_PY, Runs, figures, versions

RECORDED, FORMATS = HERE / "recorded.json", HERE / "formats.json"
FORMAT_CASES = ("plain", "ema", "images", "fsdp", "evaluated_best", "evaluated_w8a8")
EVERYTHING = (OLD, *CASES, "formats")


def record(names: list[str], train_py: Path) -> None:
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if OLD in names:
        names = [*names, *(name for name in CASES if name.startswith("old_run"))]
    with tempfile.TemporaryDirectory() as temporary:
        runs = Runs(Path(temporary).resolve() / "runs", train_py)
        if OLD in names:
            make_run_folder(runs)
        for name in CASES:
            if name in names:
                recorded[name] = {"versions": versions(CASES[name]), **figures(runs.folder(name))}
                print(name, flush=True)
        if "formats" in names:
            formats = {name: of_run(runs.folder(name)) for name in FORMAT_CASES}
            write(FORMATS, formats | {"sweep": of_sweep(runs.folder("sweep"))})
    write(RECORDED, {name: recorded[name] for name in CASES if name in recorded})


def make_run_folder(runs: Runs) -> None:
    """Write the folder of a finished run with its checkpoints, without event files, logs and Hydra's files."""
    made = runs.below / "made"
    runs.forked(*OLD_RUN, f"hydra.run.dir={made}")
    shutil.rmtree(HERE / OLD, ignore_errors=True)
    left_out = shutil.ignore_patterns("events.*", "*.log", ".hydra", ".lock")
    shutil.copytree(made, HERE / OLD, symlinks=True, ignore=left_out)


def write(path: Path, content: dict) -> None:
    """Write one line for each inner entry. JSON writes floats by their repr, which is exact."""
    entries = [f" {json.dumps(name)}: {_lines(entry)}" for name, entry in content.items()]
    path.write_text("{\n" + ",\n".join(entries) + "\n}\n")


def _lines(entry: dict) -> str:
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in entry.items()]
    return "{\n" + ",\n".join(lines) + "\n }"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-py", type=Path, default=TRAIN_PY)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(EVERYTHING):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(EVERYTHING)}")
    record(arguments.cases or list(EVERYTHING), arguments.train_py.resolve())
