"""Parse scheduled HLO text, as `compiled.as_text()` returns it, into plain tuples.

Instructions are in the order in which the compiler schedules them. Operands and called computations are names.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from moe_jax.errors import UserError

_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{$")
_LINE = re.compile(r" *(ROOT )?%?([\w.-]+) = (.*)")
_NAME = re.compile(r"%([\w.-]+)")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|true_computation|false_computation|branch_computations|called_computations)="
    r"(?:\{([^}]*)\}|%([\w.-]+))"
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
# scopes of models/grouped_matmul.py and models/grouped_products.py
_AT_MOST = re.compile(r"\bat_most_(\d+)\b")
_FILLED = re.compile(r"\bfilled_([\d.]+)_percent\b")
_CHAIN = re.compile(r'chain_id="(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAMES = re.compile(r"\nFileNames\n.*?\nStackFrames\n(?:\d+ \{[^\n]*\n)*", re.DOTALL)
_FRAME = re.compile(r" ?(?:stack_frame_id=\d+|source_(?:file|(?:end_)?line|(?:end_)?column)=(?:\"[^\"]*\"|\d+))")


class HloError(UserError):
    """The text is not the scheduled HLO of a program."""


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str  # as written: f32[8,2048]{1,0}, or a tuple of such
    operands: tuple[str, ...]  # names; a constant's value, a parameter's number
    attributes: str  # everything after the operands
    is_root: bool = False  # whether it is the result of its computation

    @property
    def op_name(self) -> str:
        """The scopes that the instruction comes from; empty if the compiler generated it."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def filled(self) -> float:
        """The share of the rows that exist if routing is balanced, of a product of rows in groups of any size."""
        shares = _FILLED.findall(self.op_name)
        return float(shares[-1]) / 100 if shares else 1.0

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Computations that the instruction runs or applies; a loop's condition is left out."""
        found = _CALLED.findall(self.attributes)
        return tuple(name for many, one in found for name in (_NAME.findall(many) if many else [one]))

    @property
    def is_control(self) -> bool:
        """Whether the instruction runs other computations, in which the time is spent."""
        return self.opcode in ("while", "conditional", "call")

    @property
    def chain(self) -> str | None:
        """The name that all parts of a collective share if XLA:TPU splits it over fusions; None if it does not."""
        found = _CHAIN.search(self.attributes)
        return f"chain {found[1]}" if found else None

    def number(self, name: str) -> int | None:
        """Return an integer from the backend's config, e.g. estimated_cycles, or None."""
        found = re.search(rf'"{name}":\s*"?(\d+)', self.attributes)
        return int(found[1]) if found else None


class Array(NamedTuple):
    """Element size in bits, and dimensions."""

    bits: int
    dims: tuple[int, ...]

    @property
    def num_bytes(self) -> float:
        return self.bits * math.prod(self.dims) / 8


@dataclass(frozen=True)
class HloModule:
    """All computations of a module, by name."""

    name: str
    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Every instruction of every computation: names are unique in a module."""
        return {line.name: line for lines in self.computations.values() for line in lines}

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yield an instruction and, recursively, everything that it runs."""
        yield instruction
        for name in instruction.called:
            for line in self.computations[name]:
                yield from self.inside(line)

    def op_name(self, instruction: Instruction) -> str:
        """Return the scopes of an instruction. If the compiler generated it: the most frequent ones inside it, or those
        of a ragged exchange's buffer.
        """
        if instruction.op_name:
            return instruction.op_name
        if instruction.opcode.startswith("ragged-all-to-all") and len(instruction.operands) > 1:
            return self.op_name(self.by_name[instruction.operands[1]])  # XLA:GPU rewrites the exchange without its name
        if instruction.opcode.endswith("-done") or instruction.opcode in ("bitcast", "copy"):
            return self.op_name(self.by_name[instruction.operands[0]])
        counts = Counter(line.op_name for line in self.inside(instruction) if line.op_name)
        return counts.most_common(1)[0][0] if counts else ""

    def trip_count(self, loop: Instruction) -> int | None:
        """Return the number of iterations of a while loop: what the compiler recorded, or the limit of a counter that
        starts at 0; None if unknown.
        """
        if known := _TRIP_COUNT.search(loop.attributes):
            return int(known[1])
        condition = re.search(r"condition=%([\w.-]+)", loop.attributes)
        lines = self.computations[condition[1]] if condition else ()
        limits = [line.operands[0] for line in lines if line.opcode == "constant"]
        counts = any(line.opcode == "compare" and "direction=LT" in line.attributes for line in lines)
        return int(limits[0]) if counts and len(limits) == 1 and limits[0].isdecimal() else None

    def balanced_trip_count(self, loop: Instruction) -> float | None:
        """Return the trip count of a loop over rows if routing is balanced, from its scopes, which alone give it.

        None for other loops.
        """
        most = _AT_MOST.findall(loop.op_name)
        return max(int(most[-1]) * loop.filled, 1.0) if most else None

    def operand_bytes(self, instruction: Instruction) -> list[float]:
        """Return the bytes of each operand."""
        return [num_bytes(self.by_name[name].shape) for name in instruction.operands]


class _Computations(Mapping[str, tuple[Instruction, ...]]):
    """Computations that are parsed on first access: most of a program is never accessed."""

    def __init__(self, lines: dict[str, list[str]]):
        self._lines, self._read = lines, dict[str, tuple[Instruction, ...]]()

    def __getitem__(self, name: str) -> tuple[Instruction, ...]:
        if name not in self._read:
            found = (_LINE.match(line) for line in self._lines[name])
            self._read[name] = tuple(_instruction(each[2], each[3], bool(each[1])) for each in found if each)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)


def parse(text: str) -> HloModule:
    """Parse a module. Raises HloError if the text is not the scheduled HLO of one."""
    module = re.match(r"HloModule ([\w.-]+),.*is_scheduled=true", text)
    if module is None:
        raise HloError("the text is not scheduled HLO: take it from `compiled.as_text()`")
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    name = entry = ""
    for line in text.splitlines():
        if line.startswith("}") and not line.startswith("}}"):
            computations[name], lines = lines, []
        elif line.startswith(" "):
            lines.append(line)
        elif found := _HEADER.match(line):
            name, lines = found[2], []
            entry = name if found[1] else entry
        elif lines:  # attributes of Pallas kernels may have several lines
            lines[-1] += line
    if entry not in computations:
        raise HloError("the text of the program ends too early: take it from `compiled.as_text()` again")
    return HloModule(module[1], _Computations(computations), entry)


def arrays(shape: str) -> list[Array]:
    """Return the arrays of a shape; tokens have no bytes."""
    return [
        Array(int(bits or 8) if kind != "token" else 0, tuple(map(int, filter(None, dims.split(",")))))
        for kind, bits, dims in _ARRAY.findall(shape)
    ]


def num_bytes(shape: str) -> float:
    """Return the bytes of all arrays of a shape, without padding."""
    return sum(array.num_bytes for array in arrays(shape))


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    shape, rest = _split_at(text, " ")
    opcode, _, rest = rest.strip().partition("(")
    operands, attributes = _split_at(rest, ")")
    names = (operands,) if opcode in ("constant", "parameter") else tuple(_NAME.findall(operands))
    return Instruction(name, opcode, shape, names, attributes, is_root)


def _split_at(text: str, end: str) -> tuple[str, str]:
    """Return the text before and after the first `end` outside brackets."""
    depth = 0
    for found in re.finditer(r"[(){}\[\]" + end + "]", text):
        if depth == 0 and found[0] == end:
            return text[: found.start()], text[found.end() :]
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(found[0], 0)
    return text, ""


def without_frames(text: str) -> str:
    """Return the text without the instructions' stack frames, which differ between commands that compile the same
    program.
    """
    return _FRAME.sub("", _FRAMES.sub("\n", text))
