"""The seam between two transformer sublayers in one pass: residual add, LayerScale, drop path, LayerNorm.

Shape suffixes: B images, C channels; "..." any dimensions between them (tokens).
"""

from torch import Tensor

from vitkernels.autocast import dtype_of
from vitkernels.errors import UsageError
from vitkernels.registry.op import Op

BACKENDS = Op.in_folder(
    __name__,
    ("reference", "triton"),
    auto={"cuda": ("triton",)},
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
    """sum = x + sample_scale · layer_scale · (branch + branch_bias), normed = LayerNorm(sum); returns (sum, normed).

    Args:
        x: (B, ..., C), the residual stream.
        branch: as x, in any floating dtype: what attention or MLP gave, best without their last bias; None: nothing is
            added, and sum is x.
        weight_C, bias_C, eps: LayerNorm's (Ba, Kiros and Hinton 2016, arXiv 1607.06450).
        branch_bias_C: the last linear layer's bias, added here so that its gradient costs no pass of its own.
        layer_scale_C: LayerScale's gamma (Touvron et al. 2021, arXiv 2103.17239).
        sample_scale_B: what drop path multiplies each image's branch with: 0 or 1 / keep probability
            (Huang et al. 2016, arXiv 1603.09382). No gradient flows into it.
        backend: "auto" or a name.

    Returns:
        sum in x's dtype; normed in autocast's dtype where autocast is on (the linear layer that follows rounds to it
        anyway), else in x's. Arithmetic is float32 (float64 for float64 input in the reference).

    Raises:
        UsageError (a ValueError): shapes or dtypes that do not fit, or a named backend that cannot take the call.
    """
    _check(x, branch, weight_C, bias_C, branch_bias_C, layer_scale_C, sample_scale_B)
    out_dtype = dtype_of(x)
    args = x, branch, weight_C, bias_C, eps, branch_bias_C, layer_scale_C, sample_scale_B, out_dtype
    return BACKENDS.pick(backend, x.device, *args).run(*args)


def _check(x, branch, weight, bias, branch_bias, layer_scale, sample_scale) -> None:
    B, C = (x.shape[0], x.shape[-1]) if x.ndim > 1 else (0, 0)
    if C == 0 or not x.dtype.is_floating_point:
        raise UsageError(
            f"x must be floating, of shape (batch, ..., channels), one channel at least; got {x.dtype} {tuple(x.shape)}"
        )
    if branch is None and not (branch_bias is layer_scale is sample_scale is None):
        raise UsageError("branch_bias, layer_scale and sample_scale act on a branch, and branch is None")
    expected = {"branch": x.shape, "sample_scale": (B,)}
    given = {
        "branch": branch, "weight": weight, "bias": bias, "branch_bias": branch_bias,
        "layer_scale": layer_scale, "sample_scale": sample_scale,
    }  # fmt: skip
    for name, tensor in given.items():
        if tensor is None:
            continue
        shape = tuple(expected.get(name, (C,)))
        if tuple(tensor.shape) != shape or not tensor.dtype.is_floating_point:
            raise UsageError(
                f"{name} must be floating, of shape {shape} beside x {tuple(x.shape)}; "
                f"got {tensor.dtype} {tuple(tensor.shape)}"
            )
        if tensor.device != x.device:
            raise UsageError(f"{name} is on {tensor.device}, x on {x.device}; move them to one device")
