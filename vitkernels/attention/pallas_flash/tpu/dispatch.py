"""pallas_flash as JAX functions of arrays: dispatch a problem to its kernels, forward and backward."""

import jax.numpy as jnp

from vitkernels.attention.pallas_flash.tpu import block_plans, online_softmax, single_pass
from vitkernels.attention.pallas_flash.tpu.tiles import LANES, TpuProblem

FORMS = {"single_pass": single_pass, "online_softmax": online_softmax}


def describe(arrays, extras, heads: int, scale: float, is_causal: bool, chip: str | None) -> TpuProblem:
    """Return the attention problem of these arrays; `extras` maps names to arrays."""
    q, k = arrays[0], arrays[-1]
    width = q.shape[2] // 3 if len(arrays) == 1 else q.shape[2]
    return TpuProblem(
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
        chip=chip,
    )


def _split(arrays: tuple, extras: tuple[str, ...]):
    """Return (q, k, v) or (packed,), and the extras by name; split packed arrays whose thirds straddle lane tiles."""
    n = len(arrays) - len(extras)
    main, named = arrays[:n], dict(zip(extras, arrays[n:], strict=True))
    if len(main) == 1 and (main[0].shape[2] // 3) % LANES:
        main = tuple(jnp.split(main[0], 3, axis=2))
    return main, named


def attend(
    *arrays,
    heads: int,
    scale: float,
    is_causal: bool,
    extras: tuple[str, ...],
    bias_gradient: bool,
    chip: str | None = None,
):
    """Compute attention on token-major arrays: qkv (B, N, 3E), or q (B, N, E), k and v (B, M, E), then the `extras`.

    Args:
        extras: names of the trailing arrays: bias (B or 1, H or 1, N or 1, M or 1); mask, boolean of such a shape;
            segment_ids, int32 (B, N).
        chip: the TPU whose entries in the table of blocks apply; None to use the rule only.

    Returns (B, N, E); the online form also returns the log-sum-exps for its backward pass.
    """
    main, named = _split(arrays, extras)
    problem = describe(main, named, heads, scale, is_causal, chip)
    plan = block_plans.plan(problem)
    given = (named.get("bias"), named.get("mask"), named.get("segment_ids"))
    return FORMS[plan.form].forward(problem, plan.forward, main, *given)


def attend_vjp(primals, outputs, cotangents, *, heads, scale, is_causal, extras, bias_gradient, chip=None):
    """Return the gradients of `attend` for each of its arrays; None for mask and segment_ids."""
    main, named = _split(primals, extras)
    problem = describe(main, named, heads, scale, is_causal, chip)
    plan = block_plans.plan(problem)
    saved = (*outputs, cotangents[0]) if plan.form == "online_softmax" else cotangents[:1]
    given = (named.get("bias"), named.get("mask"), named.get("segment_ids"), bias_gradient)
    gradients, dbias = FORMS[plan.form].backward(problem, plan.backward, main, *saved, *given)
    if len(main) == 3 and len(primals) - len(extras) == 1:
        gradients = [jnp.concatenate(gradients, axis=2)]
    found = {"bias": None if dbias is None else dbias.astype(named["bias"].dtype)}
    return (*gradients, *[found.get(name) for name in extras])
