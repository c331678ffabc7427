"""Estimate attention on a TPU: pallas_flash, XLA's own attention, JAX's kernels, and every registered backend.

`pallas_flash` and `xla` map a packed qkv (B, N, 3E) to (B, N, E), so XLA pays for the copies to and from its own
layouts. `xla_apart` takes q, k and v as (B, H, N, D) and returns the same shape, so no copies are counted: it assumes
that the surrounding layers use XLA's layouts at no cost. XLA attention in a real module falls between the two.
`jax_flash` and `jax_splash` are JAX's own kernels, also with separate q, k and v, at their best block sizes
(jax_attention.py). Every other attention backend maps a packed qkv as in training, and is recorded as a torch_xla graph
(record_attention.py).

The compiler chooses the layouts of arguments and results to suit the contender (`own_layouts` of
compiler.compile_jax). The `with projections` pass runs x (B, N, E) forward and backward through the qkv projection,
attention and the output projection: each contender then gets layouts that XLA's matmuls can write, and pays for the
remaining copies.

Shape suffixes: B batch, H heads, N tokens, D head dim, E = H * D.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from vitkernels import attention
from vitkernels.bridge.jax_compat import jax
from vitkernels.errors import UsageError
from vitkernels.tpu_estimate import jax_attention
from vitkernels.tpu_estimate.chips import CHIPS, Chip
from vitkernels.tpu_estimate.compile_process import compile_in
from vitkernels.tpu_estimate.estimate import ProgramEstimate, estimate_program

CONTENDERS = ("pallas_flash", "xla", "xla_apart", "jax_flash", "jax_splash")
PASSES = ("forward", "forward+backward", "with projections")


def contenders() -> tuple[str, ...]:
    """Return the report's contenders, followed by all other registered attention backends."""
    return (*CONTENDERS, *(name for name in attention.names() if name not in (*CONTENDERS, "auto")))


def build(contender: str, pass_name: str, batch: int, heads: int, tokens: int, head_dim: int, blocks=(), chip="v5e"):
    """Return one bfloat16 pass of a contender, as the arguments of `compile_jax`, or of `compile_hlo` if recorded.

    Passes that include backward also return the gradients.

    Args:
        blocks: block sizes for JAX's kernels, one of `jax_attention.candidates`.
        chip: the chip whose table of block plans pallas_flash reads.
    """
    if contender not in CONTENDERS:
        from vitkernels.tpu_estimate import record_attention

        return record_attention.record(contender, pass_name, batch, heads, tokens, head_dim, chip), {}, True
    attend: Any
    sizes: list[tuple[int, ...]]
    first: tuple[int, ...]
    last: tuple[int, ...]
    width, packed = heads * head_dim, contender in ("pallas_flash", "xla")
    if packed:
        attend = partial(_xla, heads) if contender == "xla" else partial(_pallas_flash, heads, chip)
        sizes = [(batch, tokens, 3 * width), (batch, tokens, width)]
    else:
        attend = _softmax_attention
        if contender in jax_attention.CONTENDERS:
            attend = partial(jax_attention.attend, contender, tuple(blocks))
        sizes = [(batch, heads, tokens, head_dim)] * 4
    if pass_name == "with projections":
        first, last = (width, 3 * width), (width, width)
        if not packed:
            first, last = (width, 3, heads, head_dim), (heads, head_dim, width)
        attend = partial(_projected if packed else _projected_apart, attend)
        sizes = [(batch, tokens, width), first, last, (batch, tokens, width)]
    arrays = [jax.ShapeDtypeStruct(size, "bfloat16") for size in sizes]
    if pass_name == "forward":
        return attend, arrays[:-1], True
    return partial(_forward_and_backward, attend), arrays, True


def _pallas_flash(heads: int, chip: str, qkv):
    from vitkernels.attention.pallas_flash.tpu import dispatch

    head_dim = qkv.shape[2] // 3 // heads
    static = {"heads": heads, "scale": head_dim**-0.5, "is_causal": False, "extras": (), "bias_gradient": False}
    static["chip"] = chip

    def forward(qkv):
        outputs = dispatch.attend(qkv, **static)
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        return outputs[0], (qkv, tuple(outputs))

    def backward(saved, do):
        qkv, outputs = saved
        return dispatch.attend_vjp((qkv,), outputs, (do,), **static)

    attend = jax.custom_vjp(lambda qkv: forward(qkv)[0])
    attend.defvjp(forward, backward)
    return attend(qkv)


def _projected(attend, x_BNE, w_EF, w_EE):
    return attend(x_BNE @ w_EF) @ w_EE


def _projected_apart(attend, x_BNE, w_E3HD, w_HDE):
    q, k, v = jax.numpy.einsum("bne,eshd->sbhnd", x_BNE, w_E3HD)
    return jax.numpy.einsum("bhnd,hde->bne", attend(q, k, v), w_HDE)


def _softmax_attention(q_BHND, k_BHND, v_BHND):
    """Compute the same as jax.nn.dot_product_attention(implementation="xla"), which has the same estimate."""
    s = jax.numpy.einsum("bhqd,bhkd->bhqk", q_BHND, k_BHND, preferred_element_type="float32")
    p = jax.nn.softmax(s * q_BHND.shape[-1] ** -0.5, axis=-1).astype(q_BHND.dtype)
    return jax.numpy.einsum("bhqk,bhkd->bhqd", p, v_BHND)


def _xla(heads: int, qkv):
    B, N, _ = qkv.shape
    q, k, v = qkv.reshape(B, N, 3, heads, -1).transpose(2, 0, 3, 1, 4)
    return _softmax_attention(q, k, v).transpose(0, 2, 1, 3).reshape(B, N, -1)


def _forward_and_backward(forward, *arrays_and_do):
    *arrays, do = arrays_and_do
    o, vjp = jax.vjp(forward, *arrays)
    return o, vjp(do)


def estimate(
    contender: str, pass_name: str, shape: tuple[int, int, int, int], chip: Chip = CHIPS["v5e"]
) -> ProgramEstimate:
    """Return the estimate of one pass of a contender at the shape (B, H, N, D).

    JAX's kernels are estimated at every candidate block size; the fastest is returned. Raises UsageError if the
    contender does not compile.
    """
    if contender not in jax_attention.CONTENDERS:
        program = _estimate(contender, pass_name, shape, (), chip)
        if contender == "pallas_flash":
            program.note = str(pallas_flash_plan(shape, chip))
        return program
    programs, refusals = {}, []
    for blocks in jax_attention.candidates(contender, shape[0], shape[2]):
        try:
            programs[blocks] = _estimate(contender, pass_name, shape, blocks, chip)
        except UsageError as error:
            refusals.append(f"{blocks}: {str(error).strip().splitlines()[-1]}")
    if not programs:
        message = f"{contender} does not compile for {shape} at any block size: {'; '.join(refusals)}"
        raise UsageError(message, code="tpu_estimate.compile", contender=contender, shape=shape)
    blocks = min(programs, key=lambda blocks: programs[blocks].estimate_ms)
    programs[blocks].note = f"blocks of {blocks[0]} images, {blocks[1]} tokens"
    return programs[blocks]


def pallas_flash_plan(shape: tuple[int, int, int, int], chip: Chip):
    """Return the block plan that pallas_flash uses; its `source` is the rule or the table."""
    from dataclasses import replace

    from vitkernels.attention.pallas_flash.tpu import block_plans
    from vitkernels.tpu_estimate import tune

    return block_plans.plan(replace(tune.plain_problem(shape), chip=chip.name))


def _estimate(contender: str, pass_name: str, shape: tuple, blocks: tuple, chip: Chip) -> ProgramEstimate:
    with tempfile.TemporaryDirectory(prefix="vitkernels_tpu_") as folder:
        arguments = (contender, pass_name, *shape, blocks, chip.name)
        dump = compile_in(Path(folder), f"{__name__}:build", *arguments, chip=chip.name)
        program = estimate_program(dump)
    kernels = [o.name for o in program.operations if o.kind == "tpu_custom_call" and o.name in program.untimed]
    if kernels:  # XLA has no estimate for custom calls, so the sum would omit the attention kernel
        message = f"no readable schedule of {', '.join(kernels)}"
        raise UsageError(message, code="tpu_estimate.unreadable_schedule", operations=kernels)
    return program
