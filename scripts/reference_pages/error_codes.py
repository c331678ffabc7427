"""The page of error codes, found in the source of the package."""

import ast

from reference_pages.markdown import ROOT, table

CODES_EXAMPLE = """\
```python
import torch

from vitkernels import attention
from vitkernels.errors import UsageError

q = torch.zeros(1, 2, 4, 32)
try:
    attention.get("sdpa")(q, q[..., :16], q)
except UsageError as error:
    assert error.code == "attention.shape"
```"""


def error_codes() -> dict[str, list[str]]:
    """Return every code of a UsageError in the package, with the modules that raise it."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "vitkernels").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "code" and (code := _code(node.value)):
                found.setdefault(code, set()).add(module)
    return {code: sorted(found[code]) for code in sorted(found)}


def _code(node: ast.expr) -> str | None:
    """Return a literal code; an inserted value becomes <name>."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (
            p.value if isinstance(p, ast.Constant) else f"<{ast.unparse(p.value).split('(')[0].strip('_')}>"
            for p in node.values
        )
        return "".join(parts)  # fmt: skip
    return None


def error_codes_page() -> str:
    """Return the page of error codes."""
    rows = [(f"`{code}`", ", ".join(f"`{module}`" for module in modules)) for code, modules in error_codes().items()]
    parts = [
        "# Error codes",
        "A mistake in a call or a setting raises `vitkernels.errors.UsageError`, a `ValueError`. Its message states "
        "the expected value, the actual value and the fix. Programs should test its `code` and `fields`, which stay "
        "the same when the wording changes:",
        CODES_EXAMPLE,
        "`<name>` stands for a part that depends on the call.",
        table(("code", "raised by"), rows),
    ]
    return "\n\n".join(parts) + "\n"
