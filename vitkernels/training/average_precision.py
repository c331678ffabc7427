"""Mean average precision: how well the scores of each class rank the images that have it.

Shapes: B batch size, N images, K classes.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vitkernels.data.contract import PRESENT
from vitkernels.parallel import Parallel


def mean_average_precision(batches: Sequence[tuple[Tensor, Tensor]], parallel: Parallel) -> float:
    """Return the mean over classes of their average precision, in percent, over the images of all ranks.

    A label is present if its target is above 0.5. Average precision is scikit-learn's: the sum over ranks n of
    (recall(n) - recall(n - 1)) * precision(n), without interpolation. Classes that no image has are left out; NaN
    without any. All processes must call this.

    Args:
        batches: scores (B, K) and targets (B, K), 0 to 1, or negative throughout for a row without a sample.
    """
    from sklearn.metrics import average_precision_score

    own = tuple(np.concatenate([batch[i].float().cpu().numpy() for batch in batches]) for i in (0, 1))
    scores, targets = (np.concatenate(parts) for parts in zip(*parallel.shares(own), strict=True))
    rows = targets[:, 0] >= 0
    labels = targets[rows] > PRESENT
    classes = labels.any(0)
    if not classes.any():
        return float("nan")
    return 100 * float(average_precision_score(labels[:, classes], scores[rows][:, classes], average="macro"))
