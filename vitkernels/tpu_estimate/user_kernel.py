"""Estimate a Pallas kernel of any module by its name: time, bytes, FLOPs, VMEM, what bounds it, and its best blocks.

The module is imported in the compiling process only, where JAX has no TPU.
"""

import ast
import importlib
import itertools
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from vitkernels.errors import UsageError, unknown_name
from vitkernels.tpu_estimate import bounds
from vitkernels.tpu_estimate.chips import Chip
from vitkernels.tpu_estimate.compile_process import compile_in
from vitkernels.tpu_estimate.estimate import ProgramEstimate, estimate_program

DTYPES = {
    "bf16": "bfloat16", "f16": "float16", "f32": "float32", "s8": "int8", "s16": "int16", "s32": "int32",
    "i8": "int8", "i16": "int16", "i32": "int32", "u8": "uint8", "u16": "uint16", "u32": "uint32",
    "s4": "int4", "i4": "int4", "u4": "uint4", "bool": "bool", "pred": "bool",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip
_ARRAY = re.compile(r"(\w+)\[([\d, ]*)\]")


def parse_shapes(text: str) -> list[tuple[str, list[int]]]:
    """Return (dtype, sizes) of each array in a text such as `bf16[128,197,64],f32[]`."""
    left = _ARRAY.sub("", text)
    if left.strip(" ,") or not _ARRAY.search(text):
        message = f"shapes {text!r}: expected DTYPE[SIZE,...] separated by commas, such as bf16[128,197,64],f32[64]"
        raise UsageError(message, code="tpu_estimate.shapes", shapes=text)
    arrays = []
    for name, sizes in _ARRAY.findall(text):
        if name not in DTYPES and name not in DTYPES.values():
            raise unknown_name("dtype", name, DTYPES)
        arrays.append((DTYPES.get(name, name), [int(n) for n in sizes.split(",") if n.strip()]))
    return arrays


def parse_keywords(words: list[str]) -> dict[str, list[Any]]:
    """Return {name: values} of words such as `block_q=128,256`; values are Python literals, or text."""
    found = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not equals or not name.isidentifier() or not values:
            message = f"{word!r}: expected NAME=VALUE,... with a keyword argument, such as block_q=128,256"
            raise UsageError(message, code="tpu_estimate.keyword", word=word)
        found[name] = [_literal(value) for value in re.split(r",(?![^(\[]*[)\]])", values)]
    return found


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text


def combinations(keywords: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Return every combination of the keywords' values."""
    return [dict(zip(keywords, values, strict=True)) for values in itertools.product(*keywords.values())]


def estimate(
    target: str, shapes: list[tuple[str, list[int]]], keywords: dict[str, Any], chip: Chip, timeout: float = 60
) -> ProgramEstimate:
    """Compile and estimate `target`, a "module:function" of JAX arrays that calls a Pallas kernel.

    Arguments and results have the layouts that suit the kernel best, as between the layers of a model.

    Args:
        keywords: keyword arguments of the function, Python literals.
        timeout: seconds for the compilation.

    Raises UsageError: tpu_estimate.target if the function cannot be imported, tpu_estimate.call if it cannot be traced
    with these shapes, tpu_estimate.no_pallas_call, tpu_estimate.vmem, tpu_estimate.compile or tpu_estimate.timeout.
    """
    with tempfile.TemporaryDirectory(prefix="vitkernels_tpu_") as folder:
        arguments = (target, shapes, keywords)
        try:
            dump = compile_in(Path(folder), f"{__name__}:build", *arguments, chip=chip.name, timeout=timeout)
        except UsageError as error:
            raise _in_terms_of(target, keywords, chip, error) from error
        program = estimate_program(dump)
    program.note = ", ".join(f"{name}={value}" for name, value in keywords.items())
    return program


def _in_terms_of(target: str, keywords: dict, chip: Chip, error: UsageError) -> UsageError:
    """Return the error of a compilation as one line about the user's function."""
    call = f"{target}({', '.join(f'{name}={value}' for name, value in keywords.items())})"
    if error.code == "tpu_estimate.vmem":
        sizes = [error.fields[key] / 2**20 for key in ("needed_bytes", "limit_bytes")]
        needs = f"it needs at least {sizes[0]:.2f} of {sizes[1]:.2f} MiB; use smaller blocks"
        message = f"{call} is out of VMEM on {chip.name}: {needs}"
    elif error.code == "tpu_estimate.compile":
        message = f"{call} does not compile for {chip.name}: {error.fields['reason']}"
    elif error.code == "tpu_estimate.timeout":
        limit = f"{error.fields['timeout']:g} s"
        message = f"{call}: compilation took longer than {limit}; raise the limit with --timeout SECONDS"
    else:
        return error
    return UsageError(message, code=error.code, **error.fields)


def build(target: str, shapes: list, keywords: dict) -> tuple:
    """Return the function, its shapes and own_layouts, as `compile_process.compile_in` takes them."""
    import jax
    import jax.extend.core as jex_core

    from vitkernels.bridge.jax_compat import compiled
    from vitkernels.tpu_estimate.flops import pallas_calls

    function = partial(_function(target), **keywords)
    arrays = [jax.ShapeDtypeStruct(tuple(sizes), dtype) for dtype, sizes in shapes]
    try:
        jaxpr = jax.make_jaxpr(function)(*arrays)
    except Exception as error:
        from vitkernels.tpu_estimate.refusals import one_line

        reason = one_line(f"{type(error).__name__}: {error}")
        given = ", ".join(f"{dtype}{sizes}" for dtype, sizes in shapes)
        message = f"{target} cannot be called with {given} and {keywords}: {reason}"
        raise UsageError(message, code="tpu_estimate.call", reason=reason) from error
    calls = pallas_calls(jaxpr)
    if not calls:
        message = f"{target} calls no Pallas kernel: its trace contains no pallas_call"
        raise UsageError(message, code="tpu_estimate.no_pallas_call", target=target)
    if any(call.params.get("interpret") for call in calls):  # many modules interpret where JAX has no TPU, as here
        function = jex_core.jaxpr_as_fun(compiled(jaxpr))
    return function, arrays, True


def _function(target: str) -> Any:
    module, _, name = target.partition(":")
    if not module or not name:
        message = f"{target!r}: expected MODULE:FUNCTION, such as my_kernels:attention"
        raise UsageError(message, code="tpu_estimate.target", target=target)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        message = f"{target} cannot be imported: {type(error).__name__}: {error}"
        raise UsageError(message, code="tpu_estimate.target", target=target) from error
    if not callable(found):
        raise UsageError(f"{target} is not a function: {found!r}", code="tpu_estimate.target", target=target)
    return found


def facts(program: ProgramEstimate) -> dict:
    """Return the figures of a kernel's program; times in ms, sizes in bytes."""
    schedules = [o.schedule for o in program.operations if o.schedule]
    cycles = sum(schedule.cycles for schedule in schedules)
    ms, flops = program.estimate_ms, program.matrix_flops or 0
    operations = [
        {
            "name": o.name, "kind": "Pallas kernel" if o.kind == "tpu_custom_call" else o.kind,
            "estimate_ms": o.estimate_ms, "bound_by": bounds.binding(o.schedule),
        }
        for o in program.operations
    ]  # fmt: skip
    longest = max((o for o in program.operations if o.schedule), key=lambda o: o.estimate_ms, default=None)
    return {
        "label": "ESTIMATE",
        "chip": program.chip.name,
        "arguments": program.note,
        "estimate_ms": ms,
        "read_bytes": sum(schedule.read for schedule in schedules),
        "written_bytes": sum(schedule.written for schedule in schedules),
        "estimate_memory_ms": program.memory_ms,
        "estimate_compute_ms": program.compute_ms,
        "matrix_flops": flops,
        "share_of_peak": flops / (ms / 1e3 * program.chip.peak_flops) if ms else 0.0,
        "mxu_share": sum(s.busy.get("MXU", 0.0) * s.cycles for s in schedules) / cycles if cycles else 0.0,
        "vmem_bytes": max((o.vmem or 0 for o in program.operations), default=0),
        "spilled_registers": sum(schedule.spills for schedule in schedules),
        "bound_by": "unknown" if longest is None else bounds.binding(longest.schedule),
        "bound_by_sentence": "unknown" if longest is None else bounds.sentence(longest.schedule),  # type: ignore[arg-type]
        "operations": operations,
        "untimed": program.untimed,
    }


def text(found: dict, what: str) -> str:
    """Return the facts as text for the terminal."""
    mib, chip, several = 2**20, found["chip"], len(found["operations"]) > 1
    lines = [
        f"ESTIMATE for TPU {chip}, from the compiler's schedule (no TPU was used): {what}",
        f"  time      {found['estimate_ms']:.4f} ms",
        f"  bound by  {found['bound_by_sentence']}" + (" (the longest operation)" if several else ""),
        f"  bytes     {found['read_bytes'] / mib:.1f} MiB read, {found['written_bytes'] / mib:.1f} MiB written: "
        f"{found['estimate_memory_ms']:.4f} ms of HBM",
        f"  FLOPs     {found['matrix_flops'] / 1e9:.2f} G in matrix products: "
        f"{found['share_of_peak']:.0%} of the chip's bf16 peak",
        f"  MXU       busy for {found['mxu_share']:.0%} of the time",
        f"  VMEM      {found['vmem_bytes'] / mib:.1f} MiB, {found['spilled_registers']} register spills",
    ]
    if several:
        longest = sorted(found["operations"], key=lambda o: -o["estimate_ms"])[:8]
        lines += [f"  {o['estimate_ms']:9.4f} ms  {o['kind']} {o['name']} ({o['bound_by']})" for o in longest]
    if found["untimed"]:
        lines.append(f"  NOT COUNTED, no readable schedule: {', '.join(found['untimed'])}")
    return "\n".join(lines)


def tuning_table(rows: list[dict]) -> str:
    """Return the combinations of a search, fastest first, and a recommendation; refused ones show the reason."""
    good = sorted((row for row in rows if "error" not in row), key=lambda row: row["estimate_ms"])
    lines = ["| arguments | ESTIMATE ms | vs. best | bound by | MXU | VMEM MiB |", "|---" * 6 + "|"]
    for row in good:
        cells = [row["arguments"], f"{row['estimate_ms']:.4f}", f"{row['estimate_ms'] / good[0]['estimate_ms']:.2f} ×"]
        cells += [row["bound_by"], f"{row['mxu_share']:.0%}", f"{row['vmem_bytes'] / 2**20:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"| {row['arguments']} | {row['error'][:160]} |" for row in rows if "error" in row]
    if not good:
        return "\n".join([*lines, "none compiles"])
    near = [row["arguments"] for row in good[1:] if row["estimate_ms"] < 1.1 * good[0]["estimate_ms"]]
    tied = f" (within 10 %, which is not significant: {'; '.join(near)})" if near else ""
    return "\n".join([*lines, f"best: {good[0]['arguments']}{tied}"])
