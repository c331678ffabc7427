"""`pallas_flash`: flash attention written for vision transformers in Pallas, for TPU and for NVIDIA Hopper; interpreted
on the CPU.

On TPU, up to about 1k tokens one pass over whole rows of scores (pallas_flash_short), beyond that the online form
(pallas_flash_long). Both take any number of tokens and mask what they pad. The packed entry point reads the
projection's own layout and writes the next projection's, so that no copy stands around the kernel. On Hopper GPUs
Mosaic-GPU kernels do the same (pallas_flash_hopper).

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim, E = H * D, 3 = q, k, v.
"""

import torch

from vitkernels.attention.contract import AttentionBackend
from vitkernels.attention.contract import Problem as Call
from vitkernels.bridge import hopper, lazy_target
from vitkernels.errors import UsageError

# Here and not at the first call, because torch.compile would trace an import.
try:
    from vitkernels.attention.pallas_flash.tpu import dispatch
    from vitkernels.bridge import pallas_op
except (ImportError, UsageError) as error:  # no jax, or a jax that holds the TPU
    _unavailable, _flash = str(error), None
else:
    _unavailable = None
    _flash = pallas_op(dispatch.attend, vjp=dispatch.attend_vjp, name="pallas_flash", shard_batch=True)

_DTYPES = (torch.bfloat16, torch.float32)
_HOPPER_DTYPES = (torch.bfloat16, torch.float16)


_no_hopper = _unavailable or hopper.unavailable()
if _no_hopper is None:
    from vitkernels.attention.pallas_flash.hopper import operators


def _unsupported_on_hopper(problem: Call) -> str | None:
    if _no_hopper is not None:
        return f"{_no_hopper}; use triton_flash or sdpa"
    if problem.dtype not in _HOPPER_DTYPES:
        return f"its kernels for NVIDIA compute in bfloat16 and float16, not {problem.dtype}"
    if problem.head_dim % 8 or not 32 <= problem.head_dim <= 128:
        return f"its kernels for NVIDIA take head dims 32 to 128 in steps of 8, not {problem.head_dim}"
    has_bias = problem.bias_shape is not None
    extras = {"bias": has_bias, "mask": problem.has_mask, "segment_ids": problem.has_segment_ids}
    given = [name for name, x in extras.items() if x]
    if given:
        return f"its kernels for NVIDIA have no {' and no '.join(given)}; use triton_flash or sdpa"
    return None


def _unsupported_on_tpu(problem: Call) -> str | None:
    if problem.dtype not in _DTYPES:
        return f"it computes in bfloat16 and float32, not {problem.dtype}"
    if problem.head_dim % 8 or not 8 <= problem.head_dim <= 128:
        return f"it takes head dims up to 128 in steps of 8, not {problem.head_dim}"
    return None


def _unsupported_anywhere(problem: Call) -> str | None:
    if problem.dropout_p:
        return f"it has no dropout (dropout_p={problem.dropout_p}); set attention dropout to 0 or use sdpa"
    if 0 in (problem.batch, problem.heads, problem.q_tokens, problem.kv_tokens):
        return "it has no empty calls"
    return None


class PallasFlash(AttentionBackend):
    """bf16 and f32 on TPU, where a float32 product is honest float32; bf16 and fp16 on Hopper. No dropout."""

    name = "pallas_flash"

    def unavailable(self) -> str | None:
        return _unavailable

    def refusal(self, problem: Call) -> str | None:
        if problem.device_type not in ("cpu", "xla", "cuda"):
            return (
                f"its kernels are for TPU (device xla), NVIDIA Hopper and, interpreted, cpu, not {problem.device_type}"
            )
        by_device = _unsupported_on_hopper if problem.device_type == "cuda" else _unsupported_on_tpu
        return by_device(problem) or _unsupported_anywhere(problem)

    def run(self, q_BHND, k_BHMD, v_BHMD, **keywords):
        if q_BHND.device.type == "cuda":
            return operators.attend(q_BHND, k_BHMD, v_BHMD, keywords["is_causal"], keywords["scale"])[0]
        B, H, N, D = q_BHND.shape
        arrays = [x.transpose(1, 2).reshape(B, -1, H * D) for x in (q_BHND, k_BHMD, v_BHMD)]
        return _attend(arrays, H, **keywords).reshape(B, N, H, D).transpose(1, 2)

    def run_qkvpacked(self, qkv_BN3HD, **keywords):
        if qkv_BN3HD.device.type == "cuda":
            return operators.attend_packed(qkv_BN3HD, keywords["is_causal"], keywords["scale"])[0]
        B, N, _, H, D = qkv_BN3HD.shape
        return _attend([qkv_BN3HD.reshape(B, N, 3 * H * D)], H, **keywords)


def _attend(arrays, heads, *, bias, mask, segment_ids, is_causal, scale, dropout_p):
    extras = {
        "bias": None if bias is None else _four_axes(bias),
        "mask": None if mask is None else _four_axes(mask),
        # One token has one segment, its own.
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
    """A bias of float64 or float16 is used in float32, the scores' own precision."""
    x = x[(None,) * (4 - x.ndim)]
    return x if x.dtype in (torch.bool, torch.float32, torch.bfloat16) else x.float()


BACKEND = PallasFlash()
