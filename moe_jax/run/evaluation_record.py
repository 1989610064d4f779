"""The results of an evaluation in the run's metrics, and as JSON."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_jax.config import Config
from moe_jax.distributed.processes import is_main_process
from moe_jax.errors import UserError
from moe_jax.files.places import place_of
from moe_jax.run.run_dir import lock_run_dir
from moe_jax.telemetry.run_log import insert_record


def record_evaluation(
    config: Config, run: Path, step: int, results: Mapping[str, Mapping[str, float]], options: str
) -> str:
    """Add results of a step, and the options they were found with, to a run's metrics.jsonl. All processes call it.

    A value is called `evaluation/NAME/VALUE`, with the name of the text or task.

    Returns why that was not possible, for a message; empty if it was. A run that trains now keeps its file to itself.
    """
    own = dataclasses.replace(config, log=dataclasses.replace(config.log, dir=place_of(run)))
    values = {f"evaluation/{name}/{key}": value for name, own in results.items() for key, value in own.items()}
    tokens = step * config.train.batch_size * config.data.seq_len
    try:
        with lock_run_dir(own):
            if is_main_process():
                insert_record(run, {"step": step, **values, "evaluation_options": options, "tokens": tokens})
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"{run} cannot be written ({error.strerror})"
    return ""


def finite_or_null(value: Any) -> Any:
    """Return nested values for JSON, which has no NaN and no infinities."""
    if isinstance(value, Mapping):
        return {key: finite_or_null(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
