"""Class folders of images: `data=imagefolder`."""

from vitkernels.data.imagefolder import build

__all__ = ["build"]
