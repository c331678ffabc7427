"""The format of 8-bit rows: value ≈ q · scale, symmetric, with the row's largest magnitude at LARGEST."""

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the value that a row's largest magnitude is scaled to
MIN_MAGNITUDE = 1e-30  # lower bound of a row's largest magnitude, so that its reciprocal stays finite
FEATURE_MULTIPLE = 16  # bytes: required of a row's length by 8-bit tensor cores


def padded(rows: int) -> int:
    """Return the row length of a transposed copy of so many rows; the elements beyond them are zeros."""
    return -(-rows // FEATURE_MULTIPLE) * FEATURE_MULTIPLE
