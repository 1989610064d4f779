"""Copies of experts split their tokens, and learn the same."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config import Config, OptimizerConfig
from moe_jax.config.layer_layout import Stages
from moe_jax.models.gates.choice import tokens_per_expert
from moe_jax.models.placement import by_expert, first_experts, map_experts, moe_blocks, slots_of_pairs
from moe_jax.plan.memory import step_memory
from moe_jax.rebalance.moves import moves_between
from moe_jax.rebalance.transfer import Mover
from moe_jax.step.expert_placement import first_placement, slots_of
from moe_jax.step.trainer import make_trainer
from tests.small import small_config, tokens_of
from tests.step.gradients import first_state, mesh_of
from tests.step.test_migration import DROPLESS, migrating


def learning(config: Config) -> Config:
    """With a rate at which a step changes the next loss by more than tests allow."""
    return dataclasses.replace(config, optimizer=OptimizerConfig(warmup_steps=0, learning_rate=0.05))


ACCUMULATED = learning(small_config(2, 4, grad_accumulation=2, batch_size=16, **DROPLESS))
STAGES = small_config(1, 4, pipeline=2, batch_size=16, grad_accumulation=2, moe_layer_freq=1, **DROPLESS)


def with_copies(config: Config) -> np.ndarray:
    """Slots [M, S] with experts on two ranks, and one on three if there are as many; one slot stays free."""
    rng, moe, ranks = np.random.default_rng(1), config.model.moe, config.mesh.expert_ranks(config.mesh.sizes)
    slot_PL = first_experts(moe.num_experts, ranks, 1).reshape(ranks, -1)
    slot_PL[:-1, -1] = np.roll(slot_PL[:, 0], 1)[:-1]
    if ranks > 2:
        slot_PL[1, -1] = slot_PL[2, -1] = 0
    names = [np.append(rng.permutation(moe.num_experts), moe.num_experts) for _ in moe_blocks(Stages.of(config))]
    return np.stack([name[slot_PL.ravel()] for name in names]).astype(np.int32)


def placed(config: Config, state: dict, expert_MS: np.ndarray) -> dict:
    """A state without migration as one of a trainer that has copies."""
    shapes = make_trainer(config, mesh_of(config)).state_shapes
    rows = {}
    for m, (segment, place, row) in enumerate(moe_blocks(Stages.of(config))):
        rows.setdefault((segment, place), []).append((row, m))

    def spread(group, leaf):
        new = np.zeros((len(leaf), expert_MS.shape[1], *leaf.shape[2:]), leaf.dtype)
        for row, m in rows[group]:
            for slot, expert in enumerate(expert_MS[m]):
                if expert < leaf.shape[1]:
                    new[row, slot] = leaf[row, expert]
        return new

    host = map_experts(spread, jax.device_get(state))
    ranks = config.mesh.expert_ranks(config.mesh.sizes)
    host["placement"] = jax.device_get(first_placement(config.model, ranks, 1)) | {"expert_MS": expert_MS}
    return jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), host, shapes)


def assert_copies_equal(config: Config, state: dict) -> None:
    """Bit for bit, weights, moments and averages."""
    expert_MS, compared = np.asarray(state["placement"]["expert_MS"]), 0

    def compare(group, leaf):
        nonlocal compared
        for m, (segment, place, row) in enumerate(moe_blocks(Stages.of(config))):
            for expert in range(config.model.moe.num_experts) if (segment, place) == group else ():
                first, *others = np.flatnonzero(expert_MS[m] == expert)
                for slot in others:
                    np.testing.assert_array_equal(leaf[row, slot], leaf[row, first])
                    compared += 1
        return leaf

    map_experts(compare, jax.device_get(parts_of(state)))
    assert compared, "there are no copies"


def parts_of(state: dict) -> dict:
    return {name: state[name] for name in ("params", "optimizer", "ema") if name in state}


def in_order(config: Config, state: dict) -> dict:
    """Parameters, moments and averages, one copy of each expert."""
    host = jax.tree.map(jnp.asarray, jax.device_get(state))
    found = by_expert(host, slots_of(host), Stages.of(config)) if "placement" in state else host
    return jax.device_get(parts_of(found))


def test_copies_split_tokens_and_learn_the_same():
    """Loss, gradients (as first moments) and their norm are those without copies to round-off.

    Of a step without migration.
    """
    config = ACCUMULATED
    mesh = mesh_of(config)
    copied = migrating(config, replicas=1)
    trainer, plain = make_trainer(copied, mesh), make_trainer(config, mesh)
    expected = first_state(config, plain)
    state = placed(copied, expected, with_copies(config))
    for step in range(3):
        expected, expected_metrics = plain.step(expected, tokens_of(config, step))
        state, metrics = trainer.step(state, tokens_of(config, step))
        for key in ("loss", "grad_norm", "load_balance_loss"):
            np.testing.assert_allclose(metrics[key], expected_metrics[key], rtol=1e-5 if step == 0 else 1e-3)
        if step == 0:
            np.testing.assert_array_equal(metrics["expert_load"], expected_metrics["expert_load"])
            chex.assert_trees_all_close(
                in_order(config, state)["optimizer"], in_order(config, expected)["optimizer"], rtol=1e-3, atol=1e-6
            )
    assert_copies_equal(config, state)
    loss = trainer.evaluate(state["params"], tokens_of(config), slots_of(state))
    np.testing.assert_allclose(loss, plain.evaluate(expected["params"], tokens_of(config)), rtol=1e-3)


def test_copies_take_tokens_in_turn():
    expert_S = jnp.asarray([2, 0, 3, 1, 0, 3, 0, 3])  # of three experts, 3: free
    expert_Tk = jnp.asarray(np.random.default_rng(0).integers(4, size=(3000, 2)))
    slot_Tk = slots_of_pairs(expert_Tk, expert_S, 3)
    assert (jnp.append(expert_S, 3)[slot_Tk] == expert_Tk).all(), "a copy of the expert that was chosen"
    count_S = tokens_per_expert(slot_Tk, len(expert_S))
    np.testing.assert_allclose(count_S[jnp.asarray([1, 4, 6])], 500, rtol=0.15)
    assert (slot_Tk[expert_Tk == 3] == len(expert_S)).all()


@pytest.mark.parametrize("speeds", [None, (1.0, 2.0, 1.0, 1.0)])
def test_copies_share_each_sequence_alike(speeds):
    """However a batch is split: which rows fit into buffers would depend on it."""
    expert_S = jnp.asarray([2, 0, 3, 1, 0, 3, 0, 3])
    expert_BNk = jnp.asarray(np.random.default_rng(0).integers(4, size=(4, 5, 2)))

    def slots(expert_BNk):
        return slots_of_pairs(expert_BNk.reshape(-1, 2), expert_S, 3, speeds, length=5)

    np.testing.assert_array_equal(slots(expert_BNk), jnp.concatenate([slots(each) for each in expert_BNk]))


def test_a_move_makes_copies_and_gives_them_up():
    """Weights, moments and averages go to free slots one way, by the program that also swaps; and nothing is lost."""
    averaging = dataclasses.replace(STAGES, optimizer=OptimizerConfig(ema_decay=0.5))
    config = migrating(averaging, replicas=1)
    trainer, stages = make_trainer(config, mesh_of(config)), Stages.of(config)
    mover, experts = Mover(config, trainer), config.model.moe.num_experts
    rng = np.random.default_rng(0)
    plain = make_trainer(averaging, mesh_of(config)).state_shapes
    host = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), plain)
    first = np.tile(first_experts(experts, mover.ranks, 1), (len(moe_blocks(stages)), 1))
    state, before = placed(config, host, first), first
    for after in (with_copies(config), first):
        plans = [
            moves_between(*map(np.ndarray.tolist, both), mover.ranks, experts)
            for both in zip(before, after, strict=True)
        ]
        assert any(move.copies for moves, _ in plans for move in moves)
        placement = state.pop("placement")
        state = mover.move(state, [moves for moves, _ in plans])
        before = np.asarray([slots for _, slots in plans], np.int32)
        state["placement"] = placement | {"expert_MS": before}
        chex.assert_trees_all_equal(in_order(config, state), in_order(config, host))
        if after is not first:
            assert_copies_equal(config, state)


def test_first_slots_hold_experts_once():
    np.testing.assert_array_equal(first_experts(8, 4, 2), [0, 1, 8, 8, 2, 3, 8, 8, 4, 5, 8, 8, 6, 7, 8, 8])


def test_plans_count_room_for_copies():
    config = migrating(ACCUMULATED, replicas=2)
    shapes = make_trainer(config, mesh_of(config)).state_shapes["params"]
    held = (leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert step_memory(config, "cpu").parameters == 4 * sum(map(np.prod, held))
