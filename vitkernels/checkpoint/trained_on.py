"""Read the class names and preprocessing of weights from a run, a checkpoint or an exported file."""

from dataclasses import dataclass
from pathlib import Path

from vitkernels.checkpoint.export import read_notes
from vitkernels.config.saved import read_settings
from vitkernels.files import read_json

_NOTES = ("class_names", "preprocessing", "file_preprocessing")


@dataclass(frozen=True)
class TrainedOn:
    """Class names and preprocessing that weights were trained with; None where unknown.

    class_names: the class of each output, in order. preprocessing: how images were prepared, with the keys of
    vitkernels.models.preprocessing. file_preprocessing: the same for image files, if the data set has no files itself.
    """

    class_names: list[str] | None = None
    preprocessing: dict | None = None
    file_preprocessing: dict | None = None


def read_trained_on(weights: Path) -> TrainedOn:
    """Read the class names and preprocessing of a checkpoint folder or of exported weights."""
    if weights.is_dir():
        notes, run = read_json(weights / "state.json") or {}, weights.resolve().parent.parent
    else:
        notes, run = read_notes(weights, _NOTES), weights.parent
    known = {**_recorded_by(run), **{name: notes[name] for name in _NOTES if name in notes}}
    return TrainedOn(**known)


def _recorded_by(run: Path) -> dict:
    """Read them from the run's folder: weights written by older versions do not contain them."""
    data = read_settings(run).get("data", {})
    prepared = {name: data.get(name) for name in ("mean", "std", "interpolation", "crop_pct", "crop_mode")}
    known = prepared if None not in prepared.values() else None
    return {"class_names": read_json(run / "class_names.json"), "preprocessing": known}
