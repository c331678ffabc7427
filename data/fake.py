"""Random images that never limit the input: `data=fake`."""

from vitkernels.data.fake import build

__all__ = ["build"]
