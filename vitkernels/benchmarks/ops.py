"""Each op that `auto` chooses a backend for, forward and backward, at the sizes that a model has.

Shape suffixes: B images, N tokens of an image, C channels.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vitkernels import ops
from vitkernels.benchmarks.attention import Timing
from vitkernels.ops.layer_norm_residual import BACKENDS as LAYER_NORM_RESIDUAL
from vitkernels.ops.linear import BACKENDS as LINEAR
from vitkernels.ops.linear_gelu import BACKENDS as LINEAR_GELU
from vitkernels.ops.mlp import BACKENDS as MLP
from vitkernels.ops.patch_embed import BACKENDS as PATCH_EMBED

TABLES = {
    "layer_norm_residual": LAYER_NORM_RESIDUAL,
    "linear": LINEAR,
    "linear_gelu": LINEAR_GELU,
    "mlp": MLP,
    "patch_embed": PATCH_EMBED,
}
WRONG = 0.03  # relative: 16-bit kernels differ by less than 0.01 from each other


@dataclass(frozen=True)
class Sizes:
    """What decides over the ops of a vision transformer."""

    images: int
    tokens: int
    width: int
    hidden: int
    image_size: int
    patch: int
    device: str = "cuda"


@dataclass(frozen=True)
class Case:
    """One op on tensors of one size. call(backend) gives its results; leaves are what gradients are taken for."""

    op: str
    features: tuple[int, ...]
    rows: int
    call: Callable[[str], tuple[Tensor, ...]]
    leaves: tuple[Tensor, ...]

    def both(self, backend: str) -> tuple[Tensor, ...]:
        """Results and gradients; the results' gradients are the results themselves, which are random enough."""
        results = self.call(backend)
        values = [x.detach() for x in results]
        # Values only: a graph that lived on would tie the leaves to this stream, and captures run on another.
        return *values, *torch.autograd.grad(results, self.leaves, values)


def cases(sizes: Sizes, dtype: torch.dtype) -> list[Callable[[], Case]]:
    """A case for each op, made when called: each takes much of a GPU's memory. Random inputs."""
    qkv, keeping = partial(_linear, times=3), partial(_mlp, keep=True)
    makers = (_layer_norm_residual, _linear, qkv, _linear_gelu, _mlp, keeping, _patch_embed)
    return [partial(make, sizes, dtype) for make in makers]


def _drawing(device: str) -> Callable[..., Tensor]:
    def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device) * scale).to(dtype).requires_grad_()

    return draw


def _layer_norm_residual(sizes: Sizes, dtype: torch.dtype) -> Case:
    draw = _drawing(sizes.device)
    C = sizes.width
    x, branch = draw(sizes.images, sizes.tokens, C), draw(sizes.images, sizes.tokens, C, dtype=dtype)
    weight, bias, branch_bias = draw(C), draw(C), draw(C)

    def call(backend: str) -> tuple[Tensor, ...]:
        with torch.autocast(sizes.device, dtype):
            return ops.layer_norm_residual(x, branch, weight, bias, branch_bias_C=branch_bias, backend=backend)

    leaves = x, branch, weight, bias, branch_bias
    return Case("layer_norm_residual", (C,), sizes.images * sizes.tokens, call, leaves)


def _linear(sizes: Sizes, dtype: torch.dtype, times: int = 1) -> Case:
    """A projection to so many times the width."""
    draw = _drawing(sizes.device)
    C, N = sizes.width, times * sizes.width
    leaves = draw(sizes.images, sizes.tokens, C, dtype=dtype), draw(N, C, scale=C**-0.5), draw(N)

    def call(backend: str) -> tuple[Tensor, ...]:
        with torch.autocast(sizes.device, dtype):
            return (ops.linear(*leaves, backend=backend),)

    return Case("linear", (C, N), sizes.images * sizes.tokens, call, leaves)


def _linear_gelu(sizes: Sizes, dtype: torch.dtype) -> Case:
    draw = _drawing(sizes.device)
    K, N = sizes.width, sizes.hidden
    leaves = draw(sizes.images, sizes.tokens, K, dtype=dtype), draw(N, K, dtype=dtype, scale=K**-0.5), draw(N)
    call = lambda backend: (ops.linear_gelu(*leaves, backend=backend),)  # noqa: E731
    return Case("linear_gelu", (K, N), sizes.images * sizes.tokens, call, leaves)


def _mlp(sizes: Sizes, dtype: torch.dtype, keep: bool = False) -> Case:
    draw = _drawing(sizes.device)
    K, N = sizes.width, sizes.hidden
    first = draw(sizes.images, sizes.tokens, K, dtype=dtype), draw(N, K, scale=K**-0.5), draw(N)
    leaves = *first, draw(K, N, scale=N**-0.5)

    def call(backend: str) -> tuple[Tensor, ...]:
        with torch.autocast(sizes.device, dtype):
            return (ops.mlp(*leaves, keep_activation=keep, backend=backend),)

    return Case("mlp", (K, N, K, int(keep)), sizes.images * sizes.tokens, call, leaves)


def _patch_embed(sizes: Sizes, dtype: torch.dtype) -> Case:
    draw = _drawing(sizes.device)
    P, C = sizes.patch, sizes.width
    images = torch.randn(sizes.images, 3, sizes.image_size, sizes.image_size, device=sizes.device)
    leaves = draw(C, 3, P, P, scale=(3 * P * P) ** -0.5), draw(C)

    def call(backend: str) -> tuple[Tensor, ...]:
        with torch.autocast(sizes.device, dtype):
            return (ops.patch_embed(images, *leaves, backend=backend),)

    return Case("patch_embed", (3, P, P, C), sizes.images * sizes.tokens, call, leaves)


def measure(case: Case) -> dict[str, float | str]:
    """Backend -> milliseconds of forward and backward on the device; or why it has none.

    The backends take turns, five times, and the median counts: a GPU gets slower as it gets warm, and whoever came
    first would look faster.
    """
    exact = case.both("reference")
    refusals = {name: _refusal(case, name, exact) for name in TABLES[case.op].names()}
    del exact
    times = {name: [] for name, refusal in refusals.items() if refusal is None}
    for _ in range(5):
        for name, found in times.items():
            found.append(Timing.on_device(lambda name=name: case.both(name), milliseconds=40).median)
    return refusals | {name: statistics.median(found) for name, found in times.items()}


def _refusal(case: Case, name: str, exact: tuple[Tensor, ...]) -> str | None:
    """Why the backend cannot be timed: it refuses these sizes or this device, or it is wrong."""
    try:
        worst = max(_difference(x, y) for x, y in zip(case.both(name), exact, strict=True))
    except ValueError as error:
        return str(error)
    return None if worst < WRONG else f"wrong: differs from the reference by {worst:.1e}"


def _difference(x: Tensor, y: Tensor) -> float:
    return ((x.float() - y.float()).norm() / y.float().norm()).item()
