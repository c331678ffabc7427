"""Compile for a TPU with no TPU: libtpu's real compiler, Mosaic included, on a compile-only description of the chip.

A kernel that exceeds VMEM or uses what Mosaic lacks fails here as it would on the chip. Needs the libtpu wheel (the tpu
extra, Linux x86-64). What it says of time and memory is an estimate; nothing runs.
"""

import importlib.util
import os
import re
from functools import cache

from vitkernels.bridge.jax_compat import jax
from vitkernels.errors import UsageError
from vitkernels.tpu_estimate import chips


def unavailable() -> str | None:
    """Why nothing can be compiled for a TPU here; None when it can."""
    if importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed: pip install 'vitkernels[tpu]' (Linux x86-64)"
    return None


@cache
def device(chip: str = "v5e"):
    """A compile-only device; raises UsageError when the chip is unknown or libtpu is missing."""
    topology = chips.chip(chip).topology
    if (reason := unavailable()) is not None:
        raise UsageError(reason)
    from jax.experimental import topologies

    # libtpu otherwise asks the cloud's metadata server, at length, which slice this machine is.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing is opened: no lock on the chip is needed
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]


def compile_jax(function, shapes, own_layouts: bool = False, chip: str = "v5e"):
    """`function` on jax.ShapeDtypeStructs, compiled for the chip: a jax.stages.Compiled that cannot be called.

    own_layouts: its arrays and results lie as suits it best, as between the layers of a model. Otherwise as XLA lays
    arrays out at a program's edge, which for (B, N, E) with an odd N is N outermost, and copies stand at both ends.
    Raises what the compiler raises.
    """
    from jax.experimental.layout import Format, Layout

    sharding = jax.sharding.SingleDeviceSharding(device(chip))
    placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)
    edges = Format(Layout.AUTO, sharding) if own_layouts else None
    return jax.jit(function, in_shardings=edges, out_shardings=edges).trace(*placed).lower().compile()


def compile_hlo(module: bytes, chip: str = "v5e", aliases: dict[int, int] | None = None, own_layouts: bool = False):
    """A serialized HLO module (a torch_xla graph's, or the bridge's) compiled for the chip: an executable.

    aliases: {parameter: output} that share memory, as a training step's weights do with the updated ones.
    own_layouts: as in compile_jax, of a module without aliases.
    """
    from jax._src.lib import _jax, xla_client

    target = device(chip)
    text = _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(module))
    text = _with_own_layouts(text) if own_layouts else _with_aliases(text, aliases or {})
    return target.client.compile(text.encode(), _jax.DeviceList((target,)), xla_client.CompileOptions())


def _with_aliases(text: str, aliases: dict[int, int]) -> str:
    """The MLIR module with its main function's aliased arguments marked, as jax.jit marks donated ones."""
    head, main, rest = text.partition("@main(")
    arguments, end, body = rest.partition(") -> ")

    def marked(found: re.Match) -> str:
        if (output := aliases.get(int(found[1]))) is None:
            return found[0]
        return f"{found[0]} {{tf.aliasing_output = {output} : i32}}"

    return head + main + re.sub(r"%arg(\d+): tensor<[^>]*>", marked, arguments) + end + body


def _with_own_layouts(text: str) -> str:
    """The MLIR module with its main function's arguments and results marked, as jax.jit marks Layout.AUTO."""
    head, main, rest = text.partition("@main(")
    signature, end, body = rest.partition(" {\n")
    arguments, to, results = signature.partition(" -> ")
    results = results if results.startswith("(") else f"({results})"
    marked = re.sub(
        r"tensor<[^>]*>", lambda found: f'{found[0]} {{mhlo.layout_mode = "auto"}}', arguments + to + results
    )
    return head + main + marked + end + body
