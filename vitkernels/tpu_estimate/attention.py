"""Attention on a TPU v5e, estimated: pallas_flash beside XLA's own.

`pallas_flash` and `xla` go from a packed qkv (B, N, 3E) to (B, N, E), so XLA pays the copies between that and its own
layouts; `xla_apart` is given q, k and v as (B, H, N, D) and returns that: no such copy is counted, as if the layers
around it wrote and read XLA's layouts at no cost. A module's XLA attention lies between the two. `jax_flash` and
`jax_splash` are JAX's own kernels, given q, k and v apart as well, in the best of their block sizes (tpu_peers). Every
other attention backend goes from packed qkv as train.py calls it, recorded as torch_xla's graph (tpu_recorded).

Arrays come and go in the layouts that suit the contender best (compile_jax's own_layouts). The pass `with projections`
is forward and backward of x (B, N, E) through the qkv projection, attention and the output projection: there it gets
the layouts that XLA's products can write for it, and pays for what they cannot.

Shape suffixes: B batch, H heads, N tokens, D head dim, E = H * D.
"""

import tempfile
from functools import partial
from pathlib import Path

from vitkernels import attention
from vitkernels.bridge.jax_compat import jax
from vitkernels.errors import UsageError
from vitkernels.tpu_estimate import dump as tpu_dump
from vitkernels.tpu_estimate import peers
from vitkernels.tpu_estimate import program as tpu_program
from vitkernels.tpu_estimate.chips import CHIPS, Chip

CONTENDERS = ("pallas_flash", "xla", "xla_apart", "jax_flash", "jax_splash")
PASSES = ("forward", "forward+backward", "with projections")


def contenders() -> tuple[str, ...]:
    """Those of the report, and all that are registered as attention backends."""
    return (*CONTENDERS, *(name for name in attention.names() if name not in (*CONTENDERS, "auto")))


def build(contender: str, which: str, batch: int, heads: int, tokens: int, head_dim: int, blocks=(), chip="v5e"):
    """A contender's pass as a JAX function and the shapes of its arrays (bfloat16), the arguments of compile_jax; or as
    a recorded module, those of compile_hlo. Backward returns gradients too.

    blocks: of JAX's kernels, one of tpu_peers.candidates. chip: whose table of blocks pallas_flash reads.
    """
    if contender not in CONTENDERS:
        from vitkernels.tpu_estimate import record_attention

        return record_attention.record(contender, which, batch, heads, tokens, head_dim, chip), {}, True
    width, packed = heads * head_dim, contender in ("pallas_flash", "xla")
    if packed:
        attend = partial(_xla, heads) if contender == "xla" else partial(_pallas_flash, heads, chip)
        sizes = [(batch, tokens, 3 * width), (batch, tokens, width)]
    else:
        attend = _softmax_attention
        if contender in peers.CONTENDERS:
            attend = partial(peers.attend, contender, tuple(blocks))
        sizes = [(batch, heads, tokens, head_dim)] * 4
    if which == "with projections":
        first, last = (width, 3 * width), (width, width)
        if not packed:
            first, last = (width, 3, heads, head_dim), (heads, head_dim, width)
        attend = partial(_projected if packed else _projected_apart, attend)
        sizes = [(batch, tokens, width), first, last, (batch, tokens, width)]
    arrays = [jax.ShapeDtypeStruct(size, "bfloat16") for size in sizes]
    return (attend, arrays[:-1], True) if which == "forward" else (partial(_both, attend), arrays, True)


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
    """What jax.nn.dot_product_attention(implementation="xla") computes; given apart, it has the same estimate."""
    s = jax.numpy.einsum("bhqd,bhkd->bhqk", q_BHND, k_BHND, preferred_element_type="float32")
    p = jax.nn.softmax(s * q_BHND.shape[-1] ** -0.5, axis=-1).astype(q_BHND.dtype)
    return jax.numpy.einsum("bhqk,bhkd->bhqd", p, v_BHND)


def _xla(heads: int, qkv):
    B, N, _ = qkv.shape
    q, k, v = qkv.reshape(B, N, 3, heads, -1).transpose(2, 0, 3, 1, 4)
    return _softmax_attention(q, k, v).transpose(0, 2, 1, 3).reshape(B, N, -1)


def _both(forward, *arrays_and_do):
    *arrays, do = arrays_and_do
    o, vjp = jax.vjp(forward, *arrays)
    return o, vjp(do)


def estimate(
    contender: str, which: str, shape: tuple[int, int, int, int], chip: Chip = CHIPS["v5e"]
) -> tpu_program.Program:
    """Compile and estimate; raises UsageError where the contender does not compile for the shape (B, H, N, D).

    Of JAX's kernels the block sizes with the least estimate.
    """
    if contender not in peers.CONTENDERS:
        program = _estimate(contender, which, shape, (), chip)
        if contender == "pallas_flash":
            program.note = str(pallas_flash_plan(shape, chip))
        return program
    programs, refusals = {}, []
    for blocks in peers.candidates(contender, shape[0], shape[2]):
        try:
            programs[blocks] = _estimate(contender, which, shape, blocks, chip)
        except UsageError as error:
            refusals.append(f"{blocks}: {str(error).strip().splitlines()[-1]}")
    if not programs:
        raise UsageError(f"{contender} compiles for {shape} in no block sizes; {'; '.join(refusals)}")
    blocks = min(programs, key=lambda blocks: programs[blocks].estimate_ms)
    programs[blocks].note = f"blocks of {blocks[0]} images, {blocks[1]} tokens"
    return programs[blocks]


def pallas_flash_plan(shape: tuple[int, int, int, int], chip: Chip):
    """The blocks that pallas_flash runs in, which says whether its rule or its table chose them."""
    from dataclasses import replace

    from vitkernels.attention.pallas_flash.tpu import block_plans
    from vitkernels.tpu_estimate import tune

    return block_plans.plan(replace(tune.problem(shape), chip=chip.name))


def _estimate(contender: str, which: str, shape: tuple, blocks: tuple, chip: Chip) -> tpu_program.Program:
    with tempfile.TemporaryDirectory(prefix="vitkernels_tpu_") as folder:
        arguments = (contender, which, *shape, blocks, chip.name)
        dump = tpu_dump.compile_in(Path(folder), f"{__name__}:build", *arguments, chip=chip.name)
        program = tpu_program.estimate(dump)
    kernels = [o.name for o in program.operations if o.kind == "tpu_custom_call" and o.name in program.untimed]
    if kernels:  # XLA has no estimate of its own for these: the sum would be without what it is about
        raise UsageError(f"the schedule of {', '.join(kernels)} could not be read")
    return program
