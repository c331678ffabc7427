"""The library's matrix product, then bias and GELU, or their gradients, in one pass of a Triton kernel."""

from torch import Tensor

from vitkernels.ops.linear_gelu.operators import FLOATS, linear_gelu


def unsupported(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> str | None:
    if x.device.type not in ("cuda", "cpu"):
        return f"Triton runs on NVIDIA GPUs, and interpreted on CPUs; x is on {x.device}"
    if x.dtype not in FLOATS:
        return f"it calculates in float32; {x.dtype} would lose digits. Use backend='reference'"
    return None


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> Tensor:
    return linear_gelu(x, weight_NK, bias_N, tanh, False, "passes")[0]
