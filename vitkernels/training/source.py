"""Read what weights were trained on (class names, preprocessing) from a run, a checkpoint or exported weights.

Evaluating or resuming with other classes is refused; other preprocessing is logged.
"""

import itertools
import logging
from dataclasses import dataclass
from pathlib import Path

from timm.utils import natural_key

from vitkernels.checkpoint.export import read_notes
from vitkernels.errors import UsageError
from vitkernels.files import read_json
from vitkernels.training.run_dir import differences, read_settings

log = logging.getLogger(__name__)

_NOTES = ("class_names", "preprocessing")


@dataclass(frozen=True)
class TrainedOn:
    """What some weights were trained on; an entry is None if it is not known.

    class_names: what the outputs stand for, in order. preprocessing: how images were prepared, with the keys of
    vitkernels.models.preprocessing.
    """

    class_names: list[str] | None = None
    preprocessing: dict | None = None


def read_trained_on(weights: Path) -> TrainedOn:
    """Return what a run's checkpoint folder or its exported weights were trained on."""
    if weights.is_dir():
        notes, run = read_json(weights / "state.json") or {}, weights.resolve().parent.parent
    else:
        notes, run = read_notes(weights, _NOTES), weights.parent
    known = {**_recorded_by(run), **{name: notes[name] for name in _NOTES if name in notes}}
    return TrainedOn(**known)


def _recorded_by(run: Path) -> dict:
    """Return what the run's folder records, for weights from older versions, which carry no notes."""
    data = read_settings(run).get("data", {})
    prepared = {name: data.get(name) for name in ("mean", "std", "interpolation", "crop_pct", "crop_mode")}
    known = prepared if None not in prepared.values() else None
    return {"class_names": read_json(run / "class_names.json"), "preprocessing": known}


def check_data(
    weights: str | Path, trained_on: TrainedOn, class_names: list[str] | None, preprocessing: dict | None
) -> None:
    """Raise UsageError if the weights have other classes than the data set; warn if images are prepared differently."""
    known, prepared = trained_on.class_names, trained_on.preprocessing
    if known is not None and class_names is not None and known != class_names:
        pairs = itertools.zip_longest(known, class_names, fillvalue="none")
        number, (theirs, ours) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        raise UsageError(
            f"{weights} was trained on other classes: class {number} is {theirs!r} in the weights and {ours!r} in the "
            "data set. Use the data set that it was trained on, or fine-tune from it with checkpoint=PATH, which "
            "reinitializes the classifier head",
            code="weights.classes",
            number=number,
            names=(theirs, ours),
        )
    if prepared is not None and preprocessing is not None:
        before = {name: prepared.get(name) for name in preprocessing}
        for difference in differences(before, preprocessing, prefix="data."):
            log.warning("%s was trained on images prepared differently: %s", weights, difference)


def warn_of_timm_class_order(weights: str | Path, outputs: int, class_names: list[str] | None) -> None:
    """Warn if weights that are not from a run here may have these classes in timm's order instead of ours.

    outputs: the weights' number of classes; there is no warning if the data set has another number.
    """
    class_names = class_names or []
    in_order = sorted(class_names, key=natural_key)
    if outputs == len(in_order) and in_order != class_names:
        pairs = zip(in_order, class_names, strict=True)
        number = next(i for i, pair in enumerate(pairs) if pair[0] != pair[1])
        log.warning(
            "if timm trained %s on these folders, class %d is %r there and %r here: timm sorts 2 before 10, and a next "
            "to A. Folder names of one case with leading zeros (02, 10) sort alike in both",
            *(weights, number, in_order[number], class_names[number]),
        )
