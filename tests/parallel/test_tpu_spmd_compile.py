"""The step over several chips of v5e, as train.py gives it to torch_xla, compiled by libtpu; no TPU is used."""

import json
import math
import os

import pytest
from ranks import fork

from vitkernels.runtime import xla
from vitkernels.tpu_estimate import compiler, record_spmd

pytestmark = pytest.mark.skipif(
    compiler.unavailable() is not None or xla.unavailable() is not None,
    reason=f"{compiler.unavailable()} {xla.unavailable()}",
)
BATCH = 3  # of each chip: no size of the model is it, nor 12, 24 or 48, so that activations can be told from weights
QKV = [288, 96]


def compiled(chips, engines, words, results, log):
    """In a process of its own, where it is torch_xla's first use."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    results.write_text(json.dumps(record_spmd.main(chips, engines, words)))


@pytest.mark.parametrize(("chips", "engines"), [(4, ("ddp", "fsdp")), (8, ("ddp", "fsdp")), (16, ("fsdp",))])
def test_each_chip_runs_the_kernels_on_its_images_and_only_weights_and_gradients_travel(chips, engines, tmp_path):
    words = ["model=vit_digits", "+model.kwargs.depth=1", "attn=pallas_flash", f"data.batch_size={BATCH}"]
    results, log = tmp_path / "results.json", tmp_path / "log"
    process = fork(compiled, chips, engines, words, results, log)
    process.join(500)
    assert process.exitcode == 0, log.read_text()[-3000:]
    found = json.loads(results.read_text())
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
    assert math.prod(QKV) in gathered
    # So small a model's gradients are summed whole over 16 chips, each of which then keeps its part.
    assert fsdp["collectives"].get("reduce-scatter") or (chips == 16 and QKV in fsdp["collectives"]["all-reduce"])
    part = [QKV[0] // chips, QKV[1]]
    assert part in fsdp["arguments"] and fsdp["results"].count(part) == 3 and QKV not in fsdp["results"]
