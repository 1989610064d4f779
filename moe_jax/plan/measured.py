"""Measured times of compute tasks, as a JSON file that `schedule.task_times` names.

    {"attend": {"forward_s": 0.21, "backward_s": 0.25, "weight_s": 0.17}, "expert": {…}, …}

Seconds of all tasks of one op in a step, over all blocks and parts; ops that are missing are estimated.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_jax.errors import ConfigError
from moe_jax.plan.json_file import read_json
from moe_jax.plan.task_times import Compute, Linear

OPS = ("embed", "attend", "dense", "expert", "head")
_FIELDS = {"forward_s": "F", "backward_s": "B", "weight_s": "W"}
_LONGEST_S = 1e6
_RATE = Linear(0.0, 1.0)  # amounts are seconds

Seconds = Mapping[str, Mapping[str, float]]  # of each op and direction: F, B, W


def write_times(path: Path, seconds: Seconds) -> None:
    """Write what was measured."""
    found = {op: {field: times[direction] for field, direction in _FIELDS.items()} for op, times in seconds.items()}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def read_times(path: str, kinds: Sequence[str]) -> dict[str, Compute]:
    """Times of each op in one block, for a model whose blocks are of these `kinds`. Raises ConfigError."""
    name = f"schedule.task_times={path}"
    found = read_json(Path(path), name, "name a file of measured times, or null", ConfigError)
    if not isinstance(found, dict) or not found.keys() <= set(OPS) or not all(map(_is_entry, found.values())):
        raise ConfigError(
            f"{name} is no file of measured times: "
            f"it wants {', '.join(_FIELDS)}, seconds from 0 up, for some of {', '.join(OPS)}"
        )
    blocks = {"attend": kinds.count("moe"), "expert": kinds.count("moe"), "dense": kinds.count("dense")}
    return {op: _in_one_block(times, blocks.get(op, 1)) for op, times in found.items() if blocks.get(op, 1)}


def _is_entry(times: object) -> bool:
    return (
        isinstance(times, dict)
        and times.keys() == _FIELDS.keys()
        and all(isinstance(s, (int, float)) and not isinstance(s, bool) and 0 <= s < _LONGEST_S for s in times.values())
    )


def _in_one_block(times: Mapping[str, float], blocks: int) -> Compute:
    forward_s, backward_s, weight_s = (times[field] / blocks for field in _FIELDS)
    return Compute(rate=_RATE, forward=forward_s, backward=backward_s, weight=weight_s)
