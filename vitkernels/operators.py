"""Register this package's PyTorch operators, torch.ops.vitkernels.*, as far as their libraries are installed.

An exported program (torch.export, AOTInductor) of a model with `triton_flash`, `pallas_flash` or fused ops calls them:

    import vitkernels.operators
    program = torch.export.load("model.pt2")

Without the import, torch.export.load fails with "failed to resolve torch.ops.vitkernels...".
"""

from importlib import import_module

from vitkernels.errors import UsageError

_MODULES = (
    "vitkernels.attention.triton_flash.operators",
    "vitkernels.attention.triton_flash.segments",
    "vitkernels.attention.pallas_flash",
    "vitkernels.ops.cross_entropy.triton",
    "vitkernels.ops.generalized_box_iou.triton_op",
    "vitkernels.ops.int8_matmul.triton",
    "vitkernels.ops.layer_norm_residual.triton",
    "vitkernels.ops.linear.operators",
    "vitkernels.ops.linear_gelu.operators",
    "vitkernels.ops.mlp.operators",
    "vitkernels.ops.paged_attention.triton",
    "vitkernels.ops.patch_embed.triton",
    "vitkernels.ops.quantized_matmul.triton",
    "vitkernels.ops.rowwise_quantization",
    "vitkernels.ops.swiglu_norm.triton",
)

for _module in _MODULES:
    try:
        import_module(_module)
    except (ImportError, UsageError):  # Triton or JAX is missing; their backends say so when they are chosen
        continue
