"""Names that moved into the package keep working for one release, with a warning."""

import importlib
import sys

import pytest

import vitkernels.data


@pytest.mark.parametrize("name", ["loader", "mixing", "randomness"])
def test_moved_module__warns_and_gives_the_same_objects(name):
    sys.modules.pop(f"data.{name}", None)
    with pytest.warns(DeprecationWarning, match=r"vitkernels\.data"):
        old = importlib.import_module(f"data.{name}")
    for each in old.__all__:
        assert getattr(old, each) is not None
    if name == "loader":
        assert old.DatasetLoader is vitkernels.data.DatasetLoader and old.Problem is vitkernels.data.SampleProblem


@pytest.mark.parametrize("name", ["digits", "fake", "imagefolder"])
def test_data_set__has_its_former_import_path(name):
    package = importlib.import_module(f"vitkernels.data.{name}")
    assert importlib.import_module(f"data.{name}").build is package.build
