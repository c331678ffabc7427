"""scripts/fault_loop.py: killed and resumed runs equal an undisturbed one; no run waits for a fault in vain."""

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


@pytest.mark.parametrize("kind", ["worker", "disk"])
def test_process_ends__if_the_moment_of_its_fault_never_comes(kind, tmp_path):
    (tmp_path / "train.py").write_text("print('nothing to do')\n")
    code = (
        "import sys; from pathlib import Path; import fault_loop\n"
        "fault_loop.ROOT = Path(sys.argv[1])\n"
        "fault_loop.train([], {}, sys.argv[1] + '/log', sys.argv[1], fault_loop.Fault(sys.argv[2], 0, step=0))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
    command = [sys.executable, "-c", code, str(tmp_path), kind]
    subprocess.run(command, env=environment, check=True, timeout=60)
    assert (tmp_path / "log").read_text() == "nothing to do\n"
