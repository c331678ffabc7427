"""Losses, gradient norms and evaluations of 20 steps on the CPU equal the recorded ones bit for bit.

record.py records them; runs.py explains why machines whose elementwise functions round alike give the same figures.
Where these functions or package versions differ from the recorded ones, the tolerances of comparing.py apply. The files
that the same runs leave have the recorded formats.
"""

import pytest

pytest.importorskip("tensorboard", reason="train.py needs vitkernels[train]")

from cases import CASES, STOPPED_AT
from comparing import check, metrics
from formats import RECORDED, check_format

NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if case.slow else [])
    for name, case in CASES.items()
    if not name.startswith("old_run")
]


@pytest.mark.parametrize("name", NAMES)
def test_figures__equal_the_recorded_ones(name, runs):
    check(name, runs)


@pytest.mark.parametrize(("resumed", "whole"), [("resumed", "plain"), ("resumed_rich", "rich")])
def test_resume__equals_uninterrupted_run(resumed, whole, runs):
    """Resume from the checkpoint of step 11 in another folder; there is no tolerance on any machine."""
    expected = [line for line in metrics(runs.folder(whole)) if line["step"] > STOPPED_AT]
    assert metrics(runs.folder(resumed)) == expected
    assert expected[0]["step"] == STOPPED_AT + 1


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("fsdp", "sweep") else ()) for name in RECORDED]
)
def test_format__equals_the_recorded_one_and_listed_additions(name, runs):
    check_format(name, runs)
