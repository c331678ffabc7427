"""What each op's backends cost on a GPU, as `python -m vitkernels.tune` measured it: where `auto` finds its order.

Two tables of the same form: the user's own, and the one that ships with the package; the user's comes first. A table is
JSON: GPU name -> rows of {op, dtype, features, rows, ms: {backend: milliseconds}, versions, date}. `features` are the
sizes of the op's parameters, and for the MLP whether it keeps its activation (1) or not (0): they decide, and unlike
the number of images they stay the same.
"""

import json
import logging
import os
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger("vitkernels")

SHIPPED = Path(__file__).with_suffix(".json")
_FAMILIES = (("H100", "H200", "GH200"),)  # the same multiprocessors: one's order serves the others


def user_table() -> Path:
    """Where tune writes: under $XDG_CACHE_HOME, by default ~/.cache."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache_home)) / "vitkernels" / "measurements.json"


def read(table: Path) -> dict[str, list[dict]]:
    """GPU name -> rows; empty where there is no such file, or none that can be read."""
    try:
        return json.loads(table.read_text()) if table.is_file() else {}
    except (OSError, ValueError) as error:
        log.warning(
            "%s cannot be read (%s) and counts as empty; `python -m vitkernels.tune` writes it anew", table, error
        )
        return {}


def write(table: Path, gpu: str, rows: list[dict]) -> None:
    """Adds the rows to the table; they replace older ones of the same op, dtype and features."""
    known = read(table)
    new = {_key(row) for row in rows}
    known[gpu] = [row for row in known.get(gpu, []) if _key(row) not in new] + rows
    table.parent.mkdir(parents=True, exist_ok=True)
    whole = table.with_suffix(".new")
    lines = (f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, known[name])) + "\n]" for name in sorted(known))
    whole.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    whole.replace(table)


def _key(row: dict) -> tuple:
    return row["op"], row["dtype"], tuple(row["features"])


# torch.compile cannot trace reading a file, and need not: parameters keep their sizes.
@torch.compiler.assume_constant_result
def fastest_first(
    op: str, features: tuple[int, ...], dtype: torch.dtype, index: int, default: tuple
) -> tuple[str, ...]:
    """Backends of `op` as `auto` tries them on CUDA device `index`, fastest first; `default` where unmeasured."""
    return _fastest_first(op, features, str(dtype).removeprefix("torch."), torch.cuda.get_device_name(index), default)


@cache
def _fastest_first(op: str, features: tuple[int, ...], dtype: str, gpu: str, default: tuple) -> tuple[str, ...]:
    what = f"{op} {' x '.join(map(str, features))} {dtype}"
    for table in (user_table(), SHIPPED):
        row, measured_on = find(read(table), gpu, (op, dtype, features))
        if row is not None:
            names = tuple(sorted(row["ms"], key=row["ms"].get))
            times = ", ".join(f"{name} {row['ms'][name]:.3f} ms" for name in names)
            log.info("%s on %s: %s (measured on %s, %s)", what, gpu, times, measured_on, table)
            return names
    log.info(
        "%s on %s was never measured: %s, in this order; `python -m vitkernels.tune` measures", what, gpu,
        ", ".join(default) or "reference",
    )  # fmt: skip
    return default


def find(table: dict[str, list[dict]], gpu: str, key: tuple) -> tuple[dict | None, str]:
    """The row of that key for this GPU, else for one of its family; and the name of the GPU that it is of."""
    family = next((f for f in _FAMILIES if any(name in gpu for name in f)), ())
    relatives = [name for name in table if name != gpu and any(member in name for member in family)]
    for name in (gpu, *relatives):
        for row in table.get(name, []):
            if _key(row) == key:
                return row, name
    return None, gpu
