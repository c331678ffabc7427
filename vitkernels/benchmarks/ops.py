"""Time every op for which `auto` chooses a backend, forward and backward, at the sizes of a model.

Shape suffixes: B images, N tokens of an image, C channels.
"""

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vitkernels import ops
from vitkernels.benchmarks.timing import Timing
from vitkernels.ops.layer_norm_residual import BACKENDS as LAYER_NORM_RESIDUAL
from vitkernels.ops.linear import BACKENDS as LINEAR
from vitkernels.ops.linear_gelu import BACKENDS as LINEAR_GELU
from vitkernels.ops.mlp import BACKENDS as MLP
from vitkernels.ops.patch_embed import BACKENDS as PATCH_EMBED

OPS = {
    "layer_norm_residual": LAYER_NORM_RESIDUAL,
    "linear": LINEAR,
    "linear_gelu": LINEAR_GELU,
    "mlp": MLP,
    "patch_embed": PATCH_EMBED,
}
MAX_ERROR = 0.03  # relative; correct 16-bit kernels differ by less than 0.01


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a vision transformer that its ops depend on."""

    images: int
    tokens: int
    width: int
    hidden: int
    image_size: int
    patch: int
    device: str = "cuda"


@dataclass(frozen=True)
class OpCase:
    """One op on tensors of one size: `call(backend)` returns its results, and gradients are taken of `leaves`."""

    op: str
    features: tuple[int, ...]
    rows: int
    call: Callable[[str], tuple[Tensor, ...]]
    leaves: tuple[Tensor, ...]

    def both(self, backend: str) -> tuple[Tensor, ...]:
        """Return results and gradients; the incoming gradients are the results themselves, which are random enough."""
        results = self.call(backend)
        values = [x.detach() for x in results]
        # Detached, because a live graph would tie the leaves to this stream, and graph capture runs on another.
        return *values, *torch.autograd.grad(results, self.leaves, values)


def cases(sizes: ModelSizes, dtype: torch.dtype) -> list[Callable[[], OpCase]]:
    """Return a function per op that creates its case with random inputs; each case uses much GPU memory."""
    qkv, keeping = partial(_linear, times=3), partial(_mlp, keep=True)
    makers = (_layer_norm_residual, _linear, qkv, _linear_gelu, _mlp, keeping, _patch_embed)
    return [partial(make, sizes, dtype) for make in makers]


def _drawing(device: str) -> Callable[..., Tensor]:
    def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device) * scale).to(dtype).requires_grad_()

    return draw


def _layer_norm_residual(sizes: ModelSizes, dtype: torch.dtype) -> OpCase:
    draw = _drawing(sizes.device)
    C = sizes.width
    x, branch = draw(sizes.images, sizes.tokens, C), draw(sizes.images, sizes.tokens, C, dtype=dtype)
    weight, bias, branch_bias = draw(C), draw(C), draw(C)

    def call(backend: str) -> tuple[Tensor, ...]:
        with torch.autocast(sizes.device, dtype):
            return ops.layer_norm_residual(x, branch, weight, bias, branch_bias_C=branch_bias, backend=backend)

    leaves = x, branch, weight, bias, branch_bias
    return OpCase("layer_norm_residual", (C,), sizes.images * sizes.tokens, call, leaves)


def _linear(sizes: ModelSizes, dtype: torch.dtype, times: int = 1) -> OpCase:
    """Return a projection to `times` × the width."""
    draw = _drawing(sizes.device)
    C, N = sizes.width, times * sizes.width
    leaves = draw(sizes.images, sizes.tokens, C, dtype=dtype), draw(N, C, scale=C**-0.5), draw(N)

    def call(backend: str) -> tuple[Tensor, ...]:
        with torch.autocast(sizes.device, dtype):
            return (ops.linear(*leaves, backend=backend),)

    return OpCase("linear", (C, N), sizes.images * sizes.tokens, call, leaves)


def _linear_gelu(sizes: ModelSizes, dtype: torch.dtype) -> OpCase:
    draw = _drawing(sizes.device)
    K, N = sizes.width, sizes.hidden
    leaves = draw(sizes.images, sizes.tokens, K, dtype=dtype), draw(N, K, dtype=dtype, scale=K**-0.5), draw(N)
    call = lambda backend: (ops.linear_gelu(*leaves, backend=backend),)  # noqa: E731
    return OpCase("linear_gelu", (K, N), sizes.images * sizes.tokens, call, leaves)


def _mlp(sizes: ModelSizes, dtype: torch.dtype, keep: bool = False) -> OpCase:
    draw = _drawing(sizes.device)
    K, N = sizes.width, sizes.hidden
    first = draw(sizes.images, sizes.tokens, K, dtype=dtype), draw(N, K, scale=K**-0.5), draw(N)
    leaves = *first, draw(K, N, scale=N**-0.5)

    def call(backend: str) -> tuple[Tensor, ...]:
        with torch.autocast(sizes.device, dtype):
            return (ops.mlp(*leaves, keep_activation=keep, backend=backend),)

    return OpCase("mlp", (K, N, K, int(keep)), sizes.images * sizes.tokens, call, leaves)


def _patch_embed(sizes: ModelSizes, dtype: torch.dtype) -> OpCase:
    draw = _drawing(sizes.device)
    P, C = sizes.patch, sizes.width
    images = torch.randn(sizes.images, 3, sizes.image_size, sizes.image_size, device=sizes.device)
    leaves = draw(C, 3, P, P, scale=(3 * P * P) ** -0.5), draw(C)

    def call(backend: str) -> tuple[Tensor, ...]:
        with torch.autocast(sizes.device, dtype):
            return (ops.patch_embed(images, *leaves, backend=backend),)

    return OpCase("patch_embed", (3, P, P, C), sizes.images * sizes.tokens, call, leaves)


def measure(case: OpCase) -> dict[str, float | str]:
    """Return, by backend, the milliseconds of forward and backward on the device, or why it cannot be timed.

    The backends alternate for five rounds, and the result is the median: a GPU slows down as it warms up, which would
    favor the backend measured first.
    """
    exact = case.both("reference")
    refusals = {name: _refusal(case, name, exact) for name in OPS[case.op].names()}
    del exact
    times: dict[str, list[float]] = {name: [] for name, refusal in refusals.items() if refusal is None}
    for _ in range(5):
        for name, found in times.items():
            found.append(Timing.on_device(functools.partial(case.both, name), milliseconds=40).median)
    refused = {name: refusal for name, refusal in refusals.items() if refusal is not None}
    return refused | {name: statistics.median(found) for name, found in times.items()}


def _refusal(case: OpCase, name: str, exact: tuple[Tensor, ...]) -> str | None:
    """Return why the backend cannot be timed: it fails, for these sizes or on this device, or its results are wrong."""
    try:
        worst = max(_difference(x, y) for x, y in zip(case.both(name), exact, strict=True))
    except ValueError as error:
        return str(error)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a compiler or of another package's backend; the other backends are still timed
        first_line, *_ = str(error).split("\n")
        return f"{type(error).__name__}: {first_line}"
    return None if worst < MAX_ERROR else f"wrong: differs from the reference by {worst:.1e}"


def _difference(x: Tensor, y: Tensor) -> float:
    return ((x.float() - y.float()).norm() / y.float().norm()).item()
