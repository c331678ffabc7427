"""An attention backend alone as the lazy graph that torch_xla would give a TPU: recorded on a CPU, never run.

So any backend can be estimated, a new one too; pallas_flash is its kernels' JAX function instead (tpu_attention).

Shape suffixes: B batch, N tokens, E = heads * head dim.
"""

import os

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels import attention
from vitkernels.bridge import lazy_target
from vitkernels.tpu_estimate.record_step import placeholder


def record(name: str, which: str, batch: int, heads: int, tokens: int, head_dim: int, chip: str) -> bytes:
    """The serialized HLO module of one of tpu_attention.PASSES, bfloat16; this process can run no torch_xla after it.

    From packed qkv (B, N, 3E) to (B, N, E), or with the projections around it from (B, N, E).
    """
    os.environ["PJRT_DEVICE"] = "CPU"
    import torch_xla

    lazy_target.record_for("TPU", chip)
    torch_xla.device()  # begins its backend
    width, with_projections = heads * head_dim, which == "with projections"

    def array(*shape: int) -> Tensor:
        return placeholder(torch.empty(shape, dtype=torch.bfloat16, device="meta")).requires_grad_()

    inputs = [array(batch, tokens, width if with_projections else 3 * width)]
    inputs += [array(3 * width, width), array(width, width)] if with_projections else []
    qkv_BNF = F.linear(*inputs[:2]) if with_projections else inputs[0]
    out_BNE = attention.get(name).qkvpacked(qkv_BNF.unflatten(2, (3, heads, head_dim)))
    out_BNE = F.linear(out_BNE, inputs[2]) if with_projections else out_BNE
    results = [out_BNE.detach()]
    if which != "forward":
        results += torch.autograd.grad(out_BNE, inputs, array(batch, tokens, width).detach())
    return torch_xla._XLAC._get_xla_tensors_hlo_proto(results)
