"""Parse libtpu's schedule dumps: VLIW bundles, the functional units each bundle uses, and its scalar instructions.

A name such as `%s12_s3` means value s12, held in register s3. Vector instructions are omitted: they take the cycle of
their bundle and affect no branch or copy.
"""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2}\s*)?:[ >]*\{(.*?)\}\s*$", re.MULTILINE | re.DOTALL)
_TEXT = re.compile(r"(?:%(\w+) = )?([a-z][\w.<> ]*?)(?: +(.*))?$", re.DOTALL)
_REGISTER = re.compile(r"%([sp])\d+_[sp](\d+)")
_VALUE = re.compile(r"%([sp]\d+_[sp]\d+)")
_COMMA = re.compile(r",\s*(?![^\[]*\])")


def parse_bundles(text: str) -> list[tuple[str, ...]]:
    """Return the instructions of each bundle, by address.

    Comments are dropped except for operand names: `/*src=*/` becomes `src=`.
    """
    text = re.sub(r"/\*(\w+)=\*/", r"\1=", text)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    found = {}
    for address, body in _BUNDLE.findall(text):
        found[int(address, 16)] = tuple(part for piece in body.split(";;") if (part := piece.strip()))
    if not found:
        raise ValueError("no bundles found: not a packed-bundles dump")
    return [found.get(address, ()) for address in range(max(found) + 1)]


def parse_utilization(text: str) -> tuple[dict[str, int], list[list[int]]]:
    """Return {unit: count on the chip}, and for each bundle the count of each unit that it uses."""
    names, capacities, rows = [], [], []
    for line in text.splitlines():
        if "MXU" in line:
            names = [name.strip().split(":")[-1] for name in line.split(",")]  # VLOAD:FILL is FILL
        elif re.fullmatch(r"[\d ]+", line) and line.strip():
            rows.append([int(number) for number in line.split()])
    if rows:
        capacities = rows.pop(0)
    return dict(zip(names, capacities, strict=True)), rows


def _signed(x: int) -> int:
    return ((x + 0x80000000) & 0xFFFFFFFF) - 0x80000000


def _unsigned(function: Callable) -> Callable:
    return lambda a, b: function(a & 0xFFFFFFFF, b & 0xFFFFFFFF)


_BINARY: dict[str, Callable] = {
    "sadd": operator.add,
    "scalar_lea": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda a, b: a << (b & 31),
    "sshrl": lambda a, b: (a & 0xFFFFFFFF) >> (b & 31),
    "sshra": lambda a, b: a >> (b & 31),
    "smin": min,
    "smax": max,
}
_PREDICATES: dict[str, Callable] = {
    "por": lambda a, b: a or b,
    "pand": lambda a, b: a and b,
    "pnor": lambda a, b: not (a or b),
    "pnand": lambda a, b: not (a and b),
    "pxor": operator.ne,
    "pneg": operator.not_,
    "pmov": bool,
}
_COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}


def _function(opcode: str) -> Callable | None:
    """Return the function that a scalar opcode computes, or None if the opcode is unknown."""
    name, *suffixes = opcode.split(".")
    if name in ("smov", "int_to_ptr"):
        return lambda a: a
    if opcode == "sdivrem.u32":
        return lambda a, b: [_signed(part) for part in divmod(a & 0xFFFFFFFF, b & 0xFFFFFFFF)]
    if name == "scalar_select":
        return lambda condition, yes, no: yes if condition else no
    if name == "scmp" and suffixes[0] in _COMPARISONS:
        compare = _COMPARISONS[suffixes[0]]
        return _unsigned(compare) if "u32" in suffixes else compare
    if name in _PREDICATES:
        return _PREDICATES[name]
    if name in _BINARY and "f32" not in suffixes:
        compute = _BINARY[name]
        return lambda a, b: _signed(compute(a, b))
    return None


@dataclass
class ScalarInstruction:
    """One scalar instruction: if the predicate holds, slot `target` is set to function(operands)."""

    opcode: str
    name: str | None  # the value it defines, as the dump names it
    target: int | None
    function: Any  # a Callable, or None for an instruction that computes nothing
    operands: list[list[int]]  # the slots of each operand; their values are summed
    predicate: int | None = None
    wanted: bool = True  # the value of the predicate at which the instruction runs
    sources: tuple[str, ...] = ()  # the values that it reads
    jump: int | None = None
    unread: tuple[str, ...] = ()  # operands that could not be parsed

    @property
    def is_effect(self) -> bool:
        """Return whether the timeline depends on the instruction itself, not only on the value it computes."""
        return self.jump is not None or self.opcode.startswith(("dma.", "vdelay", "sdelay"))

    def not_interpretable(self) -> str | None:
        """Return why the instruction cannot be interpreted, or None if it can."""
        if self.unread or "unknown" in self.opcode:
            return f"{self.opcode} ({', '.join(self.unread) or 'pointer to an unknown memory space'})"
        computes = self.target is not None or self.opcode.startswith("sdivrem")
        special_cased = self.opcode in ("sld", "spop.drf")
        return self.opcode if computes and self.function is None and not special_cased else None


class Decoder:
    """Decode text into instructions. Slots: 64 scalar registers, 32 predicates, then constants."""

    def __init__(self, bundles):
        self.values: list[int] = [0] * 96
        self._constants: dict[int, int] = {}
        self._allocations: dict[str, int] = {}
        self.spaces: dict[str, str] = {}
        for bundle in bundles:
            for text in bundle:
                if found := re.match(r"%(\w+) = (?:int_to_ptr|scalar_lea|inlined_call_operand)\.(\w+)", text):
                    self.spaces[found[1]] = found[2]

    def decode(self, text: str) -> ScalarInstruction | None:
        """Return the instruction, or None if it affects no timing: vector instructions, barriers, bounds checks."""
        found = _TEXT.match(text)
        if not found:
            return None
        name, opcode, rest = found[1], found[2].split(" ")[0], found[3] or ""
        if opcode.startswith("inlined_call_operand") and "<" not in opcode:  # an array's address
            index = re.search(r"index: (\d+)", rest)
            return self._define(name, "smov", [[self._constant((int(index[1]) + 1 if index else 0) << 20)]])
        vector = opcode.startswith("v") and opcode != "vdelay"
        if vector or opcode in ("shalt.err", "compiler", "sfence", "setrngseed", "inlined_call"):
            return None
        sources = tuple(_VALUE.findall(rest))
        if opcode == "sphi":  # its values share a register
            return ScalarInstruction(opcode, name, None, None, [], sources=sources)
        if opcode.startswith("spop."):
            instruction = self._define(name, opcode, [])
            instruction.sources = (rest.strip(" %"),)
            return instruction
        smem = None
        if opcode in ("sld", "sst"):
            found = re.match(r"\[smem:\[(.*?)\]\](?!\])\s*,?\s*(.*)$", rest, re.DOTALL)
            assert found is not None, rest
            address, rest = found.groups()
            smem = self._operand(f"[{address}]") if "#" in address or "+" in address else self._operand(address)
        rest = re.sub(r"^\[[a-z]+:\$?\w+\]\s*", "", rest)
        instruction = self._predicated(name, opcode, rest, smem)
        if not opcode.startswith("dma."):
            instruction.sources = sources
        if opcode.startswith("int_to_ptr") and instruction.operands == [[instruction.target]]:
            instruction.target = None
        return instruction

    def _predicated(self, name, opcode, rest, smem) -> ScalarInstruction:
        predicate, wanted, condition = None, True, ""
        if chosen := re.match(r"\((!?)(%p\d+_p\d+), (.*?)\),\s*(.*)$", rest, re.DOTALL):  # conditional move
            slots = [self._operand(part) for part in (chosen[2], chosen[4], chosen[3])]
            if chosen[1]:
                slots[1], slots[2] = slots[2], slots[1]
            return self._define(name, "scalar_select", slots)
        if found := re.match(r"\((!?)(%p\d+_p\d+)\),?\s*(.*)$", rest, re.DOTALL):
            slot = self._operand(found[2])
            assert slot is not None
            predicate, wanted, condition, rest = slot[0], not found[1], found[2], found[3]
        if opcode == "sbr.rel":
            jump = int(re.findall(r"target bundleno = (\d+)", rest)[0])
            return ScalarInstruction(opcode, name, None, None, [], predicate, wanted, jump=jump)
        if opcode.startswith("dma."):
            return self._dma(name, opcode, rest, predicate, wanted, condition)
        operands = [self._operand(part) for part in _COMMA.split(rest)] if rest else []
        if smem is not None or opcode in ("sld", "sst"):
            operands = [smem, *operands[: opcode == "sst"]]
        return self._define(name, opcode, operands, predicate, wanted)

    def _dma(self, name, opcode, rest, predicate, wanted, condition) -> ScalarInstruction:
        """Decode a wait by its flag, or a copy by its size and flag; the other operands do not affect timing."""
        parts = dict(re.findall(r"(\w+)=(\[[^\]]*\]|[^,\n]+)", rest))
        if opcode == "dma.done.wait":
            texts = [_COMMA.split(rest)[0]]
        else:
            texts = [parts.get(key, "?") for key in ("size_in_granules", "dst_syncflagno")]
            opcode = self._copy(opcode, parts)
        instruction = self._define(name, opcode, [self._operand(text) for text in texts], predicate, wanted)
        instruction.sources = tuple(_VALUE.findall(" ".join([*texts, condition])))
        return instruction

    def _copy(self, opcode: str, parts: dict[str, str]) -> str:
        """Return the opcode as `dma.<from>_to_<to>`; dma.general itself names only pointers."""
        if opcode != "dma.general":
            return opcode
        places = (self.spaces.get(parts.get(key, "").strip(" %"), "unknown") for key in ("src", "dst"))
        return "dma.{}_to_{}".format(*places)

    def _define(self, name, opcode, operands, predicate=None, wanted=True) -> ScalarInstruction:
        found = _REGISTER.fullmatch(f"%{name}")
        target = None if found is None else int(found[2]) + (64 if found[1] == "p" else 0)
        unread = tuple(f"operand {n}" for n, slots in enumerate(operands) if slots is None)
        return ScalarInstruction(opcode, name, target, _function(opcode), operands, predicate, wanted, unread=unread)

    def _operand(self, text: str) -> list[int] | None:
        """Return the slots whose sum is the operand, or None if it cannot be parsed."""
        text = re.sub(r"^\w+=", "", text.strip())
        text = re.sub(r"\s+\[.*\]$", "", text)  # the description of a constant or pointer
        slots = []
        for part in (text[1:-1] if text.startswith("[") else text).split(" + "):
            if found := _REGISTER.fullmatch(part):
                slots.append(int(found[2]) + (64 if found[1] == "p" else 0))
            elif part.startswith("#"):
                slots.append(self._constant(self._allocations.setdefault(part, (len(self._allocations) + 1) << 18)))
            elif found := re.fullmatch(r"\$0x([0-9a-f]+)|(-?\d+)", part):
                slots.append(self._constant(_signed(int(found[1], 16) if found[1] else int(found[2]))))
            else:
                return None
        return slots

    def _constant(self, value: int) -> int:
        if value not in self._constants:
            self._constants[value] = len(self.values)
            self.values.append(value)
        return self._constants[value]


def relevant(program: list[list[ScalarInstruction]]) -> tuple[list[list[ScalarInstruction]], set[str]]:
    """Return the instructions that branches, copies and waits depend on, and why some cannot be interpreted."""
    writers: dict[str | None, list[ScalarInstruction]] = {}
    stores = [i for bundle in program for i in bundle if i.opcode == "sst"]
    results = [i for bundle in program for i in bundle if i.opcode == "spop.drf"]
    for bundle in program:
        for instruction in bundle:
            writers.setdefault(instruction.name, []).append(instruction)
    pending = [i for bundle in program for i in bundle if i.is_effect]
    kept, unknown = set(), set()
    while pending:
        instruction = pending.pop()
        if id(instruction) in kept:
            continue
        kept.add(id(instruction))
        if reason := instruction.not_interpretable():
            unknown.add(reason)
        for name in instruction.sources:
            if name not in writers:
                unknown.add(f"{instruction.opcode} of a value that no scalar instruction defines")
            pending += writers.get(name, [])
        if instruction.opcode == "sld":
            pending += stores
        if instruction.opcode.startswith("sdivrem"):  # all its results are popped from the queue, used or not
            pending += [i for i in results if instruction.name in i.sources]
    return [[i for i in bundle if id(i) in kept and i.opcode != "sphi"] for bundle in program], unknown
