"""Find the configuration and train.py: next to the package in a checkout, inside the package once installed."""

import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_IS_INSTALLED = (_PACKAGE / "conf").is_dir()
_HOME = _PACKAGE if _IS_INSTALLED else _PACKAGE.parent

# The command that starts training, for messages.
_BY_COMMAND = _IS_INSTALLED or any(Path(word).name == "vitkernels" for word in sys.orig_argv[:4])
PROGRAM = "vitkernels train" if _BY_COMMAND else "python train.py"


def conf_dir() -> Path:
    """Return the folder of config.yaml and its groups."""
    return _HOME / "conf"


def train_script() -> Path:
    """Return the path of train.py."""
    return _HOME / "train.py"


def program() -> list[str]:
    """Return the command that started this process, without its settings."""
    is_ours = PROGRAM.startswith("vitkernels") and sys.argv[0] == str(train_script())
    return PROGRAM.split() if is_ours else ["python", sys.argv[0]]


def train_command() -> list[str]:
    """Return the command that starts train.py in its own process."""
    # -P keeps the package's folder, where train.py is installed, off sys.path: its modules are not top-level ones.
    options = ["-P"] if _IS_INSTALLED else []
    return [sys.executable, *options, str(train_script())]
