"""Every backend of every op reads strided and expanded tensors."""

import pytest
import torch

from vitkernels import ops
from vitkernels.errors import UsageError
from vitkernels.registry.op import op_of

# Boxes past the end of a block divide by zero, about which NumPy, the arithmetic of Triton's interpreter, warns.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# Our kernels give the same bits for every layout. Libraries may sum in a different order: 64 products of numbers near 1
# differ by a few roundings, of 6e-8, or of 2⁻⁹ for a bfloat16 result.
TOLERANCE = {
    "cpu": {"rtol": 1e-5, "atol": 1e-5},
    "cuda": {"rtol": 1e-2, "atol": 1e-2},
}


def draw(*shape):
    return torch.randn(shape)


def integers(top, *shape, dtype=torch.int64):
    return torch.randint(0, top, shape, dtype=dtype)


def boxes(*shape):
    return torch.rand(*shape, 4) + torch.tensor([0.0, 0.0, 1.0, 1.0])


# op -> calls as keyword arguments, of sizes that the Hopper kernels support, which are the most restrictive.
CALLS = {
    "cross_entropy": [
        {"logits_BC": draw(8, 10), "targets": integers(10, 8)},
        {"logits_BC": draw(8, 10), "targets": draw(8, 10).softmax(1)},
    ],
    "generalized_box_iou": [{"preds_BN4": boxes(3, 5), "targets_BN4": boxes(3, 5)}],
    "int8_matmul": [{"x_MK": integers(9, 16, 32, dtype=torch.int8), "w_KN": integers(9, 32, 16, dtype=torch.int8)}],
    "layer_norm_residual": [
        {"x": draw(3, 5, 32), "branch": None, "weight_C": draw(32), "bias_C": draw(32)},
        {
            "x": draw(3, 5, 32), "branch": draw(3, 5, 32), "weight_C": draw(32), "bias_C": draw(32),
            "branch_bias_C": draw(32), "layer_scale_C": draw(32), "sample_scale_B": integers(2, 3) / 0.5,
        },
    ],
    "linear": [{"x": draw(8, 64), "weight_NK": draw(128, 64) / 8, "bias_N": draw(128)}],
    "linear_gelu": [{"x": draw(8, 64), "weight_NK": draw(128, 64) / 8, "bias_N": draw(128)}],
    "mlp": [
        {
            "x": draw(8, 64), "weight1_NK": draw(128, 64) / 8, "bias1_N": draw(128),
            "weight2_ON": draw(64, 128) / 8, "bias2_O": draw(64),
        }
    ],
    "paged_attention": [
        {
            "query": draw(2, 4, 32), "key_cache": draw(2, 6, 8, 32), "value_cache": draw(2, 6, 8, 32),
            "context_lens": torch.tensor([9, 16]), "block_tables": integers(6, 2, 2), "pages_per_compute_block": 1,
        }
    ],
    "patch_embed": [{"images_BCHW": draw(2, 3, 8, 8), "weight_EChw": draw(16, 3, 4, 4) / 8, "bias_E": draw(16)}],
    "quantized_matmul": [
        {
            "x": draw(8, 64), "w": integers(9, 32, 64, dtype=torch.int8), "scale": torch.rand(32) / 64,
            "zero_point": torch.rand(32) / 64, "bias": draw(32), "activation_bits": bits,
        }
        for bits in (8, 16)
    ],
}  # fmt: skip
WITHOUT_GRADIENT = ("int8_matmul", "paged_attention", "quantized_matmul")
CONSTANTS = ("targets", "sample_scale_B")


def strided(x):
    """Return a view of x with gaps that hold NaN, or the largest integer."""
    wide = torch.full((*x.shape, 2), float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max, dtype=x.dtype)
    wide = wide.to(x.device)
    wide[..., 0] = x
    return wide[..., 0]


def expanded(x):
    """Return x's first entry, expanded with stride 0, so that reading on leaves its memory."""
    return x[:1].clone().expand(x.shape)


def outputs_and_gradients(op, name, call, douts):
    leaves = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    wanted = [
        k for k, v in leaves.items()
        if isinstance(v, torch.Tensor) and v.is_floating_point() and k not in CONSTANTS and op not in WITHOUT_GRADIENT
    ]  # fmt: skip
    for k in wanted:
        leaves[k].requires_grad_()
    outputs = getattr(ops, op)(**leaves, backend=name)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if not wanted:
        return dict(enumerate(outputs))
    douts = [douts(out.detach()) if out.ndim else torch.ones_like(out) for out in outputs]
    gradients = torch.autograd.grad(outputs, [leaves[k] for k in wanted], douts)
    return {**dict(enumerate(outputs)), **dict(zip(wanted, gradients, strict=True))}


def test_layouts__cover_every_op():
    functions = {name for name in ops.__all__ if name.islower()} - {"generalized_box_iou_loss"}
    assert functions == CALLS.keys()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [strided, expanded])
@pytest.mark.parametrize("op,name", [(op, name) for op in CALLS for name in op_of(getattr(ops, op)).names()])
def test_layouts__give_the_same_results(op, name, layout, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for call in CALLS[op]:
        tensors = [k for k, v in call.items() if isinstance(v, torch.Tensor)]
        matrices = {"x", "weight_NK", "weight1_NK", "weight2_ON"}  # 16 bits wide for the Hopper kernels
        call = {
            k: v.to(device, dtype if k in matrices and v.is_floating_point() else v.dtype) if k in tensors else v
            for k, v in call.items()
        }
        for which in tensors:
            odd = {**call, which: layout(call[which])}
            plain = {**odd, which: odd[which].contiguous()}
            try:
                want = outputs_and_gradients(op, name, plain, lambda out: layout(out.cos()).contiguous())
            except UsageError as error:
                pytest.skip(str(error))
            try:
                got = outputs_and_gradients(op, name, odd, lambda out: layout(out.cos()))
            except UsageError as error:  # some backends copy nothing
                assert error.code == "registry.unsupported" and "contiguous" in error.fields["reason"]
                continue
            for what, x in want.items():
                torch.testing.assert_close(
                    got[what], x, msg=lambda m, at=(which, what): f"{at}: {m}", **TOLERANCE[device]
                )
