"""The package: what its import costs."""

import subprocess
import sys


def test_import__loads_no_kernel_language():
    code = (
        "import sys, vitkernels, vitkernels.attention, vitkernels.bridge; vitkernels.attention.get('native'); "
        "print([m for m in ('jax', 'triton', 'torch_xla', 'timm', 'hydra') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
