"""Compare a run's figures with the recorded ones."""

import json
from pathlib import Path

import pytest
from cases import CASES
from runs import HERE, Runs, figures, versions

RECORDED = json.loads((HERE / "recorded.json").read_text())

# Tolerances for other versions and machines. Their products round differently by 1e-7, which 20 steps of AdamW amplify
# to 1e-6 of a loss, and rounding to 8 and 16 bits to 1e-4. An extra or missing batch or another seed gives 1e-2.
LOSS, GRAD_NORM, LR = 1e-3, 1e-2, 1e-12
IMAGES = 3  # of an evaluation, whose prediction may differ


def is_same_machine(name: str) -> bool:
    """Return whether the case was recorded with these versions on this kind of machine, where every bit must match."""
    return versions(CASES[name]) == RECORDED[name]["versions"]


def check(name: str, runs: Runs) -> None:
    """Run the case and compare its figures with the recorded ones."""
    absent = [package for package, found in versions(CASES[name]).items() if found is None]
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)}")
    expected = {key: value for key, value in RECORDED[name].items() if key != "versions"}
    found = figures(runs.folder(name))
    if is_same_machine(name):
        assert found == expected
    else:
        check_roughly(found, expected)


def check_roughly(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    if "evaluation" in expected:
        check_evaluation(found["evaluation"], expected["evaluation"])
        return
    assert found["step"] == expected["step"]
    for key, tolerance in (("loss", LOSS), ("grad_norm", GRAD_NORM), ("lr", LR)):
        assert found[key] == pytest.approx(expected[key], rel=tolerance), key
    for ours, theirs in zip(found["evaluations"], expected["evaluations"], strict=True):
        check_evaluation(ours, theirs)


def check_evaluation(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    images = expected.get("images") or expected["val_images"]
    for key, value in expected.items():
        if "top" in key:
            assert found[key] == pytest.approx(value, abs=100 * IMAGES / images), key
        else:
            assert found[key] == pytest.approx(value, rel=LOSS if key.endswith("loss") else 0), key


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
