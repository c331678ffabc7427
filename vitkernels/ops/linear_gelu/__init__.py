"""A linear layer followed by GELU: the first half of a transformer's MLP. `vitkernels.ops.mlp` is the complete MLP.

Shape suffixes: K input features, N output features; "..." any leading dimensions (images, tokens).
"""

from torch import Tensor

from vitkernels.autocast import cast
from vitkernels.errors import UsageError
from vitkernels.ops.linear import check_linear
from vitkernels.registry.op import Op

BACKENDS = Op.in_folder(
    __name__,
    ("reference", "passes", "triton", "pallas_hopper", "pallas_tpu"),
    auto={"cuda": ("passes",), "tpu": ("pallas_tpu",)},
    features=lambda x, weight, bias, tanh: (tuple(weight.shape[::-1]), x.dtype),
)


def linear_gelu(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, approximate: str = "none", *, backend: str = "auto"
) -> Tensor:
    """Return gelu(x weightᵀ + bias): (..., K) -> (..., N).

    Args:
        x: floating point, (..., K).
        weight_NK, bias_N: the parameters of nn.Linear(K, N). The bias may have another dtype, and so has its gradient.
        approximate: "none", the exact x Φ(x), or "tanh" (Hendrycks and Gimpel 2016, arXiv 1606.08415).
        backend: "auto" or a name from BACKENDS.names(). They differ in where GELU is computed. passes: the library's
            matrix product, then an elementwise pass over the result. triton: in the epilogue of a Triton product.
            pallas_hopper: in the epilogue of a Mosaic-GPU product for NVIDIA Hopper, overlapped with the tensor cores.
            pallas_tpu: in the epilogue of a Pallas product for TPU.

    Returns:
        (..., N) in autocast's dtype if autocast is on, else in x's. GELU is computed in float32 from the product
        rounded to that dtype, as F.gelu(F.linear(...)) does (pallas_hopper: from the unrounded product).

    Raises:
        UsageError (a ValueError): invalid shapes, dtypes, devices or `approximate`, or a named backend that cannot take
            the call.
    """
    check_gelu(approximate)
    check_linear(x, weight_NK, bias_N)
    x, weight_NK = cast(x, weight_NK)
    args = x, weight_NK, bias_N, approximate == "tanh"
    return BACKENDS.pick(backend, x.device, *args).run(*args)


def check_gelu(approximate: str) -> None:
    """Raise UsageError for a GELU other than "none" and "tanh"."""
    if approximate not in ("none", "tanh"):
        raise UsageError(
            f"approximate must be 'none' (exact) or 'tanh', got {approximate!r}",
            code="ops.linear_gelu.approximate", approximate=approximate,
        )  # fmt: skip
