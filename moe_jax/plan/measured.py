"""Measured times of compute tasks, as a JSON file that `schedule.task_times` names.

    {"attend": {"1": {"forward_s": 0.21, "backward_s": 0.25, "weight_s": 0.17}, "2": {…}}, …, "rest_s": 0.03}

Each entry has the seconds of all tasks of one op in a step, over all blocks and parts, by the number of parts. `rest_s`
is the compute time of a step outside of tasks, mainly the optimizer's. Ops without an entry are estimated.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_jax.errors import ConfigError
from moe_jax.files.local_copy import local_path
from moe_jax.files.untrusted import read_named_json
from moe_jax.plan.task_times import task_seconds
from moe_jax.schedule.actions import Action
from moe_jax.schedule.shape import StepShape

OPS = ("embed", "attend", "dense", "expert", "head")
_FIELDS = {"forward_s": "F", "backward_s": "B", "weight_s": "W"}
_REST = "rest_s"
_LONGEST_S = 1e6
_MAX_DIGITS = 9  # of a number of parts

Seconds = Mapping[str, Mapping[int, Mapping[str, float]]]  # by op, number of parts, and direction: F, B, W


@dataclass(frozen=True)
class MeasuredStage:
    """A compute stage with tasks timed at some numbers of parts; times between them are interpolated linearly."""

    points: Mapping[str, tuple[tuple[float, float], ...]]  # by direction: (share of the batch, seconds), ascending

    def seconds(self, action: Action, shape: StepShape) -> float:
        """Seconds of one task."""
        return task_seconds(action, shape, lambda direction, parts: _at(1 / parts, self.points[direction]))


@dataclass(frozen=True)
class MeasuredTimes:
    """The content of a file: the stages of one block each, and the seconds outside of tasks, if known."""

    compute: Mapping[str, MeasuredStage]
    rest_s: float | None = None


def write_times(path: Path, seconds: Seconds, rest_s: float) -> None:
    """Write measured times."""

    def entry(times: Mapping[str, float]) -> dict[str, float]:
        return {field: times[direction] for field, direction in _FIELDS.items()}

    found = {op: {str(parts): entry(times) for parts, times in at.items()} for op, at in seconds.items()}
    path.write_text(json.dumps(found | {_REST: rest_s}, indent=1) + "\n", encoding="utf-8")


def read_times(path: str, kinds: Sequence[str]) -> MeasuredTimes:
    """The measured times of a model with blocks of these `kinds`. Raises ConfigError."""
    name = f"schedule.task_times={path}"
    found = read_named_json(local_path(path), name, "name a file of measured times, or null", ConfigError)
    stages = {op: at for op, at in found.items() if op != _REST} if isinstance(found, dict) else None
    if stages is None or not stages.keys() <= set(OPS) or not all(map(_is_stage, stages.values())):
        raise ConfigError(
            f"{name} is no file of measured times: it wants {', '.join(_FIELDS)}, seconds from 0 up, "
            f"by number of parts for some of {', '.join(OPS)}"
        )
    if _REST in found and not _are_seconds(found[_REST]):
        raise ConfigError(f"{name} is no file of measured times: its {_REST} is to be seconds from 0 up")
    blocks = {"attend": kinds.count("moe"), "expert": kinds.count("moe"), "dense": kinds.count("dense")}
    known = {op: _profiled(at, blocks.get(op, 1)) for op, at in stages.items() if blocks.get(op, 1)}
    return MeasuredTimes(known, found.get(_REST))


def _is_stage(found: object) -> bool:
    return (
        isinstance(found, dict)
        and bool(found)
        and all(parts.isdecimal() and len(parts) <= _MAX_DIGITS and int(parts) > 0 for parts in found)
        and all(map(_is_entry, found.values()))
    )


def _is_entry(times: object) -> bool:
    return isinstance(times, dict) and times.keys() == _FIELDS.keys() and all(map(_are_seconds, times.values()))


def _are_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _LONGEST_S


def _profiled(at: Mapping[str, Mapping[str, float]], blocks: int) -> MeasuredStage:
    parts_of = sorted(map(int, at), reverse=True)
    return MeasuredStage(
        {
            direction: _from_nothing([(1 / parts, at[str(parts)][field] / (blocks * parts)) for parts in parts_of])
            for field, direction in _FIELDS.items()
        }
    )


def _from_nothing(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Prepend the start-up time, extrapolated from the two smallest parts."""
    (x0, y0), (x1, y1) = points[0], points[1 if len(points) > 1 else 0]
    start = y0 - x0 * (y1 - y0) / (x1 - x0) if len(points) > 1 else 0.0
    return (0.0, min(max(start, 0.0), y0)), *points


def _at(share: float, points: tuple[tuple[float, float], ...]) -> float:
    right = next((i for i, (x, _) in enumerate(points) if x >= share and i), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1 : right + 1]
    return y0 + (share - x0) * (y1 - y0) / (x1 - x0)
