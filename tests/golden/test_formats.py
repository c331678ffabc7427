"""The names, keys, types and tensors in the files of a run equal those recorded in formats.json.

What is recorded must stay. What is new must be listed in ADDED, so that each change of a format is on purpose.
"""

import json

import pytest

pytest.importorskip("tensorboard", reason="train.py needs vitkernels[train]")

from layout import of_run, of_sweep
from record import FORMATS

RECORDED = json.loads(FORMATS.read_text())

# "section: key" -> type or value, as layout.py has it, such as "summary.json: watts": "float".
ADDED: dict[str, object] = {
    "files: command.json": "file",  # the command that started the run
    "files: attn=native/command.json": "file",
    "files: attn=sdpa/command.json": "file",
    "command.json: command": "any",
    "summary.json: interpreted": "list",
    "summary.json: interpreted[]": "str",
    "summary.json: machine": "any",
    **{f"TensorBoard: curves/{name}": "scalar" for name in ("1_loss", "2_top1", "3_lr", "4_step_ms")},
    **{
        f"TensorBoard: _hparams_/{part}: {name}": "parameter"
        for part in ("experiment", "session_start_info")
        for name in ("seed", "epochs", "weight_decay")
    },
    # A sweep without rounds: sweep.rounds=null.
    "files: rounds.json": "file",
    "comparison.json: [].runtime": "str",
    "comparison.json: [].machine": "any",
    "comparison.json: [].finished": "str",
    "comparison.json: [].interpreted": "list",
    **{f"comparison.json: [].{key}": "NoneType" for key in ("measured_by", "judgement", "open_because", "rounds")},
    "state.json: checksum": "int",  # of everything else in it
    "state.json: model_arguments": "dict",  # they identify the run, in addition to the model's name
    **{f"state.json: model_arguments.{name}": "int" for name in ("embed_dim", "num_heads", "depth", "in_chans")},
    "config.json: data.decode": "pillow",
}

SLOW = ("fsdp", "sweep")
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in RECORDED]


def flat(layout: dict) -> dict:
    return {f"{section}: {key}": value for section, content in layout.items() for key, value in content.items()}


@pytest.mark.parametrize("name", NAMES)
def test_format__equals_the_recorded_one_and_listed_additions(name, runs):
    found = flat((of_sweep if name == "sweep" else of_run)(runs.folder(name)))
    expected = flat(RECORDED[name])
    missing = expected.keys() - found.keys()
    assert not missing
    changed = {key: (value, found[key]) for key, value in expected.items() if found[key] != value}
    assert not changed, "(recorded, found)"
    unlisted = {key: value for key, value in found.items() if key not in expected and ADDED.get(key) != value}
    assert not unlisted
