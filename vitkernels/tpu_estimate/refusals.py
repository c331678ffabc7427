"""Extract the reason from the messages with which libtpu and Pallas refuse a program."""

import re

_SUFFIX = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = r"([\d.]+)([KMG]?)"
_NOISE = (
    r"\s*It should not be possible to run out of scoped vmem.*",
    r"\s*Please file an issue.*",
    r"\s*See details at \S+",
    r"The MLIR operation involved:.*",
    r", metadata=\{.*?\}",
    r", operand_layout_constraints=\{.*?\}\}",
    r", backend_config=\{.*",
)


def one_line(message: str, limit: int = 400) -> str:
    """Return the reason in a compiler's message as one line of at most `limit` characters."""
    for noise in _NOISE:
        message = re.sub(noise, "", message, flags=re.DOTALL)
    line = " ".join(message.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def vmem_needed(message: str) -> dict[str, int]:
    """Return {"needed_bytes", "limit_bytes"} if the message says that VMEM is too small, else {}."""
    if "vmem" not in message:
        return {}
    for pattern in (rf"size {_SIZE} and limit {_SIZE}", rf"Used {_SIZE}.*? of {_SIZE}"):
        if found := re.search(pattern, message):
            needed, limit = (float(n) * _SUFFIX[unit] for n, unit in (found.groups()[:2], found.groups()[2:]))
            return {"needed_bytes": round(needed), "limit_bytes": round(limit)}
    return {}
