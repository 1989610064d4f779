"""The three kinds of training step: plain, scheduled and pipelined. The config selects one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
from jax.sharding import Mesh

from moe_jax.config import Config
from moe_jax.config.step_kinds import STEP_FACTS, StepFacts, StepKindName
from moe_jax.parallel.trees import Params
from moe_jax.schedule.schedule import Schedule
from moe_jax.step import plain
from moe_jax.step.context import StepContext, StepInputs
from moe_jax.step.pipelined import build as pipelined
from moe_jax.step.pipelined.gradients import pipelined_evaluation, pipelined_gradients
from moe_jax.step.scheduled import build as scheduled
from moe_jax.step.scheduled.gradients import scheduled_gradients


@dataclass(frozen=True, kw_only=True)
class StepKind:
    """How a step computes gradients and the evaluation loss; everything else is the same in every step (`plain.py`)."""

    facts: StepFacts
    gradients: plain.Gradients  # same signature and values as `plain.gradients`
    evaluate: Callable[[Params, StepInputs, StepContext], jax.Array]  # same signature and values as `plain.evaluate`
    schedule: Schedule | None = None  # the order of tasks of a scheduled step
    pipeline: pipelined.PipelinedPlan | None = None  # the ticks of a pipelined step


def _plain(config: Config, mesh: Mesh) -> StepKind:
    return StepKind(facts=STEP_FACTS["plain"], gradients=plain.gradients, evaluate=plain.evaluate)


def _scheduled(config: Config, mesh: Mesh) -> StepKind:
    plan = scheduled.make_plan(config, mesh)
    return StepKind(
        facts=STEP_FACTS["scheduled"],
        gradients=partial(scheduled_gradients, plan=plan),
        evaluate=plain.evaluate,
        schedule=plan.schedule,
    )


def _pipelined(config: Config, mesh: Mesh) -> StepKind:
    plan = pipelined.make_plan(config, mesh)
    return StepKind(
        facts=STEP_FACTS["pipelined"],
        gradients=partial(pipelined_gradients, plan=plan),
        evaluate=partial(pipelined_evaluation, plan=plan),
        pipeline=plan,
    )


STEP_KINDS: dict[StepKindName, Callable[[Config, Mesh], StepKind]] = {
    "plain": _plain,
    "scheduled": _scheduled,
    "pipelined": _pipelined,
}


def step_kind(config: Config, mesh: Mesh) -> StepKind:
    """Return the kind of step that a config selects. Raises ScheduleError or ConfigError."""
    return STEP_KINDS[config.step_kind](config, mesh)
