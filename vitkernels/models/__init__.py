"""Build timm vision transformers with a chosen attention backend and fused ops; no other package depends on timm's
models.

`accelerate` swaps attention and fused ops of any timm ViT in one call. `create_model` and `set_attention` choose the
attention backend, `set_ops` the fused ops, `load_weights` reads weights under timm's parameter names, and
`inspect_model` counts parameters and FLOPs without data.
"""

from vitkernels.models.accelerate import accelerate
from vitkernels.models.adapters import attention_layer, attention_plan
from vitkernels.models.any_model import answer_with_both_heads
from vitkernels.models.attention_swap import set_attention
from vitkernels.models.create import create_model, input_spec, preprocessing, timm_model
from vitkernels.models.meta_trace import ModelFacts, inspect_model
from vitkernels.models.model_ops import MODEL_OPS, describe_ops, fused_by, set_ops
from vitkernels.models.presets import PRESETS
from vitkernels.models.transformers_attention import transformers_attention
from vitkernels.models.weights import adapt_state_dict, load_weights, read_state_dict

__all__ = [
    "MODEL_OPS",
    "PRESETS",
    "ModelFacts",
    "accelerate",
    "adapt_state_dict",
    "answer_with_both_heads",
    "attention_layer",
    "attention_plan",
    "create_model",
    "describe_ops",
    "fused_by",
    "input_spec",
    "inspect_model",
    "load_weights",
    "preprocessing",
    "read_state_dict",
    "set_attention",
    "set_ops",
    "timm_model",
    "transformers_attention",
]
