"""scripts/fault_loop.py: killed and resumed runs equal an undisturbed one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_killed_runs__equal_an_undisturbed_one():
    command = [sys.executable, "scripts/fault_loop.py", "--kills", "12", "--seed", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    loop = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert loop.returncode == 0, loop.stdout + loop.stderr
    *_, last = loop.stdout.splitlines()
    assert last.startswith("12 faults in ") and last.endswith("; 0 differ"), loop.stdout
