"""The pages of the Python API, for autodoc, and docstrings in reStructuredText."""

import importlib
import re

# Modules whose public names the API reference documents, with a heading each.
API = {
    "attention": ("vitkernels.attention",),
    "ops": ("vitkernels.ops",),
    "bridge": ("vitkernels.bridge",),
    "jax": ("vitkernels.jax",),
    "models": ("vitkernels.models",),
    "quant": ("vitkernels.quant",),
    "optim": ("vitkernels.optim",),
    "training": (
        "vitkernels.training.setup",
        "vitkernels.training.trainer",
        "vitkernels.training.distillation",
        "vitkernels.training.plan",
        "vitkernels.training.evaluate",
        "vitkernels.training.loggers",
        "vitkernels.training.loggers.base",
    ),
    "data": ("vitkernels.data", "vitkernels.data.loader"),
    "config": ("vitkernels.config", "vitkernels.config.compose"),
    "registry": ("vitkernels.registry.op",),
    "errors": ("vitkernels.errors",),
    "testing": ("vitkernels.testing",),
}
_SECTION = re.compile(r"\s*(Args|Returns|Raises|Yields|Attributes):")
_ENTRY = re.compile(r"(\s*)([a-z_*][\w*]*(?:, [a-z_*][\w*]*)*): (.*)")


def api_pages() -> dict[str, str]:
    """Return a page per entry of API, for autodoc."""
    pages = {}
    for name, modules in API.items():
        found = [module for module in modules if _exists(module)]
        if not found:
            continue
        title = f"vitkernels.{name}"
        parts = [f"# {title}"]
        for module in found:
            parts += [f"## {module}"] if len(found) > 1 else []
            parts.append(_autodoc(module))
        pages[name] = "\n\n".join(parts) + "\n"
    return pages


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _autodoc(module: str) -> str:
    """Return the directives that document the module and the public names it lists or defines."""
    loaded = importlib.import_module(module)
    public = getattr(loaded, "__all__", None) or [
        name for name, value in vars(loaded).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    ]  # fmt: skip
    lines = ["```{eval-rst}", f".. automodule:: {module}", "   :no-members:", ""]
    for name in sorted(public, key=str.lower):
        value = getattr(loaded, name)
        if isinstance(value, type):
            lines += [f".. autoclass:: {module}.{name}", "   :members:", ""]
        elif callable(value):
            lines += [f".. autofunction:: {module}.{name}", ""]
        else:
            lines += [f".. autodata:: {module}.{name}", "   :no-value:", ""]
    return "\n".join([*lines, "```"])


def to_rst(app, what, name, obj, options, lines: list[str]) -> None:
    """Turn a docstring of this package, which is nearly Markdown, into reStructuredText, in place.

    Sections such as "Args:" stay as they are, for napoleon. Indented text after an empty line becomes a literal block,
    and lines of the form "name: description" become a list.
    """
    if what == "data" and (type(obj).__doc__ or "").split() == " ".join(lines).split():
        lines[:] = []  # the type's docstring, not that of the value
        return
    converted: list[str] = []
    section = literal = item = None  # indentation of the section's header, the literal block, the list entry
    for line in lines:
        indent = len(line) - len(line.lstrip())
        before = converted[-1] if converted else ""
        if not line.strip():
            converted.append("")
            continue
        if section is not None and indent > section:
            converted.append(_inline(line))
            continue
        section = indent if _SECTION.fullmatch(line) else None
        if literal is not None and indent < literal:
            literal = None
        if literal is None and indent >= 4 and before == "" and converted:
            literal = indent
            converted += ["::", ""]
        entry = _ENTRY.fullmatch(line)
        starts = not before.strip() or (item is not None and indent <= item) or bool(indent)
        if not before.strip():
            item = None
        if literal is not None:
            converted.append(line)
        elif entry and starts:
            converted += ["", f"{entry[1]}- **{_inline(entry[2])}**: {_inline(entry[3])}"]
            item = indent
        elif item is not None:
            converted.append(" " * (item + 2) + _inline(line.strip()))
        else:
            converted.append(_inline(line))
    lines[:] = converted


def _inline(line: str) -> str:
    """Turn `code` into ``code`` and escape what reStructuredText would read as markup."""
    parts = re.split(r"(`+[^`]+`+)", line)
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = f"``{part.strip('`')}``"
        else:
            part = part.replace("\\", "\\\\").replace("*", "\\*").replace("|", "\\|")
            parts[i] = re.sub(r"(?<=\w)_(?=\W|$)", r"\\_", part)
    return "".join(parts)
