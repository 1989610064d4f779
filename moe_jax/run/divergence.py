"""Handling of too many bad steps in a row: the run rolls back to its newest checkpoint once, and then stops."""

from typing import Any

from moe_jax.checkpoint.save import Checkpoints
from moe_jax.distributed.heartbeat import end_progress
from moe_jax.errors import DivergedError
from moe_jax.run.locate_nonfinite import FILE_NAME, write_first_bad
from moe_jax.run.setup import Run
from moe_jax.step.context import State
from moe_jax.telemetry.nonfinite_steps import BadSteps, divergence_advice
from moe_jax.telemetry.run_log import RunLog


class RollBack(Exception):
    """Raised to roll back to the newest checkpoint, since the steps up to `step` were bad."""

    def __init__(self, step: int):
        super().__init__(step)
        self.step = step


def handle_divergence(
    run: Run, state: State, bad: BadSteps, checkpoints: Checkpoints, failed_at: int, log: RunLog
) -> RollBack | DivergedError:
    """The exception to raise after too many bad steps. All processes call it.

    `failed_at`: the step because of which the run has rolled back before, or 0.
    """
    last, newest = bad.last, checkpoints.newest()
    assert last is not None
    many = f"{last}, the last of train.bad_in_a_row={bad.in_a_row} bad ones in a row"
    if newest is not None and last.step > failed_at:
        log.warn(f"{many}: going back to the checkpoint of step {newest}")
        return RollBack(last.step)
    end_progress()  # no progress is expected while the programs of `write_first_bad` compile
    found = write_first_bad(run, state, last, log)
    if found["parameters"] and newest is not None:
        return DivergedError(
            f"{last}, as the parameters of the checkpoint of step {newest} in log.dir={run.folder} are not finite: "
            "delete it to continue from the one before"
        )
    again = "" if newest is None else f", and going back to the checkpoint of step {newest} has not helped"
    return DivergedError(
        f"{many}{again}: {_where(found)} (more in {run.folder / FILE_NAME}); {divergence_advice(run.config)}"
    )


def _where(found: dict[str, Any]) -> str:
    """The place of the first number that is not finite, as text."""
    if found["first_output"] is not None:
        devices = ", ".join(map(str, found["devices"]))
        return f"first not finite is the output of {found['first_output']} on device {devices}"
    if found["gradients"]:
        return f"all outputs are finite, and first not finite are gradients of {found['first_gradient'] or 'no block'}"
    return "computed again, all of its numbers are finite"
