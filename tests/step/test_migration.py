"""Where experts lie changes nothing but who computes what."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config import Config, MigrationConfig, OptimizerConfig
from moe_jax.config.layer_layout import Stages
from moe_jax.models.placement import by_expert
from moe_jax.rebalance.moves import moves_between
from moe_jax.rebalance.transfer import Mover
from moe_jax.step.expert_placement import first_placement
from moe_jax.step.trainer import make_trainer
from tests.compiled import NEWER_EMITTERS
from tests.small import small_config, tokens_of
from tests.step.gradients import first_state, mesh_of
from tests.step.test_tensor_axis import UNIFIED

LOOPED = {"model": {"num_layers": 4}, "moe_layer_freq": 1}
CHUNKED = {**UNIFIED, "weight_grad": "greedy", "grad_reduce": "bucketed", "bucket_cap_mb": 0.002}
DROPLESS = {"capacity_factor": None, "exchange": {"rank_capacity_factor": None}}
CASES = {
    "dropless, accumulated": small_config(2, 4, moe_layer_freq=1, grad_accumulation=2, batch_size=16, **DROPLESS),
    "loops of blocks": small_config(2, 4, schedule=CHUNKED, batch_size=16, gate="noisy", **LOOPED),
    "pipeline stages": small_config(1, 2, pipeline=2, batch_size=16, grad_accumulation=2, **LOOPED, **DROPLESS),
}
EVALUATED = ("dropless, accumulated", "pipeline stages")  # by ways of their own


def migrating(config: Config, **settings) -> Config:
    return dataclasses.replace(config, migration=MigrationConfig(enabled=True, payback_steps=None, **settings))


def random_slots(config: Config) -> np.ndarray:
    rng, shape = np.random.default_rng(1), first_placement(config.model)["slot_ME"].shape
    return np.stack([rng.permutation(shape[1]) for _ in range(shape[0])]).astype(np.int32)


def in_slots(tree, slot_ME, stages: Stages):
    """The inverse of `by_expert`."""
    return by_expert(jax.tree.map(jnp.asarray, tree), jnp.argsort(slot_ME, axis=1), stages)


def moved(config: Config, state: dict, slot_ME: np.ndarray) -> dict:
    """A state of a trainer that migrates whose experts lie in these slots."""
    shapes = make_trainer(config, mesh_of(config)).state_shapes
    host = in_slots(jax.device_get(state), slot_ME, Stages.of(config))
    host["placement"] = jax.device_get(first_placement(config.model)) | {"slot_ME": slot_ME}
    return jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), host, shapes)


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_bit_for_bit(name):
    """As without any placement: parameters, moments, losses, norms, all that routers counted, and validation."""
    config, stages = CASES[name], Stages.of(CASES[name])
    plain, with_slots = make_trainer(config, mesh_of(config)), make_trainer(migrating(config), mesh_of(config))
    expected = first_state(config, plain)
    slot_ME = random_slots(config)
    state = moved(migrating(config), expected, slot_ME)
    step_plain, step = (
        trainer.step.lower(before, tokens_of(config, 0)).compile(NEWER_EMITTERS)
        for trainer, before in ((plain, expected), (with_slots, state))
    )
    for seed in range(3):
        expected, expected_metrics = step_plain(expected, tokens_of(config, seed))
        state, metrics = step(state, tokens_of(config, seed))
        chex.assert_trees_all_equal(jax.device_get(metrics), jax.device_get(expected_metrics))
    assert (np.asarray(state["placement"]["slot_ME"]) == slot_ME).all()
    np.testing.assert_allclose(state["placement"]["load_ME"].sum(axis=1), 3, rtol=1e-6)
    if name in EVALUATED:
        loss = plain.evaluate(expected["params"], tokens_of(config))
        assert with_slots.evaluate(state["params"], tokens_of(config), state["placement"]["slot_ME"]) == loss
    del state["placement"]
    in_order = by_expert(jax.tree.map(jnp.asarray, jax.device_get(state)), jnp.asarray(slot_ME), stages)
    chex.assert_trees_all_equal(jax.device_get(in_order), jax.device_get(expected))


MOVED = {
    "2 ranks": migrating(small_config(2, 2, **LOOPED)),
    "3 ranks": migrating(small_config(1, 3, num_experts=9, batch_size=6)),
    "4 ranks, cut moments": dataclasses.replace(
        migrating(small_config(2, 4, batch_size=16, **LOOPED)), optimizer=OptimizerConfig(zero=1, ema_decay=0.5)
    ),
    "stages": migrating(small_config(1, 4, pipeline=2, batch_size=16, grad_accumulation=2, **LOOPED)),
    "8 ranks over context": migrating(
        small_config(1, 4, context=2, experts_over_context=True, seq_len=8, num_experts=16, moe_layer_freq=1)
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_move_takes_weights_and_moments_to_their_new_slots(name):
    """By one program for all moves, in place, which sends what was predicted and nothing else."""
    config = MOVED[name]
    trainer, stages = make_trainer(config, mesh_of(config)), Stages.of(config)
    mover = Mover(config, trainer)
    shapes = {key: trainer.state_shapes[key] for key in ("params", "optimizer", "ema") if key in trainer.state_shapes}
    rng = np.random.default_rng(0)
    host = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), shapes)
    host = by_expert(jax.tree.map(jnp.asarray, host), first_placement(config.model)["slot_ME"], stages)
    state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), jax.device_get(host), shapes)
    old = random_slots(config)
    experts = old.shape[1]
    plans = [moves_between(range(experts), np.argsort(slots).tolist(), mover.ranks, experts) for slots in old]
    cost = mover.cost([moves for moves, _ in plans])
    state = mover.move(state, [moves for moves, _ in plans])
    slot_ME = jnp.argsort(jnp.asarray([slots for _, slots in plans]), axis=1)
    in_order = by_expert(jax.tree.map(jnp.asarray, jax.device_get(state)), slot_ME, stages)
    chex.assert_trees_all_equal(jax.device_get(in_order), jax.device_get(host))
    assert cost.rounds < sum(len(moves) for moves, _ in plans) or mover.ranks < 4
    (group,) = mover.groups
    program = mover.lowered(group).compile()
    sends = re.findall(r"= f32\[(\d+)\]\S* collective-permute\(", program.as_text())
    assert {4 * int(size) for size in sends} == {mover.expert_bytes(group)}
    assert len(sends) == mover.ranks - 1
    assert cost.num_bytes == cost.sends * mover.expert_bytes(group)
    assert not re.search(r"all-reduce|all-gather|all-to-all|reduce-scatter", program.as_text())
    assert program.memory_analysis().temp_size_in_bytes < 5 * mover.expert_bytes(group) + 4096, "no array is copied"
