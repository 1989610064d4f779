"""Collectives of a compiled program that XLA:CPU may run at the same time.

XLA:CPU starts what communicates in the order of the schedule, and a collective keeps its thread until all devices have
come. A loop, a conditional or a call returns as soon as its body runs in the background, though: what follows, and does
not depend on it by data, then runs concurrently with the collectives inside. Collectives of one kind over the same
devices share one rendezvous (all channels of a program are 1), so that two of them take each other's participants: the
process crashes or hangs, or, where sizes agree, sums are wrong. Others can use up the threads that all wait in.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from moe_jax.measure.hlo import Instruction, Program

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_CONDITION = re.compile(r"condition=%([\w.-]+)")
_INDEX = re.compile(r"index=(\d+)")


class Race(NamedTuple):
    """Two instructions of one computation, in the order of the schedule, whose collectives nothing keeps apart."""

    first: Instruction  # runs other computations
    second: Instruction
    collectives: tuple[Instruction, Instruction]  # one of each: of the same kind, if there is such a pair

    def __str__(self) -> str:
        one, other = (collective.op_name or collective.name for collective in self.collectives)
        return f"{one} (in {self.first.opcode} {self.first.name}) and {other} (in {self.second.name})"


def races(program: Program) -> list[Race]:
    """All pairs of instructions that may have collectives under way at the same time."""
    bodies = {name: _Body(lines) for name, lines in program.computations.items()}
    return [race for body in bodies.values() for race in _races(body, bodies, program)]


class _Body:
    """A computation: which elements of the tuple that it takes it reads, and which of its result it makes anew."""

    def __init__(self, lines: Sequence[Instruction]):
        self.lines = lines

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {line.name: line for line in self.lines}

    @cached_property
    def written(self) -> set[int] | None:
        """Elements of the result that are not those of the parameter; None: all."""
        root = next(line for line in self.lines if line.is_root)
        if root.opcode != "tuple":
            return None
        return {place for place, name in enumerate(root.operands) if self.place_of(name) != place}

    @cached_property
    def read(self) -> set[int]:
        """Elements of the parameter that are used for more than the same element of the result."""
        places: set[int] = set()
        for line in self.lines:
            for number, name in enumerate(line.operands):
                place = self.place_of(name)
                if place is not None and not (line.is_root and line.opcode == "tuple" and place == number):
                    places.add(place)
        return places

    def place_of(self, name: str) -> int | None:
        """The element of the parameter that an instruction is, or None."""
        line = self.by_name.get(name)
        if line is None or line.opcode != "get-tuple-element":
            return None
        return _index(line) if self.by_name[line.operands[0]].opcode == "parameter" else None


def _races(body: _Body, bodies: dict[str, _Body], program: Program) -> Iterator[Race]:
    talking = [(line, found) for line in body.lines if (found := _collectives(line, program))]
    for number, (first, earlier) in enumerate(talking[:-1]):
        if first.is_control:
            waiting = _waiting(first, body, bodies)
            for second, later in talking[number + 1 :]:
                if second.name not in waiting:
                    yield Race(first, second, _alike(earlier, later))


def _collectives(line: Instruction, program: Program) -> list[Instruction]:
    """Those that an instruction is or runs."""
    inside = program.inside(line) if line.is_control else [line]
    return [inner for inner in inside if inner.opcode.removesuffix("-start") in _KINDS]


def _waiting(first: Instruction, body: _Body, bodies: dict[str, _Body]) -> set[str]:
    """Instructions that cannot start before `first` has ended."""
    waiting = {first.name}
    for line in body.lines[body.lines.index(first) + 1 :]:
        if not waiting.isdisjoint(_awaited(line, body, bodies)):
            waiting.add(line.name)
    return waiting


def _awaited(line: Instruction, body: _Body, bodies: dict[str, _Body]) -> list[str]:
    """Instructions that one waits for: a loop only for what it reads or writes, an element only for itself."""
    if line.opcode == "get-tuple-element":
        return _element(line.operands[0], _index(line), body, bodies)
    if line.opcode != "while":
        return list(line.operands)
    loop = bodies[line.called[0]]
    condition = _CONDITION.search(line.attributes)
    places = loop.read | (bodies[condition[1]].read if condition else set())
    if loop.written is None:
        return list(line.operands)
    return [name for place in sorted(places | loop.written) for name in _element(line.operands[0], place, body, bodies)]


def _element(name: str, place: int, body: _Body, bodies: dict[str, _Body]) -> list[str]:
    """What an element of a tuple waits for."""
    source = body.by_name[name]
    if source.opcode == "tuple":
        return [source.operands[place]]
    if source.opcode == "while":
        written = bodies[source.called[0]].written
        if written is not None and place not in written:  # handed on as it came, perhaps before the loop has ended
            return _element(source.operands[0], place, body, bodies)
    return [name]


def _index(line: Instruction) -> int:
    found = _INDEX.search(line.attributes)
    assert found is not None
    return int(found[1])


def _alike(earlier: Sequence[Instruction], later: Sequence[Instruction]) -> tuple[Instruction, Instruction]:
    pairs = [(one, other) for one in earlier for other in later]
    return next((pair for pair in pairs if pair[0].opcode == pair[1].opcode), pairs[0])
