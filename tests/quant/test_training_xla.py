"""int8 training under torch_xla: a step's graph multiplies int8 by int8, and matches the CPU.

The test runs in a subprocess, because torch_xla depends on the order of imports. PJRT_DEVICE=CPU stands in for a TPU.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs the tpu extra")

CODE = """
import copy, re
import torch, torch_xla
from torch import nn
from vitkernels.quant import train_in_8_bits

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 16)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))

def run(model, x):
    out = model(x)
    (out * torch.linspace(-1, 1, 16, device=out.device)).sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]

torch.manual_seed(0)
model = train_in_8_bits(nn.Sequential(nn.Linear(32, 48), Mlp(), nn.Linear(16, 16)), "int8")
x = torch.randn(5, 3, 32)
found = run(copy.deepcopy(model).to("xla"), x.to("xla"))
hlo = torch_xla._XLAC._get_xla_tensors_hlo(found)
products = re.findall(r"= (\\w+)\\[[^=]*? dot\\((\\w+)\\[[^%]*%[\\w.]+, (\\w+)\\[", hlo)
assert products == [("s32", "s8", "s8")] * (3 * 4 - 1), products  # four layers; the gradient of x is not computed
torch_xla.sync()
for name, ours, expected in zip(("out", *dict(model.named_parameters())), found, run(model, x), strict=True):
    # float32 around exact sums: a value at a tie may round the other way, one step of 127 in one operand.
    assert (ours.cpu() - expected).norm() < 2e-3 * expected.norm(), name
print("passed")
"""


def test_training_step__multiplies_int8_and_matches_the_cpu():
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "PJRT_DEVICE": "CPU"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-1] == "passed"
