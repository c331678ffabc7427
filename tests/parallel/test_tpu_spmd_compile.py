"""train.py's step over several v5e chips, as torch_xla receives it, compiled by libtpu without a TPU."""

import json
import math
import os

import pytest
from ranks import fork

from vitkernels.runtime import xla
from vitkernels.tpu_estimate import compiler, record_spmd

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        compiler.unavailable() is not None or xla.unavailable() is not None,
        reason=f"{compiler.unavailable()} {xla.unavailable()}",
    ),
]
BATCH = 3  # per chip. Neither 3 nor 12, 24 or 48 is a size of the model, so shapes tell activations from weights
QKV = [288, 96]


def compiled(chips, engines, words, results, log):
    """Run in a separate process, before any other use of torch_xla."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    results.write_text(json.dumps(record_spmd.main(chips, engines, words)))


@pytest.mark.parametrize(("chips", "engines"), [(4, ("ddp", "fsdp")), (8, ("ddp", "fsdp")), (16, ("fsdp",))])
def test_compiled_step__runs_kernels_on_own_images_and_sends_no_activations(chips, engines, tmp_path):
    words = ["model=vit_digits", "+model.kwargs.depth=1", "attn=pallas_flash", "ops=eager", f"data.batch_size={BATCH}"]
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
        assert found["ddp"]["results"].count(QKV) == 3, "the weight and its two moments, replicated"
    fsdp = found["fsdp"]
    gathered = [math.prod(shape) for shape in fsdp["collectives"]["all-gather"]]  # XLA reshapes some
    assert math.prod(QKV) in gathered
    # On 16 chips XLA all-reduces the gradients of so small a model, and each chip keeps its shard.
    assert fsdp["collectives"].get("reduce-scatter") or (chips == 16 and QKV in fsdp["collectives"]["all-reduce"])
    shard = [QKV[0] // chips, QKV[1]]
    assert shard in fsdp["arguments"] and fsdp["results"].count(shard) == 3 and QKV not in fsdp["results"]


def test_compiled_step_in_8_bits__each_chip_sums_the_weight_gradients_of_its_own_images(tmp_path):
    words = ["model=vit_digits", "+model.kwargs.depth=1", "attn=pallas_flash", "ops=auto", "quant=int8"]
    results, log = tmp_path / "results.json", tmp_path / "log"
    process = fork(compiled, 4, ("ddp",), [*words, f"data.batch_size={BATCH}"], results, log)
    process.join(500)
    assert process.exitcode == 0, log.read_text()[-3000:]
    found = json.loads(results.read_text())["ddp"]
    images = [shape[0] for shape in found["kernels"] if shape[0] != 1]
    assert images and set(images) == {BATCH}
    sums = sorted(shape[1:] for shape in found["kernels"] if shape[0] == 1)
    assert sums == sorted([QKV, [96, 96], [96, 384], [384, 96]])
    reduced = found["collectives"]["all-reduce"]
    assert set(found["collectives"]) == {"all-reduce"} and all(shape in reduced for shape in sums)
