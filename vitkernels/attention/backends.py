"""The attention backends: their names, and the choice among them.

To add a backend to this package, add a file to this folder that ends in `BACKEND = Mine()`, a line to `OP`, and a YAML
file to conf/attn/. To add one from another package, call `register`, or declare an entry point in the group
`vitkernels.attention` that names the backend:

    [project.entry-points."vitkernels.attention"]
    mine = "my_package.my_module:BACKEND"

The conformance suite, the benchmarks and the doctor find the backend by its name.
"""

import inspect
import logging
from collections.abc import Iterable, Sequence
from functools import cache
from types import ModuleType

from vitkernels.attention.contract import AttentionBackend, forget_dispatch
from vitkernels.attention.problem import Problem
from vitkernels.errors import UsageError
from vitkernels.registry.op import Op, passed_over, place_of

log = logging.getLogger(__name__)


def _adapted(loaded: object) -> AttentionBackend:
    backend = getattr(loaded, "BACKEND", None) if isinstance(loaded, ModuleType) else loaded
    if not isinstance(backend, AttentionBackend) or not hasattr(backend, "name"):
        what = f"{loaded.__name__}.BACKEND" if isinstance(loaded, ModuleType) else repr(loaded)
        raise TypeError(f"{what} must be an instance of a vitkernels.attention.AttentionBackend subclass with a name")
    return backend


# The order on CUDA was measured on an H200 at 14 shapes of 50 to 4096 tokens (results/attention.jsonl; pallas_flash
# supports no other NVIDIA generation). The order on TPU rests on estimates from the compiler's schedule, not on runs.
OP = Op(
    "attention",
    {
        "native": "vitkernels.attention.native",
        "sdpa": "vitkernels.attention.sdpa",
        "pallas_flash": "vitkernels.attention.pallas_flash",
        "triton_flash": "vitkernels.attention.triton_flash",
        "auto": "vitkernels.attention.auto",
    },
    auto={
        "cpu": ("sdpa",),
        "cuda": ("pallas_flash", "triton_flash", "sdpa"),
        "tpu": ("pallas_flash", "sdpa"),
        "xla": ("sdpa",),
    },
    fallback="native",
    group="vitkernels.attention",
    adapt=_adapted,
)


def names() -> tuple[str, ...]:
    """Return every backend's name, other packages' backends last; `auto` is included and chooses among the others."""
    return OP.names()


def get(name: str) -> AttentionBackend:
    """Return the backend with this name; raise UsageError (a ValueError) with the known names if there is none.

    Errors from importing the backend propagate.
    """
    return OP.get(name)


def configured(name: str, options: dict) -> AttentionBackend:
    """Return the named backend with these options; raise UsageError "attention.options" for others than it takes."""
    backend = get(name)
    try:
        inspect.signature(backend.configured).bind(**options)
    except TypeError as error:
        message = f"attention backend {name!r} does not take the options {', '.join(options)}: {error}"
        raise UsageError(message, code="attention.options", backend=name, options=tuple(options)) from error
    return backend.configured(**options)


def broken(name: str) -> str | None:
    """Return why the backend cannot be imported; None if it can. Each import is tried once."""
    return OP.broken(name)


def register(
    name: str, backend: AttentionBackend | ModuleType | str, auto_for: str | Iterable[str] | None = None
) -> None:
    """Register a backend for this process.

    Args:
        name: an unused name, or the name of an entry point with the same target, to let `auto` choose that backend.
        backend: an AttentionBackend, a module with one in `BACKEND`, or "package.module:ATTRIBUTE" to import at first
            use.
        auto_for: where `auto` tries it before all others: "cpu", "cuda", "tpu" or "xla" (an XLA device other than a
            TPU), or several of these. By default `auto` never chooses the backend.

    Raises UsageError if the name is taken; the message names both sources.
    """
    OP.register(name, backend, auto_for)
    _forget_choices()


def unregister(name: str) -> None:
    """Remove a backend that `register` added, for example before registering it again from an edited notebook cell."""
    OP.unregister(name)
    _forget_choices()


def _forget_choices() -> None:
    chosen.cache_clear()
    forget_dispatch()


def unsupported(name: str, problem: Problem) -> str | None:
    """Return why the backend does not support the problem, or why its import failed; None if it supports it."""
    return OP.unsupported(name, problem)


def candidates(device_type: str) -> tuple[str, ...]:
    """Return the backends that `auto` tries on a type of device, usually the fastest first.

    `choose` tries those last that are slower for its problem; see AttentionBackend.is_slower.
    """
    return OP.auto.get(place_of(device_type), (OP.fallback,))


def choose(problem: Problem) -> tuple[str, dict[str, str]]:
    """Return the fastest backend that supports the problem, and why each faster one was passed over."""
    order = candidates(problem.device_type)
    slower = [name for name in order if OP.broken(name) is None and get(name).is_slower(problem)]
    return OP.choose([*(name for name in order if name not in slower), *slower], problem)


@cache
def chosen(problem: Problem) -> AttentionBackend:
    """Return the backend that `auto` chooses; log the choice once per problem."""
    name, refused = choose(problem)
    log.info("attention: auto chose %s for %s%s", name, problem, passed_over(refused))
    return get(name)


def choose_for_all(name: str, problems: Sequence[Problem]) -> str:
    """Return the name of the backend for a model's problems: the named one, or for "auto" the fastest of all.

    With "auto", the backends that were passed over are logged with the reasons; if one backend does not suit all
    problems, the name is "auto", which chooses per call. Raises UsageError
    "attention.unsupported_model" if the named backend refuses a problem; its fields are `backend`, `reason`, and
    `others`, the names of the backends that support the problem.
    """
    if name == "auto":
        choices = dict(choose(problem) for problem in problems)
        log.info(
            "attention: auto chose %s for the model%s",
            " and ".join(choices),
            "".join(map(passed_over, choices.values())),
        )
        if len(choices) > 1:
            return name  # each call runs the backend that was chosen for it
        name = next(iter(choices))
    for problem in problems:
        reason = unsupported(name, problem)
        if reason is not None:
            others = [other for other in names() if other not in (name, "auto") and unsupported(other, problem) is None]
            raise UsageError(
                f"attention backend {name!r} cannot run this model here: {reason}; these can: {', '.join(others)}",
                code="attention.unsupported_model",
                backend=name,
                reason=reason,
                others=others,
            )
    return name
