"""quantized_matmul in torch_xla: lazy tensors, torch.compile(backend="openxla"), and agreement with torch_xla's own op.

Runs in a subprocess, because torch_xla depends on the order of imports. PJRT_DEVICE=CPU replaces the TPU.
"""

import importlib.util
import os

import forked
import pytest
from quick_xla import QUICK_XLA

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs the tpu extra"),
]

CODE = """
import itertools, re
import torch, torch_xla
import torch_xla.experimental.xla_quantized_matmul
from torch_xla.experimental.xla_quantized_matmul import XlaQuantizedLinear
from vitkernels.ops import quantized_matmul
from vitkernels.ops.quantized_matmul import unpack_int4
from vitkernels.quant import QuantizedLinear, Scheme
from vitkernels.quant.schemes import quantize_weight

theirs = torch.ops.xla.quantized_matmul
to = lambda *tensors: [None if t is None else t.to("xla") for t in tensors]
close = {"atol": 1e-4, "rtol": 1e-5}  # float32 sums of 64 products of at most 127 * 4 * scale, in another order
torch.manual_seed(0)
x, weight = torch.randn(2, 3, 64), torch.randn(24, 64)
pairs = []  # (scheme, name, ours, expected), evaluated below in one program
for block_size, symmetric, activation_bits, bits in itertools.product((-1, 16), (True, False), (16, 8), (8, 4)):
    scheme = Scheme(bits, activation_bits, block_size, symmetric)
    w, scale, zero = quantize_weight(weight, scheme)
    keywords = {"block_size": block_size, "weight_bits": bits, "activation_bits": activation_bits}
    expected = quantized_matmul(x, w, scale, zero, backend="reference", **keywords)
    lazy = quantized_matmul(*to(x, w, scale, zero), **keywords)
    assert lazy.device.type == "xla"
    pairs.append((scheme, "reference", lazy, expected))
    if block_size == -1 or activation_bits == 16:  # supported by torch_xla
        unpacked = w if bits == 8 else unpack_int4(w, 64 if block_size == -1 else block_size)
        own = theirs(*to(x, unpacked, scale, zero), block_size=block_size, quantize_activation=activation_bits == 8)
        pairs.append((scheme, "torch_xla", lazy, own))
        # Our layer loads the weights of theirs, one 4-bit weight per byte.
        layer = QuantizedLinear(64, 24, scheme, bias=False)
        layer.load_quantized_weight(unpacked, scale, zero)
        pairs.append((scheme, "layer", layer(x), expected))
torch_xla.sync()
for scheme, of, left, right in pairs:
    label = lambda message: f"{scheme}, {of}: {message}"
    torch.testing.assert_close(left.cpu(), right.cpu(), **close, msg=label)

w, scale, _ = quantize_weight(weight, Scheme(8, 8))
compiled = torch.compile(lambda *a: quantized_matmul(*a, activation_bits=8) * 2, backend="openxla", fullgraph=True)
expected = 2 * quantized_matmul(x, w, scale, activation_bits=8)
torch.testing.assert_close(compiled(*to(x, w, scale)).cpu(), expected, **close)

hlo = lambda t: torch_xla._XLAC._get_xla_tensors_hlo([t])
wide = quantized_matmul(*to(x.bfloat16(), w, scale))
assert re.search(r"dot\\(bf16.*s8", hlo(wide)), "weights are converted before the product"
narrow = quantized_matmul(*to(x, w, scale), activation_bits=8)
assert re.search(r"s32.*dot\\(s8.*s8", hlo(narrow)), "rounded tokens are not multiplied as int8"
pallas = quantized_matmul(*to(x, w, scale), activation_bits=8, backend="pallas_tpu")
torch.testing.assert_close(pallas.cpu(), narrow.cpu(), **close)
print("passed")
"""


def test_quantized_matmul_xla__agrees_with_torch_xla():
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICK_XLA}
    done = forked.run(["-c", CODE], environment=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-1] == "passed"
