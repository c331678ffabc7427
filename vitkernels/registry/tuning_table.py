"""Milliseconds of each op's backends on a GPU, as `python -m vitkernels.tune` measured them: the order for `auto`.

Two tables have the same format: the user's own, which takes precedence, and the one that ships with the package. A
table is JSON: GPU name -> rows of {op, dtype, features, rows, ms: {backend: milliseconds}, versions, date}. `features`
are the sizes of the op's parameters, and for the MLP whether it keeps its activation (1) or not (0). They determine
which backend is fastest and, unlike the batch size, do not change during training.
"""

import json
import logging
import os
from functools import cache
from pathlib import Path

import torch

from vitkernels.registry.tracing import constant_when_traced

log = logging.getLogger("vitkernels")

SHIPPED = Path(__file__).with_suffix(".json")
_FAMILIES = (("H100", "H200", "GH200"),)  # the same multiprocessors, so one order serves all three


def user_table() -> Path:
    """Return the path that tune writes by default: under $XDG_CACHE_HOME, or ~/.cache if it is unset."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache_home)) / "vitkernels" / "measurements.json"


def read(table: Path) -> dict[str, list[dict]]:
    """Return GPU name -> rows; empty if the file does not exist, or, with a warning, if it cannot be read."""
    try:
        return json.loads(table.read_text()) if table.is_file() else {}
    except (OSError, ValueError) as error:
        log.warning(
            "could not read tuning table %s (%s); ignored. `python -m vitkernels.tune` rewrites it", table, error
        )
        return {}


def write(table: Path, gpu: str, rows: list[dict]) -> None:
    """Add rows, replacing older ones of the same op, dtype and features. The file is replaced atomically."""
    known = read(table)
    new = {_key(row) for row in rows}
    known[gpu] = [row for row in known.get(gpu, []) if _key(row) not in new] + rows
    table.parent.mkdir(parents=True, exist_ok=True)
    complete = table.with_suffix(".new")
    lines = (f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, known[name])) + "\n]" for name in sorted(known))
    complete.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    complete.replace(table)


def _key(row: dict) -> tuple:
    return row["op"], row["dtype"], tuple(row["features"])


# torch.compile cannot trace reading a file. The result is a constant because parameters keep their sizes.
@constant_when_traced
def fastest_first(
    op: str, features: tuple[int, ...], dtype: torch.dtype, index: int, default: tuple
) -> tuple[str, ...]:
    """Return the backends of `op` measured on CUDA device `index`, fastest first; `default` if none were measured."""
    return _fastest_first(op, features, str(dtype).removeprefix("torch."), torch.cuda.get_device_name(index), default)


@cache
def _fastest_first(op: str, features: tuple[int, ...], dtype: str, gpu: str, default: tuple) -> tuple[str, ...]:
    call = f"{op} {' x '.join(map(str, features))} {dtype}"
    for table in (user_table(), SHIPPED):
        row, measured_on = find(read(table), gpu, (op, dtype, features))
        if row is not None:
            names = tuple(sorted(row["ms"], key=row["ms"].get))
            times = ", ".join(f"{name} {row['ms'][name]:.3f} ms" for name in names)
            log.info("%s on %s: %s (measured on %s, %s)", call, gpu, times, measured_on, table)
            return names
    log.info(
        "%s on %s: not measured, default order %s; `python -m vitkernels.tune` measures it", call, gpu,
        ", ".join(default) or "reference",
    )  # fmt: skip
    return default


def find(table: dict[str, list[dict]], gpu: str, key: tuple) -> tuple[dict | None, str]:
    """Return the row with this key for the GPU, or else for its family, and the GPU it was measured on."""
    family = next((f for f in _FAMILIES if any(name in gpu for name in f)), ())
    relatives = [name for name in table if name != gpu and any(member in name for member in family)]
    for name in (gpu, *relatives):
        for row in table.get(name, []):
            if _key(row) == key:
                return row, name
    return None, gpu
