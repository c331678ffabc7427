"""LayerNorm with the residual addition before it in one pass on TPUs, for JAX programs.

Shape suffixes: B images, C channels; "..." any dimensions between them (tokens).
"""

from typing import Any

import jax
import jax.numpy as jnp

from vitkernels.errors import UsageError
from vitkernels.jax.differentiable import differentiable
from vitkernels.ops.layer_norm_residual import pallas_tpu_kernel as kernel

_DTYPES = ("bfloat16", "float32")


def layer_norm_residual(
    x: jax.Array,
    branch: jax.Array | None,
    weight_C: jax.Array,
    bias_C: jax.Array,
    eps: float = 1e-6,
    *,
    branch_bias_C: jax.Array | None = None,
    layer_scale_C: jax.Array | None = None,
    sample_scale_B: jax.Array | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return sum = x + sample_scale · layer_scale · (branch + branch_bias) and LayerNorm(sum).

    Args:
        x: (B, ..., C), the residual stream, float32 or bfloat16.
        branch: the output of attention or the MLP, of x's shape; None adds nothing, and sum is x.
        weight_C, bias_C, eps: LayerNorm's scale, bias and epsilon; flax.nnx.LayerNorm's defaults are the same.
        branch_bias_C: the bias of the branch's last linear layer, if the branch comes without it.
        layer_scale_C: LayerScale's factors. sample_scale_B: drop path's factor for each image, without a gradient.
        dtype: of LayerNorm(sum); x's by default. Arithmetic is float32.

    Raises UsageError (code jax.layer_norm_residual) for shapes that do not fit and for other dtypes.
    """
    given = {
        "x": x, "branch": branch, "gamma": weight_C, "beta": bias_C, "branch_bias": branch_bias_C,
        "layer_scale": layer_scale_C, "sample_scale": sample_scale_B,
    }  # fmt: skip
    named = {name: array for name, array in given.items() if array is not None}
    out = jnp.dtype(x.dtype if dtype is None else dtype).name
    _check(named, out)
    B, C = x.shape[0], x.shape[-1]
    shapes = {"x": (B, -1, C), "branch": (B, -1, C), "sample_scale": (B,)}
    arrays = [array.reshape(shapes.get(name, (1, 1, C))) for name, array in named.items()]
    found = _norm(*arrays, given=tuple(named), eps=float(eps), out=out)
    total, normed = found if branch is not None else (x, *found)
    return total.reshape(x.shape), normed.reshape(x.shape)


def _check(named: dict[str, jax.Array], out: str) -> None:
    x = named["x"]
    if x.ndim < 2 or not x.size:
        message = f"x must have shape (batch, ..., channels) and not be empty, got {x.shape}"
        raise UsageError(message, code="jax.layer_norm_residual", argument="x", shape=x.shape)
    if "branch" not in named and (extra := named.keys() & {"branch_bias", "layer_scale", "sample_scale"}):
        message = f"{', '.join(sorted(extra))} modify the branch, and branch is None"
        raise UsageError(message, code="jax.layer_norm_residual", argument=sorted(extra)[0])
    shapes = {"x": x.shape, "branch": x.shape, "sample_scale": x.shape[:1]}
    for name, array in named.items():
        expected = shapes.get(name, x.shape[-1:])
        if array.shape != expected:
            message = f"{name} must have shape {expected} for x {x.shape}, got {array.shape}"
            raise UsageError(message, code="jax.layer_norm_residual", argument=name, shape=array.shape)
    dtypes = {"dtype": out} | {name: array.dtype.name for name, array in named.items()}
    for name, found in dtypes.items():
        if found not in _DTYPES:
            message = f"{name} must be bfloat16 or float32, got {found}"
            raise UsageError(message, code="jax.layer_norm_residual", argument=name, dtype=found)


def _vjp(primals, outputs, cotangents, *, given: tuple[str, ...], eps: float, out: str):
    named = dict(zip(given, primals, strict=True))
    branch: Any = named.get("branch")
    total, dtotal, dnormed = named["x"], None, cotangents[-1]
    if branch is not None:
        total, dtotal = outputs[0], cotangents[0]
    scaled = "layer_scale" in named or "sample_scale" in named
    separate = branch is not None and (scaled or branch.dtype != total.dtype)  # else dbranch equals dx
    arrays = {
        "total": total,
        "gamma": named["gamma"],
        "branch": branch if "layer_scale" in named else None,
        **{name: named.get(name) for name in ("branch_bias", "layer_scale", "sample_scale")},
        "dtotal": dtotal,
        "dnormed": dnormed,
    }
    arrays = {name: array for name, array in arrays.items() if array is not None}
    branch_dtype = branch.dtype.name if separate else ""
    dx, *rest = kernel.norm_backward(*arrays.values(), given=tuple(arrays), eps=eps, branch_dtype=branch_dtype)
    found = {"x": dx, "branch": rest[0] if separate else dx}
    sums = iter(rest[-1].sum(0))
    for name in ("gamma", "beta", "branch_bias", "layer_scale"):
        if name in named:
            found[name] = next(sums)[None, None].astype(named[name].dtype)
    return [found.get(name) for name in given]


_norm = differentiable(kernel.norm_forward, _vjp)
