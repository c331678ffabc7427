"""A linear layer and its GELU: the first half of a transformer's MLP. The whole MLP is `vitkernels.ops.mlp`.

Shape suffixes: K input features, N output features; "..." any dimensions before them (images, tokens).
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
    """gelu(x weightᵀ + bias): (..., K) -> (..., N).

    Args:
        x: floating, (..., K).
        weight_NK, bias_N: as in nn.Linear(K, N). The bias may have another dtype; its gradient has that too.
        approximate: "none", the exact x Φ(x), or "tanh" (Hendrycks and Gimpel 2016, arXiv 1606.08415).
        backend: "auto" or a name. passes: the library's product, then one pass; triton: GELU in the epilogue of a
            product of its own; pallas_hopper: that too, behind the tensor cores' work, on NVIDIA Hopper.

    Returns:
        (..., N) in autocast's dtype where autocast is on, else in x's. GELU is calculated in float32 from the product
        rounded to that dtype, as F.gelu(F.linear(...)) does (pallas_hopper: from the product before it is rounded).

    Raises:
        UsageError (a ValueError): shapes, dtypes or `approximate` that do not fit, or a named backend that cannot take
            the call.
    """
    check_gelu(approximate)
    check_linear(x, weight_NK, bias_N)
    x, weight_NK = cast(x, weight_NK)
    args = x, weight_NK, bias_N, approximate == "tanh"
    return BACKENDS.pick(backend, x.device, *args).run(*args)


def check_gelu(approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise UsageError(f"approximate must be 'none' (exact) or 'tanh', got {approximate!r}")
