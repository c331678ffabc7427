"""Join two transformer sublayers in one pass: residual add, LayerScale, drop path and LayerNorm.

Shape suffixes: B images, C channels; "..." any dimensions between them (tokens).
"""

from torch import Tensor

from vitkernels.autocast import dtype_of
from vitkernels.errors import UsageError
from vitkernels.ops.checks import check_floating, check_same_device
from vitkernels.registry.op import Op

BACKENDS = Op.in_folder(
    __name__,
    ("reference", "triton", "pallas_tpu"),
    auto={"cuda": ("triton",), "tpu": ("pallas_tpu",)},
    features=lambda x, branch, weight, *others: (tuple(weight.shape), others[-1]),
)


def layer_norm_residual(
    x: Tensor,
    branch: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor,
    eps: float = 1e-6,
    *,
    branch_bias_C: Tensor | None = None,
    layer_scale_C: Tensor | None = None,
    sample_scale_B: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return sum = x + sample_scale · layer_scale · (branch + branch_bias) and LayerNorm(sum).

    Args:
        x: (B, ..., C), the residual stream.
        branch: the output of attention or the MLP, same shape as x, in any floating-point dtype, preferably without
            the bias of its last layer. None: nothing is added, and sum is x.
        weight_C, bias_C, eps: LayerNorm's (Ba, Kiros and Hinton 2016, arXiv 1607.06450).
        branch_bias_C: the bias of the branch's last linear layer. Added here, its gradient needs no pass of its own.
        layer_scale_C: LayerScale's gamma (Touvron et al. 2021, arXiv 2103.17239).
        sample_scale_B: drop path's factor for each image's branch, 0 or 1 / keep probability (Huang et al. 2016,
            arXiv 1603.09382). It receives no gradient.
        backend: "auto" or a name from BACKENDS.names().

    Returns:
        sum in x's dtype, and the norm in autocast's dtype if autocast is on (the next linear layer rounds to it
        anyway), else in x's. Arithmetic is float32 (float64 for float64 input in the reference).

    Raises:
        UsageError (a ValueError): invalid shapes, dtypes or devices, or a named backend that cannot take the call.
    """
    check_norm(x, branch, weight_C, bias_C, branch_bias_C, layer_scale_C, sample_scale_B)
    out_dtype = dtype_of(x)
    args = x, branch, weight_C, bias_C, eps, branch_bias_C, layer_scale_C, sample_scale_B, out_dtype
    return BACKENDS.pick(backend, x.device, *args).run(*args)


def check_norm(x, branch, weight, bias, branch_bias, layer_scale, sample_scale) -> None:
    """Check the operands of a residual addition and its LayerNorm (codes begin with "ops.layer_norm_residual.")."""
    check_floating("layer_norm_residual", "x", x)
    if x.ndim < 2 or x.shape[-1] == 0:
        raise UsageError(
            f"x must have shape (batch, ..., channels) with at least one channel, got {tuple(x.shape)}",
            code="ops.layer_norm_residual.shape", argument="x", shape=tuple(x.shape),
        )  # fmt: skip
    if branch is None and not (branch_bias is layer_scale is sample_scale is None):
        raise UsageError(
            "branch_bias, layer_scale and sample_scale modify the branch, and branch is None",
            code="ops.layer_norm_residual.no_branch",
        )
    optional = {
        "branch": branch, "weight": weight, "bias": bias, "branch_bias": branch_bias,
        "layer_scale": layer_scale, "sample_scale": sample_scale,
    }  # fmt: skip
    shapes = {"branch": x.shape, "sample_scale": x.shape[:1]}
    for name, tensor in optional.items():
        if tensor is not None or name in ("weight", "bias"):
            check_floating("layer_norm_residual", name, tensor, tuple(shapes.get(name, x.shape[-1:])))
    check_same_device("layer_norm_residual", "x", x, **optional)
