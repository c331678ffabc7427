"""Record where results come from: package versions, and the state of the code that runs."""

import hashlib
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "torchvision", "timm", "triton", "torch_xla", "jax", "jaxlib", "libtpu", "hydra-core", "numpy")
ROOT = Path(__file__).resolve().parents[1]
# Files that a training step can depend on; data/ may also hold images.
_TRAINS = ("vitkernels", "train.py", "data/*.py")
_MEASURES = (*_TRAINS, "conf", "scripts")


def versions() -> dict[str, str | None]:
    """Return package versions without importing the packages; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("vitkernels", *PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


@cache
def git_commit() -> str | None:
    """Return the commit of the checkout that this code runs from, or None outside of git.

    Changed code gives "commit-dirty.hash", with another hash after each change. The answer is the same for the life of
    the process, which runs the code that it loaded.
    """
    return git_commit_of(ROOT)


def git_commit_of(root: Path) -> str | None:
    """Return the commit of the checkout at `root` in its current state; untracked files count as changes."""
    if not (root / ".git").exists():
        return None
    commit = _git(root, "describe", "--always", "--abbrev=12", "--exclude=*")
    if not commit:
        return None
    changed = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *_MEASURES)
    return f"{commit}-dirty.{_hash(root, _MEASURES)}" if changed else commit


def code_hash(root: Path = ROOT) -> str:
    """Return a hash of all code that a run may load, committed or not."""
    return _hash(
        root, _TRAINS if (root / "train.py").exists() else _TRAINS[:1]
    )  # the installed package has no train.py at its root


def _git(root: Path, *words: str) -> str | None:
    try:
        finished = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip()


def _hash(root: Path, patterns: tuple[str, ...]) -> str:
    """Return a hash of the files' names and contents, without caches and editor backups."""
    named = (path for pattern in patterns for path in root.glob(pattern))
    found = (path for name in named for path in (name.rglob("*") if name.is_dir() else [name]))
    digest = hashlib.sha256()
    for path, name in sorted((path, path.relative_to(root)) for path in found if path.is_file()):
        if not name.name.endswith("~") and not any(part.startswith((".", "__pycache__")) for part in name.parts):
            digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:8]
