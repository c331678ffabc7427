"""Unfold images into patches: one pass that reads pixels with any strides and writes contiguous rows.

Shape suffixes: B images, C channels, H and W pixels, P patches (B * grid rows * grid columns), K = C * patch pixels.
"""

import triton
import triton.language as tl


@triton.jit
def unfold_kernel(
    images_BCHW, patches_PK, stride_b, stride_c, stride_h, stride_w, channels, grid_rows, grid_columns,
    PATCH_H: tl.constexpr, PATCH_W: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy WIDTH pixels of one channel of a row of patches; pixels of a patch are ordered (channel, y, x)."""
    program = tl.program_id(0)
    c = program % channels
    strip = program // channels  # (image, grid row)
    b, grid_row = strip // grid_rows, strip % grid_rows
    x = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    y = tl.arange(0, ROWS)
    inside = (y < PATCH_H)[:, None] & (x < grid_columns * PATCH_W)[None, :]
    start = images_BCHW + b.to(tl.int64) * stride_b + c * stride_c + grid_row * PATCH_H * stride_h
    pixels = tl.load(start + y[:, None] * stride_h + x[None, :] * stride_w, mask=inside)
    patch = strip.to(tl.int64) * grid_columns + x // PATCH_W
    at = patch[None, :] * (channels * PATCH_H * PATCH_W) + c * PATCH_H * PATCH_W + y[:, None] * PATCH_W
    tl.store(patches_PK + at + (x % PATCH_W)[None, :], pixels.to(patches_PK.dtype.element_ty), mask=inside)
