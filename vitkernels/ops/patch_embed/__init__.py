"""Embed image patches: non-overlapping patches through one linear layer, the first layer of a vision transformer.

Shape suffixes: B images, C channels, H and W pixels, P patches of an image, E embedding; h and w pixels of a patch.
"""

from torch import Tensor

from vitkernels.autocast import dtype_of
from vitkernels.errors import UsageError
from vitkernels.ops.checks import check_floating, check_same_device
from vitkernels.registry.op import Op

BACKENDS = Op.in_folder(
    __name__,
    ("reference", "triton", "xla"),
    auto={"cuda": ("triton",), "tpu": ("xla",)},
    features=lambda images, weight, bias, dtype: ((*weight.shape[1:], weight.shape[0]), dtype),
)


def patch_embed(
    images_BCHW: Tensor, weight_EChw: Tensor, bias_E: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """Return the tokens (B, P, E) of a convolution whose stride equals its kernel size, patches in row-major order.

    Args:
        images_BCHW: floating point, with any strides. Pixels are rounded to the result's dtype as they are read.
        weight_EChw, bias_E: the parameters of nn.Conv2d(C, E, kernel_size=(h, w), stride=(h, w)).
        backend: "auto" or a name from BACKENDS.names().

    Returns:
        (B, P, E) in autocast's dtype if autocast is on, else in the weight's.

    Raises:
        UsageError (a ValueError): invalid shapes, dtypes or devices, images that do not divide into patches, or a named
            backend that cannot take the call.

    Source: Dosovitskiy et al. 2020, An Image is Worth 16x16 Words (arXiv 2010.11929).
    """
    _check(images_BCHW, weight_EChw, bias_E)
    args = images_BCHW, weight_EChw, bias_E, dtype_of(weight_EChw)
    return BACKENDS.pick(backend, images_BCHW.device, *args).run(*args)


def _check(images: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_floating("patch_embed", "images", images)
    check_floating("patch_embed", "weight", weight)
    if images.ndim != 4 or weight.ndim != 4 or images.shape[1] != weight.shape[1]:
        raise UsageError(
            "images (batch, channels, height, width) and weight (embedding, channels, patch height, patch width) must "
            f"have the same number of channels; got {tuple(images.shape)} and {tuple(weight.shape)}",
            code="ops.patch_embed.shape", argument="images", shape=tuple(images.shape), weight=tuple(weight.shape),
        )  # fmt: skip
    sizes = zip(images.shape[2:], weight.shape[2:], strict=True)
    if any(pixels == 0 or patch == 0 or pixels % patch for pixels, patch in sizes):
        raise UsageError(
            f"images of {images.shape[2]} x {images.shape[3]} pixels do not divide into patches of "
            f"{weight.shape[2]} x {weight.shape[3]}; resize or pad the images, and use patches of at least 1 x 1",
            code="ops.patch_embed.patch_size", image=tuple(images.shape[2:]), patch=tuple(weight.shape[2:]),
        )  # fmt: skip
    if bias is not None:
        check_floating("patch_embed", "bias", bias, tuple(weight.shape[:1]))
    check_same_device("patch_embed", "images", images, weight=weight, bias=bias)
