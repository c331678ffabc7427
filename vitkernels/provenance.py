"""What this machine has: versions of the packages that matter, and the state of the code that runs."""

import hashlib
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "torchvision", "timm", "triton", "torch_xla", "jax", "jaxlib", "libtpu", "hydra-core", "numpy")
ROOT = Path(__file__).resolve().parents[1]
# What the step of a run can depend on, beside its settings; images may lie below data/.
_TRAINS = ("vitkernels", "train.py", "data/*.py")
_MEASURES = (*_TRAINS, "conf", "scripts")


def versions() -> dict[str, str | None]:
    """Package versions, without importing the packages; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("vitkernels", *PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


@cache
def git_commit() -> str | None:
    """The commit of the checkout this code runs from, None outside of git; "commit-dirty.hash" of changed code.

    The hash is another one after each change. All is as it was when this process first asked: it runs what it loaded.
    """
    return git_commit_of(ROOT)


def git_commit_of(root: Path) -> str | None:
    """As `git_commit`, as the checkout is now; new files are changes too."""
    if not (root / ".git").exists():
        return None
    commit = _git(root, "describe", "--always", "--abbrev=12", "--exclude=*")
    if not commit:
        return None
    changed = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *_MEASURES)
    return f"{commit}-dirty.{_hash(root, _MEASURES)}" if changed else commit


def code_hash(root: Path = ROOT) -> str:
    """Of all code that a run may load, as it lies there now, committed or not."""
    return _hash(root, _TRAINS if (root / "train.py").exists() else _TRAINS[:1])  # or it was installed without


def _git(root: Path, *words: str) -> str | None:
    try:
        said = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip()


def _hash(root: Path, patterns: tuple[str, ...]) -> str:
    """Of the files' names and contents, without what Python and editors leave beside them."""
    named = (path for pattern in patterns for path in root.glob(pattern))
    found = (path for name in named for path in (name.rglob("*") if name.is_dir() else [name]))
    digest = hashlib.sha256()
    for path, name in sorted((path, path.relative_to(root)) for path in found if path.is_file()):
        if not name.name.endswith("~") and not any(part.startswith((".", "__pycache__")) for part in name.parts):
            digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:8]
