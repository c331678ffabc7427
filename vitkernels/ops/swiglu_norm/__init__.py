"""SwiGLU and the LayerNorm that follows it, in one pass: what a gated MLP does between its two products.

Shape suffixes: F hidden features, G = 2 F (gates and values); "..." any leading dimensions (images, tokens).
"""

from torch import Tensor

from vitkernels.autocast import dtype_of
from vitkernels.errors import UsageError
from vitkernels.ops.checks import check_floating, check_same_device
from vitkernels.registry.op import Op

BACKENDS = Op.in_folder(__name__, ("reference", "triton"), auto={"cuda": ("triton",)})


def swiglu_norm(
    x: Tensor,
    weight_F: Tensor | None = None,
    bias_F: Tensor | None = None,
    eps: float = 1e-6,
    *,
    linear_bias_G: Tensor | None = None,
    gate_last: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Return LayerNorm(silu(gate) · value) of the halves of x + linear_bias: (..., G) -> (..., F).

    Args:
        x: the output of a gated MLP's first product (Shazeer 2020, arXiv 2002.05202), preferably without its bias.
        weight_F, bias_F, eps: LayerNorm's (Ba, Kiros and Hinton 2016, arXiv 1607.06450). None: no norm.
        linear_bias_G: the bias of the first product. If the op adds it, its gradient needs no extra pass.
        gate_last: whether the second half holds the gates, and not the first.
        backend: "auto" or a name from BACKENDS.names().

    Returns:
        (..., F) in autocast's dtype if autocast is on, else in x's. Arithmetic is float32 (float64 for float64 input in
        the reference).

    Raises:
        UsageError (a ValueError): invalid shapes, dtypes or devices, or a named backend that cannot take the call.
    """
    _check(x, weight_F, bias_F, linear_bias_G)
    args = x, weight_F, bias_F, eps, linear_bias_G, gate_last, dtype_of(x)
    return BACKENDS.pick(backend, x.device, *args).run(*args)


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None, linear_bias: Tensor | None) -> None:
    check_floating("swiglu_norm", "x", x)
    if x.ndim < 2 or x.shape[-1] == 0 or x.shape[-1] % 2:
        raise UsageError(
            f"x must have shape (..., features), half of them gates and half values, got {tuple(x.shape)}",
            code="ops.swiglu_norm.shape", argument="x", shape=tuple(x.shape),
        )  # fmt: skip
    if (weight is None) != (bias is None):
        raise UsageError(
            "the norm needs weight and bias; pass both, or neither for no norm",
            code="ops.swiglu_norm.half_a_norm",
        )
    G = x.shape[-1]
    optional = {"weight": (weight, G // 2), "bias": (bias, G // 2), "linear_bias": (linear_bias, G)}
    for name, (tensor, size) in optional.items():
        if tensor is not None:
            check_floating("swiglu_norm", name, tensor, (size,))
    check_same_device("swiglu_norm", "x", x, **{name: tensor for name, (tensor, _) in optional.items()})
