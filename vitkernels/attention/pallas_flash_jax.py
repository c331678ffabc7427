"""pallas_flash as JAX functions of arrays: which kernel a problem gets, forward and backward."""

import jax.numpy as jnp

from vitkernels.attention import pallas_flash_long, pallas_flash_short
from vitkernels.attention.pallas_flash_parts import LANES, Problem


def _describe(arrays, extras, heads: int, scale: float, is_causal: bool) -> Problem:
    q, k = arrays[0], arrays[-1]
    width = q.shape[2] // 3 if len(arrays) == 1 else q.shape[2]
    return Problem(
        batch=q.shape[0],
        heads=heads,
        head_dim=width // heads,
        q_tokens=q.shape[1],
        kv_tokens=k.shape[1],
        scale=scale,
        is_causal=is_causal,
        dtype=q.dtype.name,
        bias=tuple(extras["bias"].shape) if "bias" in extras else None,
        mask=tuple(extras["mask"].shape) if "mask" in extras else None,
        segments="segment_ids" in extras,
    )


def _split(arrays: tuple, extras: tuple[str, ...], heads: int):
    """(q, k, v or packed), and the extras by name. Thirds that do not begin at a lane tile are taken apart."""
    n = len(arrays) - len(extras)
    main, named = arrays[:n], dict(zip(extras, arrays[n:], strict=True))
    if len(main) == 1 and (main[0].shape[2] // 3) % LANES:
        main = tuple(jnp.split(main[0], 3, axis=2))
    return main, named


def attend(*arrays, heads: int, scale: float, is_causal: bool, extras: tuple[str, ...], bias_gradient: bool):
    """Attention on token-major arrays: qkv (B, N, 3E), or q (B, N, E), k and v (B, M, E), then `extras` by name.

    bias: (B or 1, H or 1, N or 1, M or 1); mask: the same, boolean; segment_ids: int32 (B, N).
    Returns (B, N, E); from the online form also the log-sum-exps that its backward pass needs.
    """
    main, named = _split(arrays, extras, heads)
    problem = _describe(main, named, heads, scale, is_causal)
    kernels = pallas_flash_short if pallas_flash_short.takes(problem) else pallas_flash_long
    return kernels.forward(problem, main, named.get("bias"), named.get("mask"), named.get("segment_ids"))


def attend_vjp(primals, outputs, cotangents, *, heads, scale, is_causal, extras, bias_gradient):
    """Gradients of `attend` for each of its arrays; None for those that have none."""
    main, named = _split(primals, extras, heads)
    problem = _describe(main, named, heads, scale, is_causal)
    extra_arrays = (named.get("bias"), named.get("mask"), named.get("segment_ids"), bias_gradient)
    if pallas_flash_short.takes(problem):
        gradients, dbias = pallas_flash_short.backward(problem, main, cotangents[0], *extra_arrays)
    else:
        gradients, dbias = pallas_flash_long.backward(problem, main, *outputs, cotangents[0], *extra_arrays)
    if len(main) == 3 and len(primals) - len(extras) == 1:
        gradients = [jnp.concatenate(gradients, axis=2)]
    found = {"bias": None if dbias is None else dbias.astype(named["bias"].dtype)}
    return (*gradients, *[found.get(name) for name in extras])
