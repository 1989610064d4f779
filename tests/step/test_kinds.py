"""The kind of step that settings ask for, and what the table of kinds builds."""

import pytest

from moe_jax.config.step_kinds import STEP_FACTS
from moe_jax.step import plain
from moe_jax.step.kinds import STEP_KINDS, step_kind
from tests.small import small_config
from tests.step.gradients import mesh_of

KINDS = {
    "plain": ({}, {}, {}),
    "policy": ({"policy": "unified", "microbatches": 2}, {}, {}),
    "weight_grad": ({"weight_grad": "greedy"}, {}, {}),
    "grad_reduce": ({"grad_reduce": "bucketed"}, {}, {}),
    "reduction": ({}, {"reduction": "ring"}, {}),
    "remat": ({"remat": "full", "unroll": 2}, {}, {}),
    "stages": ({}, {}, {"pipeline": 2}),
    "coscheduled": ({"pipeline": "coscheduled"}, {}, {}),
}
EXPECTED = {"plain": "plain", "remat": "plain", "stages": "pipelined", "coscheduled": "pipelined"}


@pytest.mark.parametrize("name", KINDS)
def test_settings_ask_for_one_kind(name):
    schedule, exchange, mesh = KINDS[name]
    given = {"schedule": schedule, "exchange": exchange, **mesh}
    config = small_config(2, 2, model={"num_layers": 4}, grad_accumulation=2, **given)
    expected = EXPECTED.get(name, "scheduled")
    assert config.step_kind == expected
    found = step_kind(config, mesh_of(config))
    assert found.facts == config.step_facts == STEP_FACTS[expected]
    assert (found.schedule is not None) == (expected == "scheduled")
    assert (found.pipeline is not None) == found.facts.has_ticks == (expected == "pipelined")
    assert (found.gradients is plain.gradients) == (expected == "plain")


def test_every_kind_has_facts():
    assert STEP_KINDS.keys() == STEP_FACTS.keys()
