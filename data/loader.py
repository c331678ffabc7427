"""Deprecated, for one release: custom data sets now import these names from vitkernels.data."""

import warnings

from vitkernels.data import IGNORE, BadImagesError, Batch, Data, DatasetLoader, Loader, Samples, Shard, WorkerDiedError
from vitkernels.data import UNSHARDED as WHOLE
from vitkernels.data import SampleProblem as Problem

__all__ = [
    "IGNORE",
    "WHOLE",
    "BadImagesError",
    "Batch",
    "Data",
    "DatasetLoader",
    "Loader",
    "Problem",
    "Samples",
    "Shard",
    "WorkerDiedError",
]

warnings.warn("data.loader moved: import these names from vitkernels.data", DeprecationWarning, stacklevel=2)
