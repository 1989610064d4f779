"""Learning-rate schedule, clipping factor and decay mask."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config import AttentionConfig, Config, OptimizerConfig, TrainConfig
from moe_jax.config.sections import ParameterGroup
from moe_jax.errors import ConfigError
from moe_jax.models.parameters import param_dims
from moe_jax.step.optimizer import clip_factor, learning_rate, make_optimizer
from tests.small import first_params, small_config


@pytest.mark.parametrize(
    ("schedule", "middle", "end"), [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1, 1)]
)
def test_warm_up_peak_and_end(schedule, middle, end):
    config = Config(
        optimizer=OptimizerConfig(learning_rate=0.5, schedule=schedule, warmup_steps=10), train=TrainConfig(steps=111)
    )
    rate = learning_rate(config)
    np.testing.assert_allclose(
        [rate(0), rate(10), rate(60), rate(110)], np.array([1 / 11, 1, middle, end]) / 2, rtol=1e-6
    )
    assert all(rate(step) < rate(step + 1) for step in range(10))


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize(
    ("warmup", "steps", "fraction"), [(5, 30, 0.0), (5, 30, 0.25), (0, 8, 0.0), (0, 2, 0.5), (6, 8, 0.0), (7, 8, 1.0)]
)
def test_the_last_step_has_the_final_rate_and_no_earlier_one(schedule, warmup, steps, fraction):
    settings = OptimizerConfig(learning_rate=0.5, schedule=schedule, warmup_steps=warmup, final_fraction=fraction)
    rate = learning_rate(Config(optimizer=settings, train=TrainConfig(steps=steps)))
    rates = [float(rate(step)) for step in range(steps + 3)]
    assert rates[warmup] == 0.5 == max(rates)
    assert rates[steps - 1 :] == [0.5 * fraction] * 4
    assert all(here > there for here, there in itertools.pairwise(rates[warmup:steps])), "down in each step"


def test_wsd_is_constant_and_then_falls_to_the_last_step():
    settings = OptimizerConfig(learning_rate=0.5, schedule="wsd", warmup_steps=5, final_fraction=0, decay_fraction=0.25)
    rate = learning_rate(Config(optimizer=settings, train=TrainConfig(steps=41)))
    rates = [float(rate(step)) for step in range(43)]
    assert rates[4] < rates[5] == rates[30] == 0.5 > rates[31]
    np.testing.assert_allclose(rates[30:], [*np.linspace(0.5, 0, 11), 0, 0], atol=1e-7)


def test_a_cosine_restarts_after_equal_numbers_of_steps():
    settings = OptimizerConfig(learning_rate=0.5, warmup_steps=4, final_fraction=0.1, restarts=2)
    rate = learning_rate(Config(optimizer=settings, train=TrainConfig(steps=34)))
    rates = [float(rate(step)) for step in range(35)]
    once = OptimizerConfig(learning_rate=0.5, warmup_steps=0, final_fraction=0.1)
    cycle = learning_rate(Config(optimizer=once, train=TrainConfig(steps=10)))
    np.testing.assert_allclose(rates[4:34], [float(cycle(step)) for step in range(10)] * 3, rtol=1e-6)
    assert rates[4] == rates[14] == rates[24] == 0.5 > rates[3]
    assert rates[33] == rates[34] == pytest.approx(0.05)


def test_a_run_that_gets_more_steps_decays_to_the_new_last_one():
    """Its rates are then those of a run that had them from the start: the step and `train.steps` alone count."""
    settings = OptimizerConfig(schedule="linear", warmup_steps=2, final_fraction=0)
    shorter, longer = (learning_rate(Config(optimizer=settings, train=TrainConfig(steps=steps))) for steps in (11, 21))
    assert float(shorter(10)) == float(longer(20)) == 0
    assert float(longer(11)) == pytest.approx(1e-3 * 9 / 18)


def test_a_run_shorter_than_its_warm_up_only_warms_up():
    rate = learning_rate(Config(optimizer=OptimizerConfig(warmup_steps=100), train=TrainConfig(steps=20)))
    assert 0 < rate(0) < rate(19) < 1e-3


def test_clipping_shrinks_long_gradients_only():
    np.testing.assert_allclose([clip_factor(jnp.float32(n), 2.0) for n in (0.0, 1.0, 2.0, 8.0)], [1, 1, 1, 0.25])
    assert clip_factor(jnp.float32(8), None) == 1


def with_groups(*groups, qk_clip=None):
    """The updates of a step without gradients, by path: AdamW's alone is weight decay."""
    settings = {"learning_rate": 0.5, "warmup_steps": 0, "schedule": "constant", "qk_clip": qk_clip}
    config = dataclasses.replace(small_config(1, 1), optimizer=OptimizerConfig(**settings, groups=groups))
    params = first_params(config.model)
    optimizer = make_optimizer(config, param_dims(config.model))
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params, is_good=True)
    found = zip(jax.tree.leaves_with_path(updates), jax.tree.leaves(params), strict=True)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): float((update / param).mean() / -0.5)
        for (path, update), param in found
    }


def test_a_parameter_has_the_first_group_that_matches_its_path():
    router = ParameterGroup(match=r"moe\.router$", learning_rate_factor=0.25)
    attention = ParameterGroup(match=r"^segments\.\d\.1\.attention", weight_decay=0.8)
    rest = ParameterGroup(match="segments", learning_rate_factor=0, weight_decay=0.3)
    found = with_groups(router, attention, rest)
    assert found["segments.0.1.moe.router"] == pytest.approx(0.25 * 0.1, rel=1e-4)
    assert found["segments.0.1.attention.query"] == pytest.approx(0.8, rel=1e-4)
    assert found["segments.0.1.attention.norm"] == pytest.approx(0.8, rel=1e-4), "vectors decay where a group says so"
    assert found["segments.0.0.attention.query"] == found["segments.0.1.moe.experts.up"] == 0, "they stay as they are"
    assert (found["embedding"], found["norm"]) == (pytest.approx(0.1, rel=1e-4), 0), "in no group"


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["moe.ruter"], "optimizer.groups[0].match=moe.ruter finds no parameter: use a part of a path such as "),
        (
            ["router", "moe.router"],
            "optimizer.groups[1].match=moe.router finds only parameters of groups before it: put it before them, or ",
        ),
    ],
)
def test_a_group_without_parameters_is_refused(patterns, message):
    with pytest.raises(ConfigError) as refusal:
        with_groups(*(ParameterGroup(match=pattern) for pattern in patterns))
    assert str(refusal.value).startswith(message)


def test_a_group_that_stays_as_it_is_is_not_clipped():
    refused = (
        r"^optimizer.qk_clip=5.0 scales .*\[0\].match=attention keeps segments.0.0.attention.key as it is by .*: use"
    )
    with pytest.raises(ConfigError, match=refused):
        with_groups(ParameterGroup(match="attention", learning_rate_factor=0), qk_clip=5.0)
    assert with_groups(ParameterGroup(match=r"attention\.norm", learning_rate_factor=0), qk_clip=5.0)


def test_only_matrices_decay():
    """With zero gradients, AdamW moves exactly the parameters that decay."""
    attention = AttentionConfig(bias=True, sinks=True)
    model = {"attention": attention, "qk_norm": True, "qk_norm_over": "projection"}
    config = small_config(1, 1, bias=True, model=model)
    params = first_params(config.model)
    optimizer = make_optimizer(config, param_dims(config.model))
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params, is_good=True)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name = jax.tree_util.keystr(path)
        is_vector = any(word in name for word in ("norm", "bias", "sink"))
        assert (np.abs(update).max() > 0) != is_vector, name
