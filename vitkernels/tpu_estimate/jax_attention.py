"""JAX's own attention kernels for TPU as contenders: flash attention and splash attention, correct at every length.

Both take q, k and v as (B, H, N, D) and return that shape, so no packing copies are counted against them. Lengths that
are not multiples of 128 are padded, with segment ids that mask the padding; without them, the kernels fail or return
wrong results.
"""

from functools import partial

import numpy as np

from vitkernels.bridge.jax_compat import jax

LANES = 128
CONTENDERS = ("jax_flash", "jax_splash")
_MAX_SCORES = 20 * 2**16  # per block; larger blocks exceed VMEM or take minutes to compile


def candidates(contender: str, batch: int, tokens: int) -> list[tuple[int, int]]:
    """Return the block sizes to try, as (images, tokens): at least 256 tokens, dividing the padded length.

    Smaller blocks, including JAX's default of 128, are several times slower. Splash attention takes one image.
    """
    padded = _round_up(tokens)
    sizes = [n for n in range(min(256, padded), padded + 1, LANES) if padded % n == 0]
    images = (1, 2, 4, 16) if contender == "jax_flash" else (1,)
    return [(b, n) for n in sizes for b in images if batch % b == 0 and b * n * n <= _MAX_SCORES]


def _round_up(tokens: int) -> int:
    return -(-tokens // LANES) * LANES


def attend(contender: str, blocks: tuple[int, int], q_BHND, k_BHND, v_BHND):
    """Run one of JAX's kernels with the given (images, tokens) blocks and SDPA's default scale."""
    N = q_BHND.shape[2]
    extra = _round_up(N) - N
    arrays = [jax.numpy.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0))) for x in (q_BHND, k_BHND, v_BHND)]
    ids = (jax.numpy.arange(N + extra) >= N).astype("int32") if extra else None
    run = _flash if contender == "jax_flash" else _splash
    return run(blocks, ids, *arrays)[:, :, :N]


def _flash(blocks, ids, q, k, v):
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    images, size = blocks
    names = ("block_q_major_dkv", "block_k_major_dkv", "block_k_dkv", "block_q_dkv")
    names += ("block_k_major_dq", "block_k_dq", "block_q_dq", "block_q", "block_k_major", "block_k")
    sizes = flash.BlockSizes(block_b=images, **dict.fromkeys(names, size))
    segments = None
    if ids is not None:
        both = jax.numpy.broadcast_to(ids, (q.shape[0], ids.size))
        segments = flash.SegmentIds(both, both)
    return flash.flash_attention(
        q, k, v, segment_ids=segments, sm_scale=q.shape[-1] ** -0.5, block_sizes=sizes
    )  # fmt: skip


def _splash(blocks, ids, q, k, v):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    size, (_, heads, N, D) = blocks[1], q.shape
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sizes = splash.BlockSizes(**dict.fromkeys(names, size), use_fused_bwd_kernel=True)
    mask = masks.MultiHeadMask([masks.FullMask((N, N)) for _ in range(heads)])
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    # Drop the tables of blocks to skip: a full mask skips none, and the simulator cannot follow reads from them.
    for info in ("fwd_mask_info", "dkv_mask_info"):
        setattr(kernel, info, getattr(kernel, info)._replace(data_next=None, block_mask=None))
    segments = None if ids is None else splash.SegmentIds(ids, ids)
    return jax.vmap(partial(kernel, segment_ids=segments))(q * np.asarray(D**-0.5, q.dtype), k, v)
