"""Write the reference pages that are generated from the code; docs/conf.py calls this before each build.

python scripts/docs_reference.py [FOLDER]                 # docs/reference/generated
"""

import ast
import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from vitkernels import attention, ops  # noqa: E402
from vitkernels.attention import Problem  # noqa: E402
from vitkernels.config import Config  # noqa: E402
from vitkernels.config.setting import Setting, expected, groups_of, in_yaml, settings_of  # noqa: E402
from vitkernels.models.adapters import ADAPTERS, REFUSED  # noqa: E402
from vitkernels.registry.op import PLACES, op_of  # noqa: E402

DEVICES = {"cpu": "CPU", "cuda": "NVIDIA GPU", "xla": "TPU"}
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
HEAD_DIMS = range(1, 300)
# Backends whose kernels run only interpreted on a CPU, for tests.
INTERPRETED = ("triton_flash", "pallas_flash")
# One keyword of a call per feature.
FEATURES = {
    "bias": {"bias_shape": (2, 3, 197, 197)},
    "mask": {"has_mask": True, "mask_shape": (2, 3, 197, 197)},
    "segment_ids": {"has_segment_ids": True},
    "is_causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.1},
    "cross": {"kv_tokens": 64},
    "empty batch": {"batch": 0},
}
# Descriptions of backends whose modules have no docstring.
SUMMARIES = {
    "reference": "Plain PyTorch.",
    "passes": "The library's products, with one pass of a Triton kernel for GELU.",
    "triton": "Triton kernels.",
    "pallas_hopper": "Mosaic-GPU Pallas kernels for NVIDIA Hopper.",
}
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


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)])


def write_pages(folder: Path) -> list[Path]:
    """Write every generated page to `folder` and return their paths. Unchanged files keep their modification time."""
    pages = {
        "configuration.md": configuration_page(),
        "attention_backends.md": attention_page(),
        "op_backends.md": ops_page(),
        "timm_attention.md": timm_attention_page(),
        "error_codes.md": error_codes_page(),
        **{f"api_{name}.md": text for name, text in api_pages().items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return [folder / name for name in pages]


# ---------------------------------------------------------------------------------------------------- configuration


def configuration_page() -> str:
    """Return the page of all settings: type, default, unit and one sentence each."""
    parts = [
        "# Configuration",
        "Every setting of `python train.py`, from the typed configuration in `vitkernels.config`. A setting is written "
        "`name=value`, one in a group `group.name=value`, and an option of a group `group=option`. "
        "`python train.py --cfg job` prints the values in force.",
        "## Top level",
        _settings_table(settings_of(Config)),
    ]
    for name, group in groups_of(Config).items():
        parts += [f"## {name}", _first_paragraph(group.__doc__), _settings_table(settings_of(group), f"{name}.")]
        options = _options(name)
        if options:
            parts.append(f"Options of the group, `{name}=...`:")
            parts.append(table(("option", "sets"), [(f"`{name}={o}`", text) for o, text in options]))
        if name == "data":
            parts += [_data_set(option) for option, _ in options]
    parts += ["## experiment", "Complete recipes; an experiment sets values of the other groups."]
    parts.append(table(("option", "is"), [(f"`experiment={o}`", text) for o, text in _options("experiment")]))
    return "\n\n".join(parts) + "\n"


def _settings_table(settings: Iterable[Setting], prefix: str = "") -> str:
    rows = []
    for each in settings:
        if each.description.collects_rest:
            rows.append((f"`{prefix}...`", "any", "–", each.text))
            continue
        default = "required" if each.default == "???" else f"`{in_yaml(each.default)}`"
        kind = expected(each) + (f", {each.description.unit}" if each.description.unit else "")
        rows.append((f"`{prefix}{each.name}`", kind, default, each.text))
    return table(("setting", "value", "default", "meaning"), rows)


def _options(group: str) -> list[tuple[str, str]]:
    """Return (option, first sentence of its file's comment) for each file of a group in conf/."""
    found = []
    for path in sorted((ROOT / "conf" / group).glob("*.yaml")):
        comment = []
        for line in path.read_text().splitlines():
            if not line.startswith("# "):
                if comment:
                    break
                continue
            comment.append(line.removeprefix("# "))
        text = " ".join(line for line in comment if not line.startswith("@package"))
        found.append(
            (path.stem, _escaped(re.split(r"(?<=[a-z\d)\]])[.:] (?=[A-Z])|: (?=model=)", text)[0].rstrip(".")))
        )
    return found


def _data_set(option: str) -> str:
    return f"### data={option}\n\n```{{literalinclude}} ../../../conf/data/{option}.yaml\n:language: yaml\n```"


# ---------------------------------------------------------------------------------------------------------- backends


def refusal(name: str, device_type: str, **changes) -> str | None:
    """Return why the attention backend refuses a problem on a machine with the device; None if it supports it."""
    problem = {
        "batch": 2, "heads": 3, "q_tokens": 197, "kv_tokens": 197, "head_dim": 64, "dtype": torch.bfloat16,
        "device_type": device_type,
    }  # fmt: skip
    backend = attention.get(name)
    module = importlib.import_module(type(backend).__module__)
    # The Hopper kernels may be missing here; the table describes machines that have them.
    with mock.patch.object(module, "_no_hopper", None, create=True):
        return backend.refusal(Problem(**problem | changes))


def _dtypes(name: str, device_type: str) -> list[torch.dtype]:
    return [dtype for dtype in DTYPES if refusal(name, device_type, dtype=dtype) is None]


def _head_dims(name: str, device_type: str, dtype: torch.dtype) -> str:
    taken = [d for d in HEAD_DIMS if refusal(name, device_type, head_dim=d, dtype=dtype) is None]
    if len(taken) == len(HEAD_DIMS):
        return "any"
    return f"{taken[0]}, {taken[1]}, …, {taken[-1]}"


def backend_names() -> list[str]:
    """Return this package's attention backends, without `auto`."""
    return [name for name in attention.names() if name != "auto" and not attention.backends.OP.source(name).provider]


def support_rows() -> list[tuple[str, ...]]:
    """Return (backend, device, dtypes, head dims, yes or no per feature) for each backend and supported device."""
    rows = []
    for name in backend_names():
        for device, label in DEVICES.items():
            dtypes = _dtypes(name, device)
            if not dtypes:
                continue
            label += " (interpreted)" if device == "cpu" and name in INTERPRETED else ""
            label = "NVIDIA Hopper" if device == "cuda" and name == "pallas_flash" else label
            marks = [
                "yes" if refusal(name, device, dtype=dtypes[0], **changes) is None else "no"
                for changes in FEATURES.values()
            ]
            names = ", ".join(DTYPES[dtype] for dtype in dtypes)
            rows.append((f"`{name}`", label, names, _head_dims(name, device, dtypes[0]), *marks))
    return rows


def _merged(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the rows, merging a backend's devices if everything else is equal."""
    devices: dict[tuple[str, ...], list[str]] = {}
    for name, device, *figures in rows:
        devices.setdefault((name, *figures), []).append(device)
    return [(name, ", ".join(found), *figures) for (name, *figures), found in devices.items()]


def attention_page() -> str:
    """Return the page that lists what each attention backend supports, from its own `refusal`."""
    names = backend_names()
    parts = [
        "# Attention backends",
        "What each backend supports. The table calls the backend's own `refusal` for one property at a time. "
        "`attention.get(name).unsupported(...)` checks a particular call on your machine and returns the reason. All "
        "backends support any number of tokens and any scale. `cross`: fewer or more keys than queries.",
        table(("backend", "device", "dtypes", "head dims", *FEATURES), _merged(support_rows())),
        "On a CPU, `triton_flash` and `pallas_flash` run interpreted: slow, for tests only. On NVIDIA GPUs, "
        "`pallas_flash` requires a Hopper GPU and jax 0.11.2 or newer.",
        "## Reasons for a refusal",
        table(("backend", "device", "property", "reason"), _reasons(names)),
        "## Order of `auto`",
        "`auto` uses the first backend of this list that supports the call:",
        table(("device", "order"), _auto_orders()),
    ]
    return "\n\n".join(parts) + "\n"


def timm_attention_page() -> str:
    """Return the page that lists the attention classes with an adapter, and those without, with the reason."""
    taken = sorted((f"`{name}`", _first_paragraph(adapter.__doc__)) for name, adapter in ADAPTERS.items())
    refused = sorted((f"`{name}`", reason) for name, reason in REFUSED.items())
    parts = [
        "# Attention classes",
        "`create_model`, `set_attention` and `accelerate` replace modules of these classes. Parameters and state-dict "
        "keys do not change. `attention_plan(model)` lists the modules of a model that they would replace, and the "
        "reason for each that they would not.",
        table(("class", "how a backend computes it"), taken),
        "## Computed by timm",
        table(("class", "reason"), refused),
        "Modules of other classes whose name contains Attention or Attn are also left unchanged, and the log "
        "lists them.",
    ]
    return "\n\n".join(parts) + "\n"


def _auto_orders() -> list[tuple[str, str]]:
    places = {"cpu": "CPU", "cuda": "NVIDIA GPU", "tpu": "TPU", "xla": "an XLA device other than a TPU"}
    order = attention.backends.OP.auto
    return [(label, ", ".join(f"`{name}`" for name in order[place])) for place, label in places.items()]


def _reasons(names: Iterable[str]) -> list[tuple[str, ...]]:
    rows = {}
    for name in names:
        for device, label in DEVICES.items():
            dtypes = _dtypes(name, device)
            if not dtypes:
                rows[name, refusal(name, device)] = (f"`{name}`", label, "any call")
                continue
            probes = {f"dtype {DTYPES[d]}": {"dtype": d} for d in DTYPES} | {"head dim 36": {"head_dim": 36}} | FEATURES
            for what, changes in probes.items():
                reason = refusal(name, device, **{"dtype": dtypes[0]} | changes)
                if reason is not None:
                    rows.setdefault((name, reason), (f"`{name}`", label, what))
    return [(*cells, _escaped(reason)) for (_, reason), cells in rows.items()]


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
        rows = [(f"`{backend}`", _escaped(_module_summary(op.source(backend)))) for backend in op.names()]
        order = [f"{p}: {', '.join(f'`{n}`' for n in op.auto[p])}" for p in PLACES if op.auto.get(p)]
        parts += [f"## {name}", _first_paragraph(function.__doc__), table(("backend", "what it is"), rows)]
        parts.append(f"Order of `auto`: {'; '.join(order)}; elsewhere `{op.fallback}`.")
    return "\n\n".join(parts) + "\n"


def _module_summary(source) -> str:
    """Return the first paragraph of a backend's docstring, without importing it: the import may fail here."""
    path = ROOT / Path(*str(source.target).partition(":")[0].split(".")).with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text())) or SUMMARIES[path.stem]
    return text.split("\n\n")[0].replace("\n", " ")


# ------------------------------------------------------------------------------------------------------- error codes


def _inserted(part: ast.FormattedValue) -> str:
    return f"<{ast.unparse(part.value).partition('(')[0].strip('_')}>"


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


# --------------------------------------------------------------------------------------------------------------- API


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


_SECTION = re.compile(r"\s*(Args|Returns|Raises|Yields|Attributes):")
_ENTRY = re.compile(r"(\s*)([a-z_*][\w*]*(?:, [a-z_*][\w*]*)*): (.*)")


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


def _first_paragraph(text: str | None) -> str:
    return " ".join(line.strip() for line in (text or "").split("\n\n")[0].splitlines())


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def main(arguments: list[str] | None = None) -> None:
    folder, *_ = [*(sys.argv[1:] if arguments is None else arguments), ROOT / "docs/reference/generated"]
    for path in write_pages(Path(folder)):
        print(f"written: {path}")


if __name__ == "__main__":
    main()
