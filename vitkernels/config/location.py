"""Find the configuration folder and train.py: in a checkout, or in the installed package."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def conf_dir() -> Path:
    """Return the folder with config.yaml and its groups."""
    checkout = _PACKAGE.parent / "conf"
    return checkout if (checkout / "config.yaml").is_file() else _PACKAGE / "conf"


def train_script() -> Path:
    """Return train.py, which lies next to the configuration folder."""
    return conf_dir().parent / "train.py"
