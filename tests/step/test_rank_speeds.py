"""Slow ranks hold fewer experts, and copies share tokens by speed; the training is the same."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.config.layer_layout import Stages
from moe_jax.models.gates.choice import tokens_per_expert
from moe_jax.models.placement import moe_blocks, slots_of_pairs
from moe_jax.step.trainer import make_trainer
from tests.small import small_config, tokens_of
from tests.step.gradients import first_state, mesh_of
from tests.step.test_migration import DROPLESS, migrating
from tests.step.test_replicas import ACCUMULATED, assert_copies_equal, in_order, learning, placed, with_copies
from tests.step.test_tensor_axis import UNIFIED

SPEEDS = (1.0, 1.0, 0.5, 0.25)
MICROBATCHES = learning(small_config(2, 4, schedule=UNIFIED, batch_size=16, moe_layer_freq=1, **DROPLESS))


def test_copies_take_tokens_in_proportion_to_the_speeds_of_their_ranks():
    speeds = (2.0, 1.0, 0.5, 0.5)
    expert_S = jnp.asarray([2, 0, 0, 1, 0, 3, 1, 3])  # of three experts, 3: free
    expert_Tk = jnp.asarray(np.random.default_rng(0).integers(4, size=(6000, 2)))
    slot_Tk = slots_of_pairs(expert_Tk, expert_S, 3, speeds)
    assert (jnp.append(expert_S, 3)[slot_Tk] == expert_Tk).all(), "a copy of the expert that was chosen"
    count_S = tokens_per_expert(slot_Tk, len(expert_S))
    np.testing.assert_allclose(count_S[jnp.asarray([1, 2, 4])], 3000 * np.asarray([4, 2, 1]) / 7, rtol=0.1)
    np.testing.assert_allclose(count_S[jnp.asarray([3, 6])], 3000 * np.asarray([2, 1]) / 3, rtol=0.1)
    few_Tk = jnp.zeros((14, 1), jnp.int32)
    few_S = tokens_per_expert(slots_of_pairs(few_Tk, expert_S, 3, speeds), len(expert_S))
    np.testing.assert_allclose(few_S[jnp.asarray([1, 2, 4])], [8, 4, 2], atol=1), "few tokens are shared so, too"


def test_fewer_experts_on_slow_ranks_train_the_same():
    """From the first step on: losses, gradients (as first moments) and norms as with equally many on each rank.

    Both by one program, as a placement is data; the next test compares another one with a step without placement.
    """
    config = MICROBATCHES
    mesh = mesh_of(config)
    uneven, equal = migrating(config, replicas=2, rank_speeds=SPEEDS), migrating(config, replicas=2)
    trainer = make_trainer(uneven, mesh)
    state, expected = trainer.init(), make_trainer(equal, mesh).init()
    experts = config.model.moe.num_experts
    held_MP = (np.asarray(state["placement"]["expert_MS"]) < experts).reshape(-1, 4, experts // 4 + 2).sum(axis=2)
    assert (held_MP == [4, 3, 1, 0]).all(), "the slowest has none"
    assert len(held_MP) == len(moe_blocks(Stages.of(config)))
    chex.assert_trees_all_equal(in_order(uneven, state), in_order(equal, expected))
    for step in range(2):
        state, metrics = trainer.step(state, tokens_of(config, step))
        expected, expected_metrics = trainer.step(expected, tokens_of(config, step))
        for key in ("loss", "grad_norm", "load_balance_loss"):
            np.testing.assert_allclose(metrics[key], expected_metrics[key], rtol=1e-5)
        np.testing.assert_array_equal(metrics["expert_load"], expected_metrics["expert_load"])
        chex.assert_trees_all_close(in_order(uneven, state), in_order(equal, expected), rtol=1e-4, atol=1e-6)


def test_copies_that_share_by_speed_learn_the_same():
    config = ACCUMULATED
    mesh = mesh_of(config)
    copied = migrating(config, replicas=1, rank_speeds=SPEEDS)
    trainer, plain = make_trainer(copied, mesh), make_trainer(config, mesh)
    expected = first_state(config, plain)
    state = placed(copied, expected, with_copies(config))
    for step in range(2):
        expected, expected_metrics = plain.step(expected, tokens_of(config, step))
        state, metrics = trainer.step(state, tokens_of(config, step))
        np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-5 if step == 0 else 1e-3)
        if step == 0:
            chex.assert_trees_all_close(
                in_order(config, state)["optimizer"], in_order(config, expected)["optimizer"], rtol=1e-3, atol=1e-6
            )
    assert_copies_equal(config, state)
    jax.block_until_ready(state)
