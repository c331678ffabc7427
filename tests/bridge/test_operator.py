"""Second derivatives through kernels are refused: autograd would take them for zero without a word."""

import pytest
import torch
from torch import nn

from vitkernels import attention
from vitkernels.errors import UsageError
from vitkernels.ops import cross_entropy, generalized_box_iou, layer_norm_residual, linear_gelu, mlp
from vitkernels.quant import train_in_8_bits

pytest.importorskip("triton", reason="no Triton on this platform")

# Boxes past the end of a block divide by zero, and NumPy, which Triton's interpreter calculates with, says so.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning")

flash = attention.get("triton_flash")
WEIGHT, BIAS = torch.ones(16, 16), torch.zeros(16)
# Of x, (2, 16), each by kernels.
CALLS = {
    "layer_norm_residual": lambda x: layer_norm_residual(x, x, WEIGHT[0], BIAS, backend="triton")[1],
    "layer_norm": lambda x: layer_norm_residual(x, None, WEIGHT[0], BIAS, backend="triton")[1],
    "linear_gelu": lambda x: linear_gelu(x, WEIGHT, BIAS, backend="passes"),
    "mlp": lambda x: mlp(x, WEIGHT, BIAS, WEIGHT, BIAS, backend="passes"),
    "cross_entropy": lambda x: cross_entropy(x, torch.tensor([3, 5]), backend="triton"),
    "generalized_box_iou": lambda x: generalized_box_iou(x.view(8, 4), x.view(8, 4) + 1, backend="triton"),
    "triton_flash": lambda x: flash(*[x.view(1, 1, 1, 32)] * 3),
    "triton_flash_packed": lambda x: flash.qkvpacked(x.view(1, 1, 1, 1, 32).expand(1, 1, 3, 1, 32)),
    "eight_bit_linear": train_in_8_bits(nn.Sequential(nn.Linear(16, 16)), "int8"),
    "eight_bit_mlp": train_in_8_bits(
        nn.Sequential(nn.ModuleDict({"fc1": nn.Linear(16, 16), "act": nn.GELU(), "fc2": nn.Linear(16, 16)})), "int8"
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_derivative_is_refused(name):
    x = torch.rand(2, 16).requires_grad_()
    (dx,) = torch.autograd.grad(CALLS[name](x).sum(), x)
    assert dx.shape == x.shape
    with pytest.raises(UsageError, match="differentiable once"):
        torch.autograd.grad(CALLS[name](x).sum(), x, create_graph=True)
