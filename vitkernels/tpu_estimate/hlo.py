"""Parse the text of an optimized HLO module: the operations that run, in order, and which of them share a kernel.

libtpu compiles identical operations on identical layouts once, and dumps the schedule of only one of them.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_OPERATION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$", re.MULTILINE)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*?\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_NOTES = re.compile(r", (?:metadata|backend_config)=\{.*?(?=, [a-z_]+=|$)", re.MULTILINE)
_REFERENCE = re.compile(r"%([\w.\-]+)")
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id")
_MARKERS = ("ConcatBitcast", "AllocateBuffer")  # custom calls that only name memory


@dataclass(frozen=True)
class HloOperation:
    """One operation of the entry computation."""

    name: str
    result: str  # type, layout and memory space
    kind: str  # HLO opcode, or a custom call's target
    rest: str  # operands, attributes, metadata
    identity: str  # equal for operations that share a kernel


def operations_that_run(module: str) -> list[HloOperation]:
    """Return the entry computation's operations that take time, in the compiler's order."""
    computations = dict(_COMPUTATION.findall(module))
    bodies: dict[str, str] = {}

    def body(name: str) -> str:
        """Return a computation's text with its names replaced by numbers."""
        if name not in bodies:
            order: dict[str, int] = {}

            def plain(found: re.Match) -> str:
                inner = found[1]
                return body(inner) if inner in computations else f"%{order.setdefault(inner, len(order))}"

            bodies[name] = _REFERENCE.sub(plain, _NOTES.sub("", computations[name]))
        return bodies[name]

    return list(_entry(module[module.index("\nENTRY") :], computations, body))


def _entry(text: str, computations: dict[str, str], body: Callable[[str], str]) -> Iterator[HloOperation]:
    types: dict[str, str] = {}
    for name, result, kind, rest in _OPERATION.findall(text):
        types[name] = result
        target = re.search(r'custom_call_target="(\w+)"', rest)
        if kind in _FREE or (target and target[1] in _MARKERS):
            continue
        # A custom call's program is in its backend_config; that of any other operation is in the computations it calls.
        plain = rest if target else _NOTES.sub("", rest)
        typed = _REFERENCE.sub(lambda found: body(found[1]) if found[1] in computations else types[found[1]], plain)
        if target:
            typed = re.sub(r", metadata=\{[^}]*\}", "", typed)
        yield HloOperation(name, result, target[1] if target else kind, rest, f"{kind} {result} {typed}")
