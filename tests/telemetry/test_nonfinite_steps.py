"""A step whose numbers are not finite on one device changes nothing: what follows is as if it had been left out."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config import Config, MigrationConfig, OptimizerConfig, TrainConfig
from moe_jax.step import fault_injection as faults
from moe_jax.step.trainer import make_trainer
from moe_jax.telemetry.nonfinite_steps import BadSteps
from tests.small import small_config, tokens_of
from tests.step.gradients import first_state, mesh_of

BIASED = {"gate": "sigmoid", "bias_update_rate": 0.01}
SCHEDULED = {"schedule": {"policy": "unified", "microbatches": 2, "weight_grad": "greedy"}, "batch_size": 16}
PARTS = {"grad_accumulation": 2}
CASES = {
    "migration": dataclasses.replace(
        small_config(2, 2, **BIASED), migration=MigrationConfig(enabled=True, payback_steps=None)
    ),
    "scheduled, zero": dataclasses.replace(
        small_config(2, 2, **SCHEDULED, **PARTS, **BIASED), optimizer=OptimizerConfig(zero=1)
    ),
    "pipeline": small_config(1, 2, pipeline=2, **PARTS, **BIASED, moe_layer_freq=1),
}
ANY = float("inf")


@pytest.mark.parametrize("name", CASES)
def test_nan_on_one_device_and_a_loss_above_its_bound_change_nothing(name):
    config = CASES[name]
    trainer = make_trainer(config, mesh_of(config))

    def after(bounds_of_seeds: dict[int, float], first_step: int) -> tuple[list, list]:
        """States and metrics after each step of these batches."""
        state, states, metrics = first_state(config, trainer) | {"step": jnp.int32(first_step)}, [], []
        for seed, bound in bounds_of_seeds.items():
            state, found = trainer.step(state, tokens_of(config, seed), jnp.float32(bound))
            states.append(jax.device_get({part: state[part] for part in state if part != "step"}))
            metrics.append(jax.device_get(found))
        return states, metrics

    with faults.nan_at(2, device=3):  # of the last stage, if there are any
        states, metrics = after({0: ANY, 1: ANY, 2: 1.0, 3: 10.0}, first_step=0)
    assert [int(each["bad_step"]) for each in metrics] == [0, 1, 1, 0]
    assert np.isnan(metrics[1]["loss"])
    assert 1 < metrics[2]["loss"] < 10
    for state in states[1:3]:
        chex.assert_trees_all_equal(state, states[0])
    expected, expected_metrics = after({0: ANY, 3: ANY}, first_step=8)
    chex.assert_trees_all_equal(states[3], expected[1])
    assert metrics[3]["learning_rate"] == expected_metrics[1]["learning_rate"]


class Warnings(list):
    """In the place of a RunLog."""

    warn = list.append


def looked(train_settings: TrainConfig, losses: list[float], bad: tuple[int, ...] = ()) -> tuple[BadSteps, Warnings]:
    output = Warnings()
    steps = BadSteps(Config(train=train_settings), output)
    for step, loss in enumerate(losses, start=1):
        steps.update(step, {"loss": loss, "grad_norm": 1.0, "bad_step": int(step in bad)})
    return steps, output


def test_spikes_are_reported_by_the_median_of_the_losses_before():
    losses = [float("inf"), *[2.0] * 7, 5.0, 2.0, 5.0, 3.9, 2.0]
    steps, output = looked(TrainConfig(spike_factor=2), losses)
    assert output == ["step 11: loss 5 is 2.50 × the median of the last 9 (train.spike_factor=2)"]
    assert steps.counts() == {"bad_steps": 0, "loss_spikes": 1}


def test_a_run_of_bad_steps_is_reported_once_and_a_good_one_ends_it():
    nan = float("nan")
    steps, output = looked(TrainConfig(), [1.0, nan, nan, 1.0, nan], bad=(2, 3, 5))
    left = "parameters, optimizer and balance are left as they were (1 of 3 in a row)"
    assert output == [f"step {step} has loss=nan: {left}" for step in (2, 5)]
    assert (steps.counts(), steps.in_a_row, steps.too_many) == ({"bad_steps": 3}, 1, False)
    assert looked(TrainConfig(bad_in_a_row=2), [nan, nan], bad=(1, 2))[0].too_many
    assert not looked(TrainConfig(bad_in_a_row=None), [nan] * 9, bad=tuple(range(1, 10)))[0].too_many
