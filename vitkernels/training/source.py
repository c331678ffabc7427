"""Compare the class names and preprocessing of weights with those of the data set.

Evaluating or resuming with other classes is refused; other preprocessing is logged.
"""

import itertools
import logging
from pathlib import Path

from timm.utils import natural_key

from vitkernels.checkpoint.trained_on import TrainedOn
from vitkernels.errors import UsageError
from vitkernels.training.run_dir import differences

log = logging.getLogger(__name__)


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
            "the classes may be in another order: if timm trained %s on these folders, its class %d is %r, and not %r "
            "as here. timm sorts 2 before 10 and ignores case; names of one case with leading zeros (02, 10) sort the "
            "same",
            *(weights, number, in_order[number], class_names[number]),
        )
