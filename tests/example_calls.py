"""Example calls of every op, shared by the suites that hold for all ops. A new op adds an entry to CALLS."""

import torch


def normal(*shape):
    """Return normally distributed float32."""
    return torch.randn(shape)


def integers(top, *shape, dtype=torch.int64):
    """Return integers from 0 to top - 1."""
    return torch.randint(0, top, shape, dtype=dtype)


def boxes(*shape):
    """Return boxes of positive extents."""
    return torch.rand(*shape, 4) + torch.tensor([0.0, 0.0, 1.0, 1.0])


# op -> calls as keyword arguments, of sizes that the Hopper kernels support, which are the most restrictive.
CALLS = {
    "cross_entropy": [
        {"logits_BC": normal(8, 10), "targets": integers(10, 8)},
        {"logits_BC": normal(8, 10), "targets": normal(8, 10).softmax(1)},
    ],
    "eight_bit_linear": [{"x": normal(8, 64), "weight_NK": normal(128, 64) / 8, "bias_N": normal(128)}],
    "generalized_box_iou": [{"preds_BN4": boxes(3, 5), "targets_BN4": boxes(3, 5)}],
    "int8_matmul": [{"x_MK": integers(9, 16, 32, dtype=torch.int8), "w_KN": integers(9, 32, 16, dtype=torch.int8)}],
    "layer_norm_residual": [
        {"x": normal(3, 5, 32), "branch": None, "weight_C": normal(32), "bias_C": normal(32)},
        {
            "x": normal(3, 5, 32), "branch": normal(3, 5, 32), "weight_C": normal(32), "bias_C": normal(32),
            "branch_bias_C": normal(32), "layer_scale_C": normal(32), "sample_scale_B": integers(2, 3) / 0.5,
        },
    ],
    "linear": [{"x": normal(8, 64), "weight_NK": normal(128, 64) / 8, "bias_N": normal(128)}],
    "linear_gelu": [{"x": normal(8, 64), "weight_NK": normal(128, 64) / 8, "bias_N": normal(128)}],
    "mlp": [
        {
            "x": normal(8, 64), "weight1_NK": normal(128, 64) / 8, "bias1_N": normal(128),
            "weight2_ON": normal(64, 128) / 8, "bias2_O": normal(64),
        }
    ],
    "norm_linear": [
        {
            "x": normal(3, 5, 32), "branch": normal(3, 5, 32), "norm_weight_C": normal(32), "norm_bias_C": normal(32),
            "weight_FC": normal(48, 32) / 6, "bias_F": normal(48), "sample_scale_B": integers(2, 3) / 0.5,
        }
    ],
    "norm_mlp": [
        {
            "x": normal(3, 5, 32), "branch": normal(3, 5, 32), "norm_weight_C": normal(32), "norm_bias_C": normal(32),
            "weight1_FC": normal(48, 32) / 6, "bias1_F": normal(48), "weight2_OF": normal(32, 48) / 7,
        }
    ],
    "paged_attention": [
        {
            "query": normal(2, 4, 32), "key_cache": normal(2, 6, 8, 32), "value_cache": normal(2, 6, 8, 32),
            "context_lens": torch.tensor([9, 16]), "block_tables": integers(6, 2, 2), "pages_per_compute_block": 1,
        }
    ],
    "patch_embed": [{"images_BCHW": normal(2, 3, 8, 8), "weight_EChw": normal(16, 3, 4, 4) / 8, "bias_E": normal(16)}],
    "quantized_matmul": [
        {
            "x": normal(8, 64), "w": integers(9, 32, 64, dtype=torch.int8), "scale": torch.rand(32) / 64,
            "zero_point": torch.rand(32) / 64, "bias": normal(32), "activation_bits": bits,
        }
        for bits in (8, 16)
    ],
    "swiglu_norm": [
        {"x": normal(3, 5, 64), "gate_last": True},
        {"x": normal(3, 5, 64), "weight_F": normal(32), "bias_F": normal(32), "linear_bias_G": normal(64)},
    ],
}  # fmt: skip
