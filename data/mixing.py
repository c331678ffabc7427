"""Deprecated, for one release: import from vitkernels.data.mixing."""

import warnings

from vitkernels.data.mixing import Mixing, build_mixing

__all__ = ["Mixing", "build_mixing"]

warnings.warn("data.mixing moved: import from vitkernels.data.mixing", DeprecationWarning, stacklevel=2)
