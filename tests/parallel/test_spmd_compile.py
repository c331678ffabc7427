"""The step over several chips of v5e, as train.py gives it to torch_xla, compiled by libtpu; no TPU is used."""

import json
import math
import os
import subprocess
import sys

import pytest
from ranks import ROOT

from vitkernels.bench import tpu_static
from vitkernels.runtime import xla

pytestmark = pytest.mark.skipif(
    tpu_static.unavailable() is not None or xla.unavailable() is not None,
    reason=f"{tpu_static.unavailable()} {xla.unavailable()}",
)
BATCH = 3  # of each chip: no size of the model is it, nor 12 or 24, so that activations can be told from weights
QKV = [288, 96]


@pytest.mark.parametrize(("chips", "engines"), [(4, ("ddp", "fsdp")), (8, ("fsdp",))])
def test_each_chip_runs_the_kernels_on_its_images_and_only_weights_and_gradients_travel(chips, engines):
    words = ["model=vit_digits", "+model.kwargs.depth=1", "attn=pallas_flash", f"data.batch_size={BATCH}"]
    command = [sys.executable, "-m", "vitkernels.bench.tpu_spmd", str(chips), ",".join(engines), *words]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for engine in engines:
        one = found[engine]
        assert one["kernels"] == [[BATCH, 16, 96]] * 2, engine  # forward and backward
        shapes = [shape for some in one["collectives"].values() for shape in some]
        assert not any(size in (BATCH, BATCH * chips) for shape in shapes for size in shape), engine
    if "ddp" in engines:
        assert set(found["ddp"]["collectives"]) == {"all-reduce"}
        assert QKV in found["ddp"]["collectives"]["all-reduce"]
        assert found["ddp"]["results"].count(QKV) == 3, "the weight and its two moments, whole"
    fsdp = found["fsdp"]
    gathered = [math.prod(shape) for shape in fsdp["collectives"]["all-gather"]]  # XLA gives some another shape
    assert math.prod(QKV) in gathered and fsdp["collectives"]["reduce-scatter"]
    part = [QKV[0] // chips, QKV[1]]
    assert part in fsdp["arguments"] and fsdp["results"].count(part) == 3 and QKV not in fsdp["results"]
