"""Validation of the lines of metrics.jsonl, so that readers can compute with the values. Imports no jax."""

import math
from typing import Any

from moe_jax.files.untrusted import parse_json

# Values that reports plot or compute with. Other keys may have any value.
NUMBERS = frozenset(
    {
        *("loss", "cross_entropy", "validation_loss", "tokens", "tokens_per_s", "step_s", "mfu", "learning_rate"),
        *("grad_norm", "dropped_fraction", "load_max_over_mean", "load_balance_loss", "router_z_loss", "z_loss"),
        *("mtp_loss", "max_attention_logit"),
    }
)
LISTS = frozenset({"rank_load", "migrated_blocks", "migration_swaps", "migration_load_after"})
TABLE = "expert_load"
_LARGEST = 1e39  # more than any float32, and small enough to plot
_LAST_STEP = 2**31 - 1


class RecordError(ValueError):
    """A line is not a valid record. The message says what is wrong with it."""


class TruncatedError(RecordError):
    """A line is not JSON. The last line of a killed process may be truncated."""


def read_record(line: str) -> dict[str, Any]:
    """Parse and validate a line.

    A number that is not finite was written as null: it is restored from `not_finite`, or becomes NaN. Raises
    RecordError.
    """
    try:
        record = parse_json(line)
    except ValueError as error:
        raise TruncatedError(f"it is not JSON: {str(error)[:80]}") from None
    if not isinstance(record, dict):
        raise RecordError("it is no JSON object")
    try:
        record |= {key: float(text) for key, text in record.pop("not_finite", {}).items()}
    except (AttributeError, TypeError, ValueError):
        raise RecordError("its not_finite holds no numbers") from None
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= _LAST_STEP:
        raise RecordError(f"its step is not a whole number from 0 to {_LAST_STEP}")
    for key in NUMBERS & record.keys():
        record[key] = _number(key, record[key])
    for key in LISTS & record.keys():
        record[key] = _list(key, record[key])
    for row in _rows(record.get(TABLE, [])):
        _list(TABLE, row)
    _check_move(record)
    return record


def load_shapes(record: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the loads in a record, by name. They are the same in all records of a run."""
    shapes = {"rank_load": (len(record["rank_load"]),)} if record.get("rank_load") else {}
    table = record.get(TABLE)
    return shapes | ({TABLE: (len(table), len(table[0]))} if table else {})


def _number(key: str, value: object) -> Any:
    """Check a number; null becomes NaN. Raises RecordError."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecordError(f"its {key} is not a number")
    if math.isfinite(value) and abs(value) > _LARGEST:
        raise RecordError(f"its {key} is beyond {_LARGEST:g}")
    return value


def _list(key: str, values: object) -> list[Any]:
    if not isinstance(values, list):
        raise RecordError(f"its {key} is not a list of numbers")
    return [_number(key, value) for value in values]


def _rows(table: object) -> list[Any]:
    """Check that a table is a list of lists of one length. Raises RecordError."""
    if not isinstance(table, list) or not all(isinstance(row, list) for row in table):
        raise RecordError(f"its {TABLE} is not a list of lists")
    if len({len(row) for row in table}) > 1 or (table and not table[0]):
        raise RecordError(f"its {TABLE} has rows of several lengths, or of none")
    return table


def _check_move(record: dict[str, Any]) -> None:
    """Raise RecordError for a migration of experts that does not match the loads in the same record."""
    if "migrated_blocks" not in record:
        return
    blocks, loads = record["migrated_blocks"], record.get("rank_load") or []
    if not blocks or not all(isinstance(block, int) and 0 <= block < len(loads) for block in blocks):
        raise RecordError("its migrated_blocks are not numbers of the blocks in its rank_load")
    if not record.get("migration_swaps") or not record.get("migration_load_after"):
        raise RecordError("its migrated_blocks come without migration_swaps and migration_load_after")
