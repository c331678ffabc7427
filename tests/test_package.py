"""The package as a whole: what importing it costs, what the doctor says."""

import subprocess
import sys

from vitkernels import attention, runtime
from vitkernels.cli import doctor


def test_importing_pulls_in_no_kernel_language():
    code = (
        "import sys, vitkernels, vitkernels.attention, vitkernels.bridge; vitkernels.attention.get('native'); "
        "print([m for m in ('jax', 'triton', 'torch_xla', 'timm', 'hydra') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_doctor_knows_every_runtime_and_backend(capsys):
    assert {*doctor.runtimes(), "auto"} == set(runtime.names())
    assert set(doctor.backends()) == set(attention.names())
    assert doctor.runtimes()["cpu"] is None and doctor.backends()["native"] is None
    doctor.main()
    printed = capsys.readouterr().out
    for word in ("torch", "CPU:", "runs", *attention.names()):
        assert word in printed
    if doctor.runtimes()["cuda"] is not None and "TPU: attached" not in printed:
        assert "attn=triton_flash  runs interpreted, slowly, for tests\n" in printed
