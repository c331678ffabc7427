"""The state of the code that results record."""

import subprocess

import pytest

from vitkernels import provenance


@pytest.fixture
def checkout(tmp_path):
    """Return a checkout with one commit."""
    (tmp_path / "vitkernels").mkdir()
    (tmp_path / "vitkernels/kernel.py").write_text("1")
    (tmp_path / "train.py").write_text("1")
    (tmp_path / "README.md").write_text("1")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def test_changed_code__has_a_distinct_version_for_each_state(checkout):
    clean = provenance.git_commit_of(checkout)
    assert len(clean) == 12
    states = {clean}
    for number in range(2):
        (checkout / "vitkernels/kernel.py").write_text(f"edited {number}")
        states.add(provenance.git_commit_of(checkout))
    (checkout / "vitkernels/new.py").write_text("untracked")
    states.add(provenance.git_commit_of(checkout))
    assert len(states) == 4 and all(state.startswith(clean) for state in states)
    assert sum("-dirty." in state for state in states) == 3
    (checkout / "vitkernels/new.py").unlink()
    (checkout / "vitkernels/kernel.py").write_text("1")
    (checkout / "README.md").write_text("no code")
    assert provenance.git_commit_of(checkout) == clean


def test_commit__is_none_outside_of_git(tmp_path):
    assert provenance.git_commit_of(tmp_path) is None


def test_commit__is_that_of_the_process_start(monkeypatch):
    provenance.git_commit.cache_clear()
    monkeypatch.setattr(provenance, "git_commit_of", lambda root: "first")
    assert provenance.git_commit() == "first"
    monkeypatch.setattr(provenance, "git_commit_of", lambda root: "edited meanwhile")
    assert provenance.git_commit() == "first"
    provenance.git_commit.cache_clear()


def test_code_hash__covers_what_a_run_can_load(checkout):
    before = provenance.code_hash(checkout)
    (checkout / "vitkernels/__pycache__").mkdir()
    (checkout / "vitkernels/__pycache__/kernel.pyc").write_text("compiled")
    (checkout / "vitkernels/.kernel.py.swp").write_text("editor backup")
    (checkout / "vitkernels/kernel.py~").write_text("editor backup")
    (checkout / "vitkernels/.ipynb_checkpoints").mkdir()
    (checkout / "vitkernels/.ipynb_checkpoints/kernel.py").write_text("editor backup")
    (checkout / "README.md").write_text("no code")
    (checkout / "data/imagenet").mkdir(parents=True)
    (checkout / "data/imagenet/an_image.jpg").write_text("no code")
    assert provenance.code_hash(checkout) == before
    hashes = {before}
    for name in ("vitkernels/kernel.py", "train.py", "data/digits.py", "vitkernels/table.json"):
        (checkout / name).write_text("2")
        hashes.add(provenance.code_hash(checkout))
    (checkout / "vitkernels/table.json").rename(checkout / "vitkernels/other.json")
    assert len(hashes | {provenance.code_hash(checkout)}) == 6
