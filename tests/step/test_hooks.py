"""Steps with hooks: a scheduled one computes what the plain one does, and each hook is called where it belongs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.models.hooks import HOOKS
from moe_jax.models.hooks.protocol import Hooks, WireCodec
from tests.small import first_params, small_config, tokens_of
from tests.step.gradients import Result, sharded_gradients

PIPELINE = {"policy": "expert_pipeline", "microbatches": 2}
UNIFIED = {"policy": "unified", "microbatches": 2, "weight_grad": "greedy", "grad_reduce": "block"}


def step(schedule, exchange="flat", **moe) -> Result:
    model = {"num_layers": 1}
    config = small_config(
        2,
        4,
        schedule=schedule,
        exchange={"algorithm": exchange},
        batch_size=16,
        seq_len=6,
        moe_layer_freq=1,
        model=model,
        **moe,
    )
    return sharded_gradients(config, first_params(config.model), tokens_of(config))


plain_step = functools.cache(functools.partial(step, {}))


def distance(a, b) -> float:
    """The distance of two trees, relative to the second."""
    a, b = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize(
    ("name", "schedule", "exchange", "capacity"),
    [
        ("fp8", PIPELINE, "flat", None),
        ("fp8", UNIFIED, "background", 1.0),
    ],
    ids=["fp8-expert_pipeline", "fp8-unified"],
)
def test_every_step_rounds_as_the_plain_one_does(name, schedule, exchange, capacity):
    bare, plain = (plain_step(capacity_factor=capacity, hooks=hooks) for hooks in ("none", name))
    scheduled = step(schedule, exchange, capacity_factor=capacity, hooks=name)
    np.testing.assert_allclose(scheduled.loss, plain.loss, rtol=2e-6)
    rounding = distance(plain.grads, bare.grads)
    assert 1e-4 < rounding < 0.1
    assert distance(scheduled.grads, plain.grads) < 0.1 * rounding


def times(factor) -> WireCodec:
    return WireCodec(decode=lambda travelled, dtype: factor * travelled)


@pytest.mark.parametrize("schedule", [UNIFIED], ids=["unified"])
def test_each_exchange_calls_its_own_hooks_in_plain_and_scheduled_steps(schedule, monkeypatch):
    factors = dict(zip(("dispatch", "combine", "dispatch_backward", "combine_backward"), (2, 3, 5, 7), strict=True))
    monkeypatch.setitem(HOOKS, "bf16", Hooks(**{name: times(factor) for name, factor in factors.items()}))
    plain, scheduled = (step(settings, hooks="bf16") for settings in ({}, schedule))
    np.testing.assert_allclose(scheduled.loss, plain.loss, rtol=2e-6)
    assert distance(scheduled.grads, plain.grads) < 1e-5
    assert distance(plain.grads, plain_step(capacity_factor=1.0, hooks="none").grads) > 0.1


@pytest.mark.parametrize("schedule", [{}, UNIFIED], ids=["plain", "unified"])
def test_the_layers_hooks_have_gradients(schedule, monkeypatch):
    monkeypatch.setitem(HOOKS, "bf16", Hooks(after_layer=lambda y_TD: 3 * y_TD))
    expected, hooked = step(schedule, routed_scaling_factor=3.0), step(schedule, hooks="bf16")
    np.testing.assert_allclose(hooked.loss, expected.loss, rtol=2e-6)
    assert distance(hooked.grads, expected.grads) < 1e-5

    monkeypatch.setitem(HOOKS, "bf16", Hooks(before_layer=jnp.zeros_like))
    nothing = step(schedule, hooks="bf16")
    (block,) = nothing.grads["segments"][0].values()
    assert not any(leaf.any() for leaf in jax.tree.leaves(block["moe"])), "experts saw nothing"
    assert jax.tree.leaves(block["attention"])[0].any()
