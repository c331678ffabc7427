"""scikit-learn's handwritten digits: `data=digits`."""

from vitkernels.data.digits import build

__all__ = ["build"]
