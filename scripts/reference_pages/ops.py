"""The page of the ops: their backends and the order in which `auto` tries them."""

import ast
import sys
from pathlib import Path

from reference_pages.markdown import ROOT, escaped, first_paragraph, table
from vitkernels import ops
from vitkernels.registry.op import PLACES, op_of

# Descriptions of backends whose modules have no docstring.
SUMMARIES = {
    "reference": "Plain PyTorch.",
    "passes": "The library's products, with one pass of a Triton kernel for GELU.",
    "triton": "Triton kernels.",
    "pallas_hopper": "Mosaic-GPU Pallas kernels for NVIDIA Hopper.",
}


def ops_page() -> str:
    """Return the page of the fused ops: their backends and the order in which `auto` tries them."""
    parts = [
        "# Backends of the ops",
        'Each op of `vitkernels.ops` takes `backend="auto"` or a name. A named backend runs or raises; `auto` uses '
        "the first backend that supports the call, or else `reference`. On a GPU, the order measured by "
        "`python -m vitkernels.tune` takes precedence.",
    ]
    for name in ops.__all__:
        function = getattr(ops, name)
        if not callable(function) or not hasattr(sys.modules.get(function.__module__), "BACKENDS"):
            continue
        op = op_of(function)
        if op.name != name:
            continue
        rows = [(f"`{backend}`", escaped(_module_summary(op.source(backend)))) for backend in op.names()]
        order = [f"{p}: {', '.join(f'`{n}`' for n in op.auto[p])}" for p in PLACES if op.auto.get(p)]
        parts += [f"## {name}", first_paragraph(function.__doc__), table(("backend", "what it is"), rows)]
        parts.append(f"Order of `auto`: {'; '.join(order)}; elsewhere `{op.fallback}`.")
    return "\n\n".join(parts) + "\n"


def _module_summary(source) -> str:
    """Return the first paragraph of a backend's docstring, without importing it: the import may fail here."""
    path = ROOT / Path(*str(source.target).partition(":")[0].split(".")).with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text())) or SUMMARIES[path.stem]
    return text.split("\n\n")[0].replace("\n", " ")
