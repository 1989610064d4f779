"""Find collectives of a compiled program that XLA:CPU may run concurrently by mistake.

XLA:CPU starts collectives in the order of the schedule, and a collective blocks its thread until all devices have
joined. However, a loop, a conditional or a call returns as soon as its body runs in the background. The instructions
after it that do not depend on its data then run concurrently with the collectives inside. Collectives of one kind over
the same devices share one rendezvous (all channels of a program are 1), so two of them can take each other's
participants: the process crashes or hangs, or, if sizes agree, sums are wrong. Other collectives can use up the threads
that all of them wait in.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from moe_jax.errors import UserError
from moe_jax.measure.hlo import HloModule, Instruction, parse

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_CONDITION = re.compile(r"condition=%([\w.-]+)")
_INDEX = re.compile(r"index=(\d+)")


class Race(NamedTuple):
    """Two instructions of one computation, in schedule order, whose collectives are not ordered."""

    first: Instruction  # a loop, conditional or call
    second: Instruction
    collectives: tuple[Instruction, Instruction]  # one of each, of the same kind if possible

    def __str__(self) -> str:
        one, other = (collective.op_name or collective.name for collective in self.collectives)
        return f"{one} (in {self.first.opcode} {self.first.name}) and {other} (in {self.second.name})"


class RaceError(UserError):
    """The program may mix up its collectives."""


def check_races(text: str) -> None:
    """Raise RaceError if the scheduled HLO of a program has a race."""
    if found := races(parse(text)):
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise RaceError(
            f"XLA:CPU may run two collectives of this program at the same time and mix up what they bring: {found[0]}"
            f"{more}: use schedule.grad_reduce=block or another schedule.policy, and report it"
        )


def races(program: HloModule) -> list[Race]:
    """Return all pairs of instructions whose collectives may be in flight at the same time."""
    return _ProgramWalk(program).races(program.entry)


class _Body:
    """A computation, with the elements that it reads and changes of the tuple it takes."""

    def __init__(self, lines: Sequence[Instruction]):
        self.lines = lines
        self.by_name = {line.name: line for line in lines}

    @cached_property
    def written(self) -> set[int] | None:
        """Elements of the result that differ from those of the parameter; None if all may differ."""
        root = next(line for line in self.lines if line.is_root)
        if root.opcode != "tuple":
            return None
        return {place for place, name in enumerate(root.operands) if self._place_of(name) != place}

    @cached_property
    def read(self) -> set[int]:
        """Elements of the parameter that are used for anything except the same element of the result."""
        places: set[int] = set()
        for line in self.lines:
            for number, name in enumerate(line.operands):
                place = self._place_of(name)
                if place is not None and not (line.is_root and line.opcode == "tuple" and place == number):
                    places.add(place)
        return places

    def _place_of(self, name: str) -> int | None:
        """Return the element of the parameter that an instruction reads, or None."""
        line = self.by_name.get(name)
        if line is None or line.opcode != "get-tuple-element":
            return None
        return _index(line) if self.by_name[line.operands[0]].opcode == "parameter" else None


class _ProgramWalk:
    """Walks the computations of a program from its entry along the control flow."""

    def __init__(self, program: HloModule):
        self._program = program
        self._bodies: dict[str, _Body] = {}
        self._found: dict[str, list[Instruction]] = {}

    def races(self, name: str) -> list[Race]:
        """Return the races of a computation and of everything that it runs."""
        found: list[Race] = []
        for each in self._reached(name):
            found += self._own_races(self._body(each))
        return found

    def _reached(self, name: str) -> list[str]:
        reached = {name: None}  # ordered set
        waiting = [name]
        while waiting:
            for line in self._body(waiting.pop()).lines:
                new = [each for each in line.called if line.is_control and each not in reached]
                reached |= dict.fromkeys(new)
                waiting += new
        return list(reached)

    def _body(self, name: str) -> _Body:
        if name not in self._bodies:
            self._bodies[name] = _Body(self._program.computations[name])
        return self._bodies[name]

    def _collectives(self, line: Instruction) -> list[Instruction]:
        """Return the collectives that an instruction is or runs."""
        if not line.is_control:
            return [line] if line.opcode.removesuffix("-start") in _KINDS else []
        return [found for name in line.called for found in self._collectives_of(name)]

    def _collectives_of(self, name: str) -> list[Instruction]:
        if name not in self._found:
            self._found[name] = [found for line in self._body(name).lines for found in self._collectives(line)]
        return self._found[name]

    def _own_races(self, body: _Body) -> Iterator[Race]:
        communicating = [(line, found) for line in body.lines if (found := self._collectives(line))]
        for number, (first, earlier) in enumerate(communicating[:-1]):
            if first.is_control:
                waiting = self._waiting(first, body)
                for second, later in communicating[number + 1 :]:
                    if second.name not in waiting:
                        yield Race(first, second, _same_kind(earlier, later))

    def _waiting(self, first: Instruction, body: _Body) -> set[str]:
        """Return the instructions that cannot start before `first` has ended."""
        waiting = {first.name}
        for line in body.lines[body.lines.index(first) + 1 :]:
            if not waiting.isdisjoint(self._awaited(line, body)):
                waiting.add(line.name)
        return waiting

    def _awaited(self, line: Instruction, body: _Body) -> list[str]:
        """Return the instructions that `line` waits for: a loop waits only for what it reads or writes, a tuple element
        only for itself.
        """
        if line.opcode == "get-tuple-element":
            return self._element(line.operands[0], _index(line), body)
        if line.opcode != "while":
            return list(line.operands)
        loop, condition = self._body(line.called[0]), _CONDITION.search(line.attributes)
        if loop.written is None:
            return list(line.operands)
        places = loop.written | loop.read | (self._body(condition[1]).read if condition else set())
        return [name for place in sorted(places) for name in self._element(line.operands[0], place, body)]

    def _element(self, name: str, place: int, body: _Body) -> list[str]:
        """Return what an element of a tuple waits for."""
        source = body.by_name[name]
        if source.opcode == "tuple":
            return [source.operands[place]]
        if source.opcode == "while":
            written = self._body(source.called[0]).written
            if written is not None and place not in written:  # unchanged by the loop, so available before it ends
                return self._element(source.operands[0], place, body)
        return [name]


def _index(line: Instruction) -> int:
    found = _INDEX.search(line.attributes)
    assert found is not None
    return int(found[1])


def _same_kind(earlier: Sequence[Instruction], later: Sequence[Instruction]) -> tuple[Instruction, Instruction]:
    pairs = [(one, other) for one in earlier for other in later]
    return next((pair for pair in pairs if pair[0].opcode == pair[1].opcode), pairs[0])
