"""`triton_flash`: flash attention in Triton, for NVIDIA GPUs and, interpreted, for any CPU.

FlashAttention-2 (Dao 2023, arXiv 2307.08691) for the sequence lengths of vision transformers. It reads q, k and v in
the projection's layout, without copies, and writes the layout that the next projection reads; its backward pass writes
one packed gradient. A kernel of its own applies rotary embeddings, to q and k before the attention and to their
gradients afterwards. Results are bit-equal from run to run, because no sum uses atomics. On Hopper, warp-specialized
kernels in Gluon (hopper/) compute long sequences without bias, mask, segments and causality.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim, E = H * D, 3 = q, k, v.
"""

import re
from importlib.util import find_spec

import torch

from vitkernels.attention.contract import AttentionBackend, folded_scale
from vitkernels.attention.problem import Problem
from vitkernels.errors import UsageError

_MISSING = None if find_spec("triton") else "Triton is not installed: pip install 'vitkernels[cuda]' (Linux only)"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PASSES = ("forward", "dq", "dkdv")
_LEAST_SCALE = 2.0**-100  # kernels receive the scale in float32, which rounds numbers below 2^-150 to 0


class TritonFlash(AttentionBackend):
    """Head dims 16 to 256 in steps of 8, any lengths, bias and its gradient, masks, segments, causality and rope.

    float32 calls multiply in native float32, not TF32, on CUDA cores.
    """

    name = "triton_flash"
    rotates_on = ("cuda", "cpu")

    def __init__(self, tile_sizes: tuple[int, ...] = ()):
        self._tile_sizes = tile_sizes  # (queries, keys) of each pass, 0 to choose by shape; or empty

    def configured(self, tiles: dict[str, str | None] | None = None, **options) -> "TritonFlash":
        """Return this backend with fixed tile sizes.

        Args:
            tiles: pass (forward, dq, dkdv) -> "QUERIESxKEYS", such as "64x32", or None to choose by shape. Sizes are
                powers of two from 16 to 128. Triton raises at compilation if tiles exceed the GPU's shared memory. With
                a fixed size, a pass does not run on the kernels for Hopper, which have their own.
        """
        super().configured(**options)
        tiles = {name: size for name, size in (tiles or {}).items() if size is not None}
        for name, size in tiles.items():
            if name not in _PASSES:
                message = f"tiles has no pass {name!r}; known: {', '.join(_PASSES)}"
                raise UsageError(message, code="attention.tiles", key=name, choices=_PASSES)
            if not re.fullmatch(r"(16|32|64|128)x(16|32|64|128)", str(size)):
                message = f"tiles[{name!r}] must be QUERIESxKEYS, each 16, 32, 64 or 128, such as 64x32; got {size}"
                raise UsageError(message, code="attention.tiles", key=name, value=size)
        if not tiles:
            return self
        return TritonFlash(tuple(int(n) for name in _PASSES for n in str(tiles.get(name, "0x0")).split("x")))

    def unavailable(self) -> str | None:
        return _MISSING

    def limitation(self) -> str | None:
        if _MISSING or not torch.cuda.is_available():
            return None
        from vitkernels.attention.triton_flash.hopper import launch  # imports Triton

        return launch.limitation() if launch.is_hopper() else None

    def refusal(self, problem: Problem) -> str | None:
        if problem.device_type not in ("cuda", "cpu"):
            return f"Triton runs on CUDA tensors, and interpreted on CPU tensors; got {problem.device_type}"
        if problem.dtype not in _DTYPES:
            return f"its kernels support bfloat16, float16 and float32, got {problem.dtype}; use native or sdpa"
        if problem.head_dim % 8 or not 16 <= problem.head_dim <= 256:
            return f"its tiles support head dims 16 to 256 in steps of 8, got {problem.head_dim}; use native or sdpa"
        if problem.dropout_p:
            return f"does not support dropout of attention weights (dropout_p={problem.dropout_p}); use 0 or sdpa"
        return None

    def run(self, q_BHND, k_BHMD, v_BHMD, *, scale, rope=None, rope_half=False, **keywords):
        from vitkernels.attention.rotation import rotate  # imports Triton
        from vitkernels.attention.triton_flash.operators import attend

        if scale < _LEAST_SCALE:  # kernels scale after the maximum, so the scale must be positive
            factor, scale = folded_scale(scale)
            q_BHND = q_BHND * factor
        call = self._call(q_BHND, k_BHMD.shape[2], scale=scale, **keywords)
        if rope is not None:
            q_BHND, k_BHMD = rotate(q_BHND, rope, rope_half, False), rotate(k_BHMD, rope, rope_half, False)
        return attend(q_BHND, k_BHMD, v_BHMD, *call)[0]

    def run_qkvpacked(self, qkv_BN3HD, *, scale, rope=None, rope_half=False, **keywords):
        from vitkernels.attention.triton_flash.operators import attend_packed, attend_rotary

        if scale < _LEAST_SCALE:
            q, k, v = qkv_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
            return self.run(q, k, v, scale=scale, rope=rope, rope_half=rope_half, **keywords).transpose(1, 2).flatten(2)
        call = self._call(qkv_BN3HD, qkv_BN3HD.shape[1], scale=scale, **keywords)
        if rope is None:
            return attend_packed(qkv_BN3HD, *call)[0]
        return attend_rotary(qkv_BN3HD, rope, rope_half, *call)[0]

    def _call(self, x, keys: int, *, bias, mask, segment_ids, is_causal, scale, dropout_p) -> tuple:
        """Return the arguments that describe a call to the operators; x has the dtype and device of q."""
        from vitkernels.attention.triton_flash.inputs import padded_keys
        from vitkernels.attention.triton_flash.segments import tiles_of_call

        sizes = self._tile_sizes
        bias, mask = padded_keys(bias, keys, sizes, -torch.inf), padded_keys(mask, keys, sizes, False)
        segment_tiles = tiles_of_call(x, bias, mask, segment_ids, is_causal, sizes)
        return bias, mask, segment_ids, is_causal, scale, sizes, segment_tiles


BACKEND = TritonFlash()
