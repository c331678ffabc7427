"""Compile for a TPU without a TPU: libtpu's own compiler, Mosaic included, on a compile-only device description.

A kernel that exceeds VMEM, or that uses a feature Mosaic does not support, fails here as it would on the chip. Requires
the libtpu wheel (the tpu extra, Linux x86-64). Nothing is executed, so times and memory sizes are estimates.
"""

import importlib.util
import os
import re
from functools import cache

from vitkernels.bridge.jax_compat import jax
from vitkernels.errors import UsageError
from vitkernels.tpu_estimate import chips


def unavailable() -> str | None:
    """Return why this machine cannot compile for TPUs, or None if it can."""
    if importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed: pip install 'vitkernels[tpu]' (Linux x86-64)"
    return None


@cache
def device(chip: str = "v5e"):
    """Return a compile-only device; raise UsageError if the chip is unknown or libtpu is missing."""
    topology = chips.chip(chip).topology
    if (reason := unavailable()) is not None:
        raise UsageError(reason, code="tpu_estimate.no_libtpu")
    from jax.experimental import topologies

    # Without this, libtpu queries the cloud metadata server for this machine's slice until the request times out.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is opened, so no lock on it is needed
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]


def compile_jax(function, shapes, own_layouts: bool = False, chip: str = "v5e"):
    """Compile `function` for the chip, given jax.ShapeDtypeStructs; return a jax.stages.Compiled that cannot be called.

    The arguments are those of `trace_jax`. Raises whatever the compiler raises.
    """
    return trace_jax(function, shapes, own_layouts, chip).lower().compile()


def trace_jax(function, shapes, own_layouts: bool = False, chip: str = "v5e"):
    """Trace `function` for the chip, given jax.ShapeDtypeStructs; return a jax.stages.Traced.

    Args:
        own_layouts: let the compiler choose the layouts of arguments and results, as it does between the layers of a
            model. Otherwise they have XLA's default layouts: for (B, N, E) with an odd N, N is outermost, which adds
            copies at both ends.
    """
    from jax.experimental.layout import Format, Layout

    sharding = jax.sharding.SingleDeviceSharding(device(chip))
    placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)
    edges = Format(Layout.AUTO, sharding) if own_layouts else None
    return jax.jit(function, in_shardings=edges, out_shardings=edges).trace(*placed)


def compile_hlo(module: bytes, chip: str = "v5e", aliases: dict[int, int] | None = None, own_layouts: bool = False):
    """Compile a serialized HLO module, such as a torch_xla graph, for the chip; return the executable.

    Args:
        aliases: {parameter: output} pairs that share memory, such as a training step's weights before and after.
        own_layouts: as in `compile_jax`; only for a module without aliases.
    """
    from jax._src.lib import _jax, xla_client

    target = device(chip)
    text = _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(module))
    text = _with_own_layouts(text) if own_layouts else _with_aliases(text, aliases or {})
    return target.client.compile(text.encode(), _jax.DeviceList((target,)), xla_client.CompileOptions())


def _with_aliases(text: str, aliases: dict[int, int]) -> str:
    """Return the MLIR module with the aliased arguments of its main function marked, as jax.jit marks donated ones."""
    head, main, rest = text.partition("@main(")
    arguments, end, body = rest.partition(") -> ")

    def marked(found: re.Match) -> str:
        if (output := aliases.get(int(found[1]))) is None:
            return found[0]
        return f"{found[0]} {{tf.aliasing_output = {output} : i32}}"

    return head + main + re.sub(r"%arg(\d+): tensor<[^>]*>", marked, arguments) + end + body


def _with_own_layouts(text: str) -> str:
    """Return the MLIR module with arguments and results of its main function marked as jax.jit marks Layout.AUTO."""
    head, main, rest = text.partition("@main(")
    signature, end, body = rest.partition(" {\n")
    arguments, to, results = signature.partition(" -> ")
    results = results if results.startswith("(") else f"({results})"
    marked = re.sub(
        r"tensor<[^>]*>", lambda found: f'{found[0]} {{mhlo.layout_mode = "auto"}}', arguments + to + results
    )
    return head + main + marked + end + body
