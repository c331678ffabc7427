"""`pallas_flash`: flash attention for vision transformers in Pallas, for TPU and NVIDIA Hopper; interpreted on the CPU.

On TPU, up to about 1k tokens run in a single pass over full rows of scores (tpu/single_pass.py), longer sequences with
the online softmax (tpu/online_softmax.py). Both support any number of tokens and mask their padding. The packed entry
point reads the layout that the projection writes, and writes the layout that the next projection reads, without copies.
On Hopper GPUs, Mosaic-GPU kernels (hopper/) do the same. There a Triton kernel applies rotary embeddings, in one pass
over the packed tensor before the attention and one over its gradient afterwards. On other devices q and k are rotated
before the call.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim, E = H * D, 3 = q, k, v.
"""

import torch

from vitkernels.attention.contract import AttentionBackend
from vitkernels.attention.pallas_flash.hopper.schedule import unsupported_head_dim
from vitkernels.attention.problem import Problem
from vitkernels.bridge import hopper as hopper_gpu
from vitkernels.bridge import lazy_target
from vitkernels.errors import UsageError
from vitkernels.registry.sources import missing_package

# Imported here, not at the first call, because torch.compile would trace the import.
try:
    from vitkernels.attention.pallas_flash.tpu import dispatch
    from vitkernels.bridge import pallas_op
except (ImportError, UsageError) as error:  # jax is missing or holds the TPU
    _missing = missing_package(error) if isinstance(error, ModuleNotFoundError) else None  # names the extra to install
    _unavailable: str | None = str(_missing or error)
    _flash = None
else:
    _unavailable = None
    _flash = pallas_op(dispatch.attend, vjp=dispatch.attend_vjp, name="pallas_flash", shard_batch=True)

_DTYPES = (torch.bfloat16, torch.float32)
_HOPPER_DTYPES = (torch.bfloat16, torch.float16)

_no_hopper = _unavailable or hopper_gpu.unavailable()
if _no_hopper is None:
    from vitkernels.attention.pallas_flash.hopper import dispatch as hopper_dispatch


def _unsupported_on_hopper(problem: Problem) -> str | None:
    if _no_hopper is not None:
        return f"{_no_hopper}; use triton_flash or sdpa"
    if problem.dtype not in _HOPPER_DTYPES:
        return f"its kernels for NVIDIA compute in bfloat16 and float16, not {problem.dtype}; use triton_flash or sdpa"
    return unsupported_head_dim(problem.head_dim)


def _unsupported_on_tpu(problem: Problem) -> str | None:
    if problem.dtype not in _DTYPES:
        return f"its kernels for TPU compute in bfloat16 and float32, not {problem.dtype}; use native or sdpa"
    if problem.head_dim % 8 or not 8 <= problem.head_dim <= 128:
        return (
            f"its kernels for TPU support head dims up to 128 in steps of 8, not {problem.head_dim}; use native or sdpa"
        )
    return None


def _unsupported_anywhere(problem: Problem) -> str | None:
    if problem.dropout_p:
        return f"does not support dropout (dropout_p={problem.dropout_p}); use 0 or sdpa"
    if 0 in (problem.batch, problem.heads, problem.q_tokens, problem.kv_tokens):
        return "does not support tensors with a zero-sized dimension; use native or sdpa"
    return None


def _has_short_segments(problem: Problem) -> bool:
    """Return whether a call has segments of at most 256 tokens in all, no other extras, and head dim 32."""
    has_more = problem.bias_shape is not None or problem.has_mask or problem.is_causal or problem.has_rope
    return problem.has_segment_ids and not has_more and problem.q_tokens <= 256 and problem.head_dim <= 32


class PallasFlash(AttentionBackend):
    """Support bf16 and f32 on TPU, with full-precision float32 products; bf16 and fp16 on Hopper. No dropout."""

    name = "pallas_flash"
    rotates_on = ("cuda",)

    def unavailable(self) -> str | None:
        return _unavailable

    def refusal(self, problem: Problem) -> str | None:
        if problem.device_type not in ("cpu", "xla", "cuda"):
            where = "TPU (device xla), NVIDIA Hopper and, interpreted, cpu"
            return f"runs on {where}, not {problem.device_type}; use native or sdpa"
        by_device = _unsupported_on_hopper if problem.device_type == "cuda" else _unsupported_on_tpu
        return by_device(problem) or _unsupported_anywhere(problem)

    def is_slower(self, problem: Problem) -> bool:
        """Return True for calls on CUDA that triton_flash computes faster.

        At head dims up to 32, these are windows of up to 64 tokens, and short segments. At head dims other than 64,
        they are also windows with a bias. At head dim 64, windows with a bias took triton_flash 1.05 to 1.2 times as
        long, and with its gradient 0.97 to 1.13 times; other head dims above 32 were not measured. The kernels that
        head dim 32 has for packed segments took 1.5 and 1.2 times as long as a dense batch at segments of 49 and 64
        tokens, measured at head dim 64 (notes/pallas_flash_hopper.md).
        """
        is_window = max(problem.q_tokens, problem.kv_tokens) <= 64
        has_slow_bias = problem.bias_shape is not None and problem.head_dim != 64
        is_slow_window = is_window and (has_slow_bias or problem.head_dim <= 32)
        return problem.device_type == "cuda" and (is_slow_window or _has_short_segments(problem))

    def run(self, q_BHND, k_BHMD, v_BHMD, rope=None, rope_half=False, **keywords):
        if q_BHND.device.type == "cuda":
            return hopper_dispatch.attend(q_BHND, k_BHMD, v_BHMD, rope, rope_half, **keywords)
        B, H, N, D = q_BHND.shape
        arrays = [x.transpose(1, 2).reshape(B, -1, H * D) for x in (q_BHND, k_BHMD, v_BHMD)]
        return _attend(arrays, H, **keywords).reshape(B, N, H, D).transpose(1, 2)

    def run_qkvpacked(self, qkv_BN3HD, rope=None, rope_half=False, **keywords):
        if qkv_BN3HD.device.type == "cuda":
            return hopper_dispatch.attend_packed(qkv_BN3HD, rope, rope_half, **keywords)
        B, N, _, H, D = qkv_BN3HD.shape
        return _attend([qkv_BN3HD.reshape(B, N, 3 * H * D)], H, **keywords)


def _attend(arrays, heads, *, bias, mask, segment_ids, is_causal, scale, dropout_p):
    extras = {
        "bias": None if bias is None else _four_axes(bias),
        "mask": None if mask is None else _four_axes(mask),
        # A single token attends to itself, whatever its segment.
        "segment_ids": None if segment_ids is None or segment_ids.shape[1] == 1 else segment_ids.to(torch.int32),
    }
    given = {name: x for name, x in extras.items() if x is not None}
    outputs = _flash(
        *[x.contiguous() for x in (*arrays, *given.values())],
        heads=heads,
        scale=float(scale),
        is_causal=is_causal,
        extras=tuple(given),
        bias_gradient=bias is not None and bias.requires_grad,
        chip=lazy_target.chip() if arrays[0].device.type == "xla" else None,
    )
    return outputs[0] if isinstance(outputs, tuple) else outputs


def _four_axes(x):
    """Return x with four axes; a float64 or float16 bias is cast to float32, the precision of the scores."""
    x = x[(None,) * (4 - x.ndim)]
    return x if x.dtype in (torch.bool, torch.float32, torch.bfloat16) else x.float()


BACKEND = PallasFlash()
