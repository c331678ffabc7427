"""Record a single attention backend as the lazy graph that torch_xla would send to a TPU, without executing it.

This makes every registered backend a contender. pallas_flash is estimated from its kernels' JAX function instead (see
attention_contenders.py).

Shape suffixes: B batch, N tokens, E = heads * head dim.
"""

import os

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels import attention
from vitkernels.bridge import lazy_target
from vitkernels.tpu_estimate.record_step import placeholder


def record(name: str, pass_name: str, batch: int, heads: int, tokens: int, head_dim: int, chip: str) -> bytes:
    """Return the serialized HLO module of one of attention_contenders.PASSES in bfloat16.

    It maps a packed qkv (B, N, 3E) to (B, N, E), or x (B, N, E) if the pass includes the projections. The process
    cannot use torch_xla afterwards.
    """
    os.environ["PJRT_DEVICE"] = "CPU"
    import torch_xla

    lazy_target.record_for("TPU", chip)
    torch_xla.device()  # initializes the backend
    width, with_projections = heads * head_dim, pass_name == "with projections"

    def array(*shape: int) -> Tensor:
        return placeholder(torch.empty(shape, dtype=torch.bfloat16, device="meta")).requires_grad_()

    inputs = [array(batch, tokens, width if with_projections else 3 * width)]
    inputs += [array(3 * width, width), array(width, width)] if with_projections else []
    qkv_BNF = F.linear(*inputs[:2]) if with_projections else inputs[0]
    out_BNE = attention.get(name).qkvpacked(qkv_BNF.unflatten(2, (3, heads, head_dim)))
    out_BNE = F.linear(out_BNE, inputs[2]) if with_projections else out_BNE
    results = [out_BNE.detach()]
    if pass_name != "forward":
        results += torch.autograd.grad(out_BNE, inputs, array(batch, tokens, width).detach())
    return torch_xla._XLAC._get_xla_tensors_hlo_proto(results)
