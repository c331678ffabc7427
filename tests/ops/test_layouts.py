"""Every backend of every op reads strided and expanded tensors."""

import pytest
import torch
from example_calls import CALLS

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
