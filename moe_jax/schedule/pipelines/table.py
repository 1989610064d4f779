"""A pipeline schedule as a table of the passes of each stage in each tick, as data and as text.

Model chunk c of stage s is group c·stages + s of the layers, so activations travel around a ring: from the last stage
to the next chunk of the first one.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from moe_jax.schedule.actions import ScheduleError

DIRECTIONS = ("F", "B", "W")  # forward, backward, weight gradients where they are split from B
_IDLE = "."
_AND = "+"
_CELL = re.compile(r"([FBW])(\d+)(?:\.(\d+))?", re.ASCII)
_WIDTH = 112  # characters of a line of ticks


class ChunkPass(NamedTuple):
    """The pass of one microbatch through one model chunk of a stage."""

    microbatch: int
    chunk: int = 0


class StageTick(NamedTuple):
    """The passes of one stage in one tick; without any the stage is idle."""

    forward: ChunkPass | None = None
    backward: ChunkPass | None = None  # activation gradients only, if `weight` is split from it
    weight: ChunkPass | None = None

    def __str__(self) -> str:
        return _AND.join(direction + _write(work) for direction, work in self.tasks()) or _IDLE

    @classmethod
    def parse(cls, text: str) -> "StageTick":
        """Parse a slot like F3, F3+B0, W2.1 (microbatch 2, chunk 1) or a dot. Raises ScheduleError."""
        found: dict[str, ChunkPass] = {}
        for cell in [] if text == _IDLE else text.split(_AND):
            form = _CELL.fullmatch(cell)
            if not form or form[1] in found:
                raise ScheduleError(f"{text!r} is no slot of a pipeline: write F3, F3+B0, W2.1 or {_IDLE} for idle")
            found[form[1]] = ChunkPass(int(form[2]), int(form[3] or 0))
        return cls(*(found.get(direction) for direction in DIRECTIONS))

    def tasks(self) -> Iterator[tuple[str, ChunkPass]]:
        """The (direction, work) pairs of the slot, in the order F, B, W."""
        return ((direction, work) for direction, work in zip(DIRECTIONS, self, strict=True) if work is not None)


class TableTask(NamedTuple):
    """One entry of a table."""

    direction: str  # one of DIRECTIONS
    stage: int
    work: ChunkPass

    def __str__(self) -> str:
        return f"{self.direction}{_write(self.work)} of stage {self.stage}"


@dataclass(frozen=True)
class Table:
    """A pipelined step. `moe_jax.schedule.pipelines.dependencies.check` reports whether it can run."""

    name: str
    stages: int
    microbatches: int
    chunks: int  # model chunks of a stage
    split_weight_grad: bool  # whether W is split from B
    ticks: tuple[tuple[StageTick, ...], ...]  # [tick][stage]

    def tasks(self) -> Iterator[tuple[int, TableTask]]:
        """All entries as (tick, task), tick by tick."""
        for tick, slots in enumerate(self.ticks):
            for stage, slot in enumerate(slots):
                for direction, work in slot.tasks():
                    yield tick, TableTask(direction, stage, work)

    @functools.cached_property
    def has_pairs(self) -> bool:
        """Whether ticks have both a forward and a backward pass."""
        return any(slot.forward and slot.backward for slots in self.ticks for slot in slots)

    def works(self) -> Iterator[ChunkPass]:
        """All passes of a stage."""
        return (ChunkPass(m, c) for c in range(self.chunks) for m in range(self.microbatches))

    def __str__(self) -> str:
        cells = [[str(slots[stage]) for slots in self.ticks] for stage in range(self.stages)]
        width = max((len(cell) for row in cells for cell in row), default=1)
        at_once = _WIDTH // (width + 1)
        lines = [f"{name}: {_write_value(getattr(self, name))}" for name in _HEADER]
        for first in range(0, len(self.ticks), at_once):
            bands = (" ".join(cell.ljust(width) for cell in row[first : first + at_once]) for row in cells)
            lines += ["", *(f"stage {stage}: {band}".rstrip() for stage, band in enumerate(bands))]
        return "\n".join([*lines, ""])

    @classmethod
    def parse(cls, text: str) -> "Table":
        """Parse the text of a table, as `str` writes it; lines may be broken anywhere. Raises ScheduleError.

        This does not check whether the table can run.
        """
        head, _, body = text.strip().partition("\n\n")
        header = dict(_read_line(line) for line in head.splitlines())
        if list(header) != list(_HEADER):
            raise ScheduleError(f"the header of the table has {', '.join(header)}: write {', '.join(_HEADER)}")
        rows: dict[str, list[StageTick]] = {f"stage {stage}": [] for stage in range(int(header["stages"]))}
        for line in filter(None, body.splitlines()):
            label, value = _read_line(line)
            if label not in rows:
                raise ScheduleError(f"{label!r} is no stage of the table: write stage 0 to stage {len(rows) - 1}")
            rows[label] += map(StageTick.parse, value.split())
        if len({len(row) for row in rows.values()}) > 1:
            counts = ", ".join(f"{label} has {len(row)}" for label, row in rows.items())
            raise ScheduleError(f"stages differ in their number of ticks ({counts}): write {_IDLE} where one is idle")
        return cls(
            name=header["name"],
            stages=int(header["stages"]),
            microbatches=int(header["microbatches"]),
            chunks=int(header["chunks"]),
            split_weight_grad=header["split_weight_grad"] == "true",
            ticks=tuple(zip(*rows.values(), strict=True)),
        )


_HEADER = {  # fields before the ticks, and the patterns of their values
    "name": r"\S+",
    "stages": r"[1-9]\d*",
    "microbatches": r"[1-9]\d*",
    "chunks": r"[1-9]\d*",
    "split_weight_grad": "true|false",
}


def _read_line(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(": ")
    if not colon or not re.fullmatch(_HEADER.get(name, ".*"), value, re.ASCII):
        raise ScheduleError(f"{line!r} in the table cannot be read: write it as `name: value`")
    return name, value


def _write_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _write(work: ChunkPass) -> str:
    return f"{work.microbatch}.{work.chunk}" if work.chunk else f"{work.microbatch}"
