"""The pages on attention: what each backend supports, and the attention classes of timm."""

import importlib
from collections.abc import Iterable
from unittest import mock

import torch

from reference_pages.markdown import escaped, first_paragraph, table
from vitkernels import attention
from vitkernels.attention import Problem
from vitkernels.models.adapters import ADAPTERS, REFUSED

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
        "`auto` uses the first backend of this list that supports the call. On NVIDIA GPUs, it tries `triton_flash` "
        "before `pallas_flash` for up to 64 tokens with a head dim of at most 32, or with a bias and a head dim other "
        "than 64; and for up to 256 tokens with segment ids, no other extras and a head dim of at most 32:",
        table(("device", "order"), _auto_orders()),
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
    return [(*cells, escaped(reason)) for (_, reason), cells in rows.items()]


def timm_attention_page() -> str:
    """Return the page that lists the attention classes with an adapter, and those without, with the reason."""
    taken = sorted((f"`{name}`", first_paragraph(adapter.__doc__)) for name, adapter in ADAPTERS.items())
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
