"""Time quantized linear layers against bfloat16."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from vitkernels.benchmarks.timing import Timing
from vitkernels.quant import QuantizedLinear

SIZES = ((1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024))  # in, out features of ViT-L: qkv, proj, fc1, fc2
SCHEMES = ("w8a8", "w8a8_fp8", "w8a16", "w4a16", "w4a8", "w8a8_block128", "w4a16_block128", "w4a8_block128")


@torch.no_grad()
def linear_times(
    size: tuple[int, int], tokens: int, schemes: Sequence[str], timing: Callable[..., Timing]
) -> dict[str, Timing]:
    """Return the time of a layer's forward pass on random bfloat16 tokens, by scheme.

    bfloat16 is measured first and last, to show the noise. `size` is (in, out) features.
    """
    linear = nn.Linear(*size, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(tokens, size[0], device="cuda", dtype=torch.bfloat16)
    times = {"bf16": timing(lambda: linear(x))}
    for scheme in schemes:
        quantized = QuantizedLinear.of(linear, scheme)
        times[scheme] = timing(lambda layer=quantized: layer(x))
    return times | {"bf16 again": timing(lambda: linear(x))}
