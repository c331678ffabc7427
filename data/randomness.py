"""Deprecated, for one release: import from vitkernels.data.randomness."""

import warnings

from vitkernels.data.randomness import Stream, generator, seeded_globals

__all__ = ["Stream", "generator", "seeded_globals"]

warnings.warn("data.randomness moved: import from vitkernels.data.randomness", DeprecationWarning, stacklevel=2)
