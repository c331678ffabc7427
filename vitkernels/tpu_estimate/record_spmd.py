"""Record a training step over several chips, as torch_xla's SPMD would send it to TPUs, and compile it with libtpu.

    python -m vitkernels.tpu_estimate.record_spmd 4 ddp,fsdp model=vit_base_patch16_224 attn=pallas_flash

Nothing is executed. CPU devices stand in for the chips while the trainer's first step, which creates the optimizer
state, is recorded. Several hosts run the same program: its batch has the global shape, and each host feeds its own
rows.
"""

import json
import os
import re
import sys
from collections import Counter
from typing import Any

import torch

from vitkernels.bridge import lazy_target
from vitkernels.errors import UsageError
from vitkernels.runtime.xla import XlaRuntime
from vitkernels.tpu_estimate import compiler, record_step

TOPOLOGIES = {4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4"}  # libtpu's names; 16 chips belong to several hosts
_COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


class RecordingRuntime(XlaRuntime):
    """torch_xla on several devices; `recorded` is the HLO module of the first step."""

    recorded: bytes | None = None

    def end_step(self, images: torch.Tensor, targets: torch.Tensor, kind: str = "train") -> None:
        import torch_xla

        xla = torch_xla._XLAC
        live = record_step.live_tensors()
        pending = [t for t in live if "xla::device_data" not in xla._get_xla_tensor_debug_info(t)]
        self.recorded = xla._get_xla_tensors_hlo_proto(pending)


def record(strategy: str, *overrides: str) -> bytes:
    """Return the step of `python train.py parallel=STRATEGY *overrides` on all devices of this process, for v5e."""
    lazy_target.record_for("TPU", "v5e")
    cfg = record_step.compose((*overrides, f"parallel={strategy}"))
    runtime = RecordingRuntime(cfg.runtime.precision)
    record_step.take_steps(cfg, runtime, steps=1)
    assert runtime.recorded is not None, "the first step sets it"
    return runtime.recorded


def compile_for(module: bytes, chips: int) -> str:
    """Return the program of each chip: optimized HLO, after XLA has partitioned the step."""
    import numpy as np
    from jax._src.lib import _jax, xla_client
    from jax.experimental import topologies

    compiler.device()  # sets libtpu's environment
    devices: Any = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chips]).devices
    assignment = xla_client.DeviceAssignment.create(np.array([[device.id for device in devices]]))
    options = xla_client.CompileOptions()
    for settings in (options, options.executable_build_options):
        settings.num_replicas, settings.num_partitions = 1, chips
        settings.device_assignment = assignment
    options.executable_build_options.use_spmd_partitioning = True
    # As torch_xla sets it, so that the optimizer state of a sharded parameter stays sharded.
    options.executable_build_options.allow_spmd_sharding_propagation_to_output = [True]
    text = _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(module))
    executable = devices[0].client.compile(text.encode(), _jax.DeviceList(tuple(devices)), options)
    return executable.hlo_modules()[0].to_string()


def facts(program: str) -> dict:
    """Return {"arguments", "results", "kernels": shapes, "collectives": {kind: shapes}} of one chip's program.

    kernels: the first result of each Pallas kernel. Shapes are those of the chip's shards.
    """
    layout = re.search(r"entry_computation_layout=\{\((.*)\)->\((.*)\)\}", program.partition("\n")[0])
    assert layout is not None
    kernels: list[list[int]] = []
    collectives: dict[str, list[list[int]]] = {}
    for line in program.splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            kernels.append(_shapes(line.partition(" = ")[2])[0])
        elif found := _COLLECTIVE.search(line):
            collectives.setdefault(found[2], []).extend(_shapes(found[1]))
        if "calls=%all-reduce-scatter" in line:  # libtpu fuses an all-reduce with the slice that a chip keeps
            collectives.setdefault("reduce-scatter", []).extend(
                _shapes(line.partition(" = ")[2].partition(" fusion(")[0])
            )
    return {
        "arguments": _shapes(layout[1]), "results": _shapes(layout[2]), "kernels": kernels, "collectives": collectives,
    }  # fmt: skip


def _shapes(text: str) -> list[list[int]]:
    return [[int(n) for n in sizes.split(",") if n] for sizes in _SHAPE.findall(text)]


def main(chips: int, strategies: list[str], overrides: list[str]) -> dict[str, dict]:
    """Return facts() by strategy. Must be the process's first use of torch_xla."""
    if chips not in TOPOLOGIES:
        raise UsageError(
            f"number of v5e chips must be one of {', '.join(map(str, TOPOLOGIES))}; got {chips}",
            code="tpu_estimate.chips",
            chips=chips,
        )
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(chips), "JAX_PLATFORMS": "cpu"}
    return {name: facts(compile_for(record(name, *overrides), chips)) for name in strategies}


if __name__ == "__main__":
    found = main(int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
    for strategy, one in found.items():
        counts = {kind: len(shapes) for kind, shapes in one["collectives"].items()}
        kernels = dict(Counter(map(str, one["kernels"])))
        print(f"{strategy} on {sys.argv[1]} v5e chips: kernels {kernels}, {counts}", file=sys.stderr)
    print(json.dumps(found))
