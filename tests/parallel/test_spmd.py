"""torch_xla SPMD, PJRT_DEVICE=CPU with four devices: train.py gives the losses of one CPU at the same global batch."""

import json
import os
import subprocess
import sys

import pytest
from ranks import ROOT, SMALL

from vitkernels.runtime import xla

pytestmark = pytest.mark.skipif(xla.unavailable() is not None, reason="torch_xla is not installed")


def losses(folder, *words, **environment):
    command = [sys.executable, str(ROOT / "train.py"), *SMALL, *words, "trainer.max_steps=4", f"hydra.run.dir={folder}"]
    command += ["trainer.eval_every=null", "checkpoints.every_epochs=null"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_four_devices_train_as_one(tmp_path, engine):
    """Sums over devices are taken in another order: 1e-7 a step, which AdamW amplifies."""
    expected = losses(tmp_path / "cpu", "data.batch_size=16")
    words = ["runtime=xla", "runtime.precision=fp32", f"parallel={engine}", "data.batch_size=4"]
    assert losses(tmp_path / "xla", *words, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="4") == pytest.approx(expected, rel=1e-4)
