"""Atomic writes."""

from pathlib import Path

import pytest

from vitkernels.files import write_synced


def test_write_synced__raises_the_first_error_where_nothing_can_be_removed(tmp_path, monkeypatch):
    def fail(file):
        raise OSError(28, "No space left on device")

    def refuse(path, missing_ok=False):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_synced(tmp_path / "x", fail)
