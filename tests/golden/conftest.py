"""Runs that the golden tests share: each runs once per session, when a test first requests its folder."""

import pytest
from runs import Runs

pytest.register_assert_rewrite("comparing", "formats")


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    pytest.importorskip("hydra", reason="train.py needs vitkernels[train]")
    return Runs(tmp_path_factory.mktemp("golden") / "runs")
