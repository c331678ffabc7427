"""What this machine has: versions of the packages that matter, and the commit of the code that runs."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "torchvision", "timm", "triton", "torch_xla", "jax", "jaxlib", "libtpu", "hydra-core", "numpy")


def versions() -> dict[str, str | None]:
    """Package versions, without importing the packages; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("vitkernels", *PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def git_commit() -> str | None:
    """The commit of the checkout this code runs from, with "-dirty" when it was changed; None outside of git."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() or None
