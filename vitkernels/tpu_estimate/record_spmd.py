"""A training step over several chips, as torch_xla's SPMD would give it to TPUs: recorded, and compiled by libtpu.
Nothing runs and no TPU is needed.

    python -m vitkernels.tpu_estimate.record_spmd 4 ddp,fsdp model=vit_base_patch16_224 attn=pallas_flash

CPU devices stand for the chips while train.py records its first step, in which the optimizer's state is made. Those of
several hosts have the same step: each host gives it rows of its own, and a batch has the shape of all rows together.
"""

import json
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from vitkernels.bridge import lazy_target
from vitkernels.errors import UsageError
from vitkernels.runtime.xla import XlaRuntime
from vitkernels.tpu_estimate import compiler, record_step

TOPOLOGIES = {4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4"}  # as libtpu describes them; 16 chips are of several hosts
_COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


class RecordingRuntime(XlaRuntime):
    """The first step ends with tpu_step.Recorded, where it would be executed."""

    def end_step(self, images: torch.Tensor, targets: torch.Tensor, kind: str = "train") -> None:
        import torch_xla

        xla = torch_xla._XLAC
        pending = [t for t in record_step._live() if "xla::device_data" not in xla._get_xla_tensor_debug_info(t)]
        raise record_step.Recorded(xla._get_xla_tensors_hlo_proto(pending), {})


def record(engine: str, *overrides: str) -> bytes:
    """The step of `python train.py parallel=engine *overrides` on all devices of this process, for v5e chips."""
    import train

    lazy_target.record_for("TPU", "v5e")
    with tempfile.TemporaryDirectory(prefix="vitkernels_step_") as folder:
        try:
            cfg = record_step.compose((*overrides, f"parallel={engine}"))
            train.run(cfg, Path(folder), lambda name, precision: RecordingRuntime(precision))
        except record_step.Recorded as recorded:
            return recorded.module
    raise UsageError("the run ended before its first step")


def compile_for(module: bytes, chips: int) -> str:
    """The program of each chip: optimised HLO, after XLA has split the step among them."""
    import numpy as np
    from jax._src.lib import _jax, xla_client
    from jax.experimental import topologies

    compiler.device()  # libtpu's environment
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chips]).devices
    assignment = xla_client.DeviceAssignment.create(np.array([[device.id for device in devices]]))
    options = xla_client.CompileOptions()
    for settings in (options, options.executable_build_options):
        settings.num_replicas, settings.num_partitions = 1, chips
        settings.device_assignment = assignment
    options.executable_build_options.use_spmd_partitioning = True
    # As torch_xla sets it: what a step returns may stay split, as the state of a split parameter should.
    options.executable_build_options.allow_spmd_sharding_propagation_to_output = [True]
    text = _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(module))
    executable = devices[0].client.compile(text.encode(), _jax.DeviceList(tuple(devices)), options)
    return executable.hlo_modules()[0].to_string()


def facts(program: str) -> dict:
    """What one chip's program holds: {"arguments", "results", "kernels": shapes, "collectives": {kind: shapes}}.

    kernels: the first result of each Pallas kernel. Shapes are lists of sizes, of the part that a chip has.
    """
    layout = re.search(r"entry_computation_layout=\{\((.*)\)->\((.*)\)\}", program.partition("\n")[0])
    kernels, collectives = [], {}
    for line in program.splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            kernels.append(_shapes(line.partition(" = ")[2])[0])
        elif found := _COLLECTIVE.search(line):
            collectives.setdefault(found[2], []).extend(_shapes(found[1]))
        if "calls=%all-reduce-scatter" in line:  # libtpu's fusion of an all-reduce and the slice that a chip keeps
            collectives.setdefault("reduce-scatter", []).extend(
                _shapes(line.partition(" = ")[2].partition(" fusion(")[0])
            )
    return {
        "arguments": _shapes(layout[1]), "results": _shapes(layout[2]), "kernels": kernels, "collectives": collectives,
    }  # fmt: skip


def _shapes(text: str) -> list[list[int]]:
    return [[int(n) for n in sizes.split(",") if n] for sizes in _SHAPE.findall(text)]


def main(chips: int, engines: list[str], overrides: list[str]) -> dict[str, dict]:
    """facts() by engine. It must be the process's first use of torch_xla."""
    if chips not in TOPOLOGIES:
        raise UsageError(f"several v5e chips can be {', '.join(map(str, TOPOLOGIES))}; got {chips}")
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(chips), "JAX_PLATFORMS": "cpu"}
    return {engine: facts(compile_for(record(engine, *overrides), chips)) for engine in engines}


if __name__ == "__main__":
    found = main(int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
    for engine, one in found.items():
        counts = {kind: len(shapes) for kind, shapes in one["collectives"].items()}
        kernels = dict(Counter(map(str, one["kernels"])))
        print(f"{engine} on {sys.argv[1]} v5e chips: kernels {kernels}, {counts}", file=sys.stderr)
    print(json.dumps(found))
