"""Images to tokens: non-overlapping patches through one linear layer, as a vision transformer's first layer does.

Shape suffixes: B images, C channels, H and W pixels, P patches of an image, E embedding; h and w a patch's pixels.
"""

from torch import Tensor

from vitkernels.autocast import dtype_of
from vitkernels.errors import UsageError
from vitkernels.registry.op import Op

BACKENDS = Op.in_folder(
    __name__,
    ("reference", "triton"),
    auto={"cuda": ("triton",)},
    features=lambda images, weight, bias, dtype: ((*weight.shape[1:], weight.shape[0]), dtype),
)


def patch_embed(images_BCHW: Tensor, weight_EChw: Tensor, bias_E: Tensor | None = None, *, backend: str = "auto"):
    """The convolution whose stride is its kernel, as tokens: (B, C, H, W) -> (B, P, E), patches row by row.

    Args:
        images_BCHW: of any floating dtype and any strides; rounded to the result's dtype where it is read.
        weight_EChw, bias_E: as in nn.Conv2d(C, E, kernel_size=(h, w), stride=(h, w)).
        backend: "auto" or a name.

    Returns:
        (B, P, E) in autocast's dtype where autocast is on, else in the weight's.

    Raises:
        UsageError (a ValueError): shapes or dtypes that do not fit, images that do not divide into patches, or a named
            backend that cannot take the call.

    Source: Dosovitskiy et al. 2020, An Image is Worth 16x16 Words (arXiv 2010.11929).
    """
    _check(images_BCHW, weight_EChw, bias_E)
    device = images_BCHW.device
    args = images_BCHW, weight_EChw, bias_E, dtype_of(weight_EChw)
    return BACKENDS.pick(backend, device, *args).run(*args)


def _check(images: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if images.ndim != 4 or weight.ndim != 4 or images.shape[1] != weight.shape[1]:
        raise UsageError(
            "images (batch, channels, height, width) and weight (embedding, channels, patch height, patch width) must "
            f"agree in channels; got {tuple(images.shape)} and {tuple(weight.shape)}"
        )
    sizes = zip(images.shape[2:], weight.shape[2:], strict=True)
    if any(pixels == 0 or patch == 0 or pixels % patch for pixels, patch in sizes):
        raise UsageError(
            f"images of {images.shape[2]} x {images.shape[3]} pixels do not divide into patches of "
            f"{weight.shape[2]} x {weight.shape[3]}; resize or pad them, and give patches a pixel at least"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(
            f"bias must have shape ({weight.shape[0]},), one number for each output; got {tuple(bias.shape)}"
        )
    for name, tensor in (("images", images), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if not tensor.dtype.is_floating_point:
            raise UsageError(f"{name} must be floating, got {tensor.dtype}; scale pixels to floats first")
        if tensor.device != images.device:
            raise UsageError(f"{name} is on {tensor.device}, images on {images.device}; move them to one device")
