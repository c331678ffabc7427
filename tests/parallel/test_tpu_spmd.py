"""torch_xla SPMD, PJRT_DEVICE=CPU with several devices: train.py gives the losses of one CPU at the same global batch.

Sums over devices are taken in another order: 1e-7 a step, which AdamW amplifies.
"""

import json

import pytest
from quick_xla import QUICK_XLA
from ranks import Ranks

from vitkernels.runtime import xla

pytestmark = [pytest.mark.slow, pytest.mark.skipif(xla.unavailable() is not None, reason="torch_xla is not installed")]

COMMON = ["trainer.eval_every=null", "checkpoints.every_steps=2", "++model.kwargs.depth=1"]
STEPS, IMAGES = 4, 16
# The hook prints how a parameter's moments are sharded after they are loaded from a checkpoint.
BEFORE = """
import os
os.environ["CPU_NUM_DEVICES"] = "{devices}"
os.environ["XLA_FLAGS"] = "QUICK_XLA"
import torch_xla
from vitkernels.parallel.tpu_spmd import SpmdFsdp
place_state = SpmdFsdp.place_state
def print_sharding(self, optimizer):
    place_state(self, optimizer)
    for parameter, state in optimizer.state.items():
        if parameter.shape == (96, 32):
            print("moment", torch_xla._XLAC._get_xla_sharding_spec(state["exp_avg"]))
SpmdFsdp.place_state = print_sharding
""".replace("QUICK_XLA", QUICK_XLA)


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu") / "run"
    alone = Ranks(1, folder, *COMMON, f"data.batch_size={IMAGES}", f"trainer.max_steps={STEPS}")
    assert alone.finish() == [0], alone.output()
    return losses(folder)


def train(folder, engine, devices, steps):
    words = [*COMMON, "runtime=xla", "runtime.precision=fp32", f"parallel={engine}", "resume=auto"]
    words += [f"data.batch_size={IMAGES // devices}", f"trainer.max_steps={steps}"]
    one = Ranks(1, folder, *words, before={0: BEFORE.format(devices=devices)})
    assert one.finish(300) == [0], one.output()
    return one.output()


def test_spmd_ddp__four_devices_match_one(tmp_path, expected):
    train(tmp_path / "run", "ddp", 4, steps=3)
    assert losses(tmp_path / "run") == pytest.approx(expected[:3], rel=1e-4)


def test_spmd_fsdp__checkpoint_of_four_devices_resumes_on_two(tmp_path, expected):
    """Checkpoints are unsharded; after loading on two devices each holds half of the weights and moments."""
    folder = tmp_path / "run"
    train(folder, "fsdp", 4, steps=2)
    output = train(folder, "fsdp", 2, steps=STEPS)
    assert f"resumed from {folder}" in output and "moment {devices=[2,1]0,1}" in output
    assert losses(folder) == pytest.approx(expected, rel=1e-4) and len(expected) == STEPS
