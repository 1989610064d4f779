"""Copies of a step's most loaded experts change nothing but who computes what."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moe_jax.config import Config, OptimizerConfig
from moe_jax.models import hot_experts
from moe_jax.models.dispatchers import dropless
from moe_jax.models.dispatchers.hot import permute_with_copies
from moe_jax.models.dispatchers.protocol import Buffer, full_capacity
from moe_jax.models.gates.choice import TopKRouting, tokens_per_expert
from moe_jax.models.hot_experts import choose
from moe_jax.parallel.expert_copies import copied_experts
from moe_jax.parallel.mesh import Axis
from moe_jax.step.expert_placement import slots_of
from moe_jax.step.scheduled import hot_copies
from moe_jax.step.trainer import make_trainer
from tests.small import first_params, small_config, tokens_of
from tests.step.gradients import first_state, mesh_of, sharded_gradients
from tests.step.test_migration import migrating
from tests.step.test_replicas import placed, with_copies

SKEWED = {"gate": "tests.step.skewed:choose", "moe_layer_freq": 1, "capacity_factor": None}


def config_of(data: int, expert: int, factor: float | None = None, **settings) -> Config:
    exchange = {"rank_capacity_factor": factor, **settings.pop("exchange", {})}
    return small_config(data, expert, **{"batch_size": 16, "exchange": exchange, **SKEWED, **settings})


def copying(config: Config, experts: int) -> Config:
    return dataclasses.replace(config, exchange=dataclasses.replace(config.exchange, hot_experts=experts))


MICROBATCHES = {"policy": "unified", "microbatches": 2}
CASES = {
    "as many as experts": (config_of(1, 4), 8),
    "buffers, accumulated": (config_of(2, 2, factor=1.9, grad_accumulation=2), 1),
    "microbatches, in a loop of blocks": (
        config_of(
            *(1, 4),
            model={"num_layers": 4},
            schedule={**MICROBATCHES, "weight_grad": "greedy", "grad_reduce": "bucketed"},
        ),
        3,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same(name):
    """Losses and all that routers counted bit for bit; gradients up to the order of sums."""
    config, experts = CASES[name]
    params, tokens = first_params(config.model), tokens_of(config)
    expected = sharded_gradients(config, params, tokens)
    found = sharded_gradients(copying(config, experts), params, tokens)
    assert found.loss == expected.loss
    chex.assert_trees_all_equal(found.parts, expected.parts)
    chex.assert_trees_all_close(found.grads, expected.grads, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("schedule", "module", "function"),
    [({}, hot_experts, "copied_experts"), (MICROBATCHES, hot_copies, "parts_of_copies")],
    ids=["autodiff", "microbatches"],
)
def test_rows_of_copies_are_computed_by_copies(monkeypatch, schedule, module, function):
    """Without their weights the loss is another one."""
    config = copying(config_of(1, 4, schedule=schedule, model={"num_layers": 1}), 3)
    params, tokens = first_params(config.model), tokens_of(config)
    weights = getattr(module, function)

    def nothing(*arguments):
        return jax.tree.map(jnp.zeros_like, weights(*arguments))

    expected = sharded_gradients(config, params, tokens)
    monkeypatch.setattr(module, function, nothing)
    assert sharded_gradients(config, params, tokens).loss != pytest.approx(float(expected.loss), rel=1e-5)


@pytest.mark.parametrize("gather", ["prefetch", "block"])
def test_copies_of_the_backward_pass_are_of_weights_gathered_for_it(monkeypatch, gather):
    """Those of the forward pass would stay in memory. The highest block keeps its weights."""
    schedule = {"policy": "unified", "microbatches": 2, "remat": "full", "unroll": 3}
    config = config_of(2, 2, model={"num_layers": 3}, schedule=schedule)
    config = copying(dataclasses.replace(config, optimizer=OptimizerConfig(zero=3)), 2)
    schedule = dataclasses.replace(config.schedule, param_gather=gather)
    config = dataclasses.replace(config, schedule=schedule)
    sent, parts_of_copies = [], hot_copies.parts_of_copies
    monkeypatch.setattr(
        hot_copies, "parts_of_copies", lambda experts, *rest: sent.append(experts) or parts_of_copies(experts, *rest)
    )
    trainer = make_trainer(config, mesh_of(config))
    jax.eval_shape(trainer.step, trainer.state_shapes, tokens_of(config))
    assert len(sent) == 6, "three blocks, forward and backward"
    same = [len({id(leaf) for each in (sent[f], sent[5 - f]) for leaf in jax.tree.leaves(each)}) == 3 for f in range(3)]
    assert same == [False, False, True], "by block"


def test_twenty_steps_are_the_same():
    """The first loss bit for bit; afterwards parameters have learned from sums in another order.

    Fully sharded experts are gathered over data ranks, and then copied over expert ranks.
    """
    config = dataclasses.replace(config_of(2, 4), optimizer=OptimizerConfig(zero=3))
    mesh = mesh_of(config)
    losses = []
    for own in (config, copying(config, 2)):
        trainer = make_trainer(own, mesh)
        state = first_state(own, trainer)
        losses.append([])
        for step in range(20):
            state, metrics = trainer.step(state, tokens_of(config, step))
            losses[-1].append(float(metrics["loss"]))
        losses[-1].append(float(trainer.evaluate(state["params"], tokens_of(config))))
    assert losses[0][0] == losses[1][0]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_experts_that_have_moved_and_have_replicas_are_copied():
    """Positions are copied, wherever experts are."""
    config = migrating(config_of(2, 4), replicas=1)
    mesh, metrics = mesh_of(config), []
    plain = dataclasses.replace(config_of(2, 4))
    first = first_state(plain, make_trainer(plain, mesh))
    for own in (config, copying(config, 3)):
        trainer = make_trainer(own, mesh)
        state = placed(config, first, with_copies(config))
        state, found = trainer.step(state, tokens_of(config))
        metrics.append(jax.device_get(found))
        assert slots_of(state) is not None
    np.testing.assert_allclose(metrics[0].pop("grad_norm"), metrics[1].pop("grad_norm"), rtol=1e-6)
    chex.assert_trees_all_equal(*metrics)


def test_copies_are_exact_and_owners_get_the_sum_of_their_gradients():
    mesh = jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    params = {"up": rng.standard_normal((8, 3, 5), np.float32), "down_bias": rng.standard_normal((8, 3), np.float32)}
    position_K = np.asarray([5, 8, 0], np.int32)  # 8: not used
    upstream = jax.tree.map(lambda x: rng.standard_normal((4, 3, *x.shape[1:]), np.float32), params)

    def body(params, upstream, position_K):
        copies, pull = jax.vjp(lambda own: copied_experts(own, position_K, Axis.EXPERT, "float32"), params)
        return jax.tree.map(lambda x: x[None], copies), pull(jax.tree.map(lambda x: x[0], upstream))[0]

    spec = PartitionSpec("expert")
    inputs = spec, spec, PartitionSpec()
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=inputs, out_specs=spec, check_vma=False))
    copies, grads = jax.device_get(run(params, upstream, position_K))
    for name, whole in params.items():
        for rank in range(4):
            np.testing.assert_array_equal(copies[name][rank][[0, 2]], whole[[5, 0]])
            assert not copies[name][rank][1].any()
        expected = np.zeros_like(whole)
        expected[[5, 0]] = upstream[name].sum(axis=0)[[0, 2]]
        np.testing.assert_allclose(grads[name], expected, rtol=1e-6)


def loads(count_PS: np.ndarray, copied: set[int]) -> np.ndarray:
    """Rows that each rank computes, one pair after another."""
    ranks, slots = count_PS.shape
    load_P = np.zeros(ranks, int)
    for rank in range(ranks):
        for slot in range(slots):
            load_P[rank if slot in copied else slot // (slots // ranks)] += count_PS[rank, slot]
    return load_P


@pytest.mark.parametrize("seed", range(4))
def test_each_copy_makes_loads_as_even_as_one_can(seed):
    rng = np.random.default_rng(seed)
    count_PS = rng.poisson(np.exp(rng.normal(2, 1.5, 16)), (4, 16)).astype(np.int32)
    found = np.asarray(choose(jnp.asarray(count_PS), 5))
    copied: set[int] = set()
    for slot in found:
        before = (loads(count_PS, copied) ** 2).sum()
        best = min((loads(count_PS, copied | {other}) ** 2).sum() for other in range(16))
        if slot == 16:
            assert best >= before * (1 - 1e-6), "another copy would help"
            continue
        assert slot not in copied
        copied.add(int(slot))
        np.testing.assert_allclose((loads(count_PS, copied) ** 2).sum(), best, rtol=1e-6)
    assert loads(count_PS, copied).max() < loads(count_PS, set()).max()


def test_nothing_is_copied_if_loads_are_even():
    assert (choose(jnp.full((4, 8), 5, jnp.int32), 3) == 8).all()
    assert (choose(jnp.zeros((4, 8), jnp.int32), 3) == 8).all(), "no tokens at all"


def test_a_copy_lowers_the_load_of_the_busiest_rank():
    count_PS = jnp.ones((4, 8), jnp.int32).at[:, 3].set(50)
    np.testing.assert_array_equal(choose(count_PS, 2)[:1], [3])


@pytest.mark.parametrize("rows", [None, 5])
def test_rows_of_copies_are_not_sent(rows):
    """Each kept pair has one row of its token, in the block of its rank or among those of copies."""
    tokens, width = 12, 4
    moe = small_config(1, 4, capacity_factor=None).model.moe
    rng = np.random.default_rng(0)
    x_TD = jnp.asarray(rng.standard_normal((tokens, width), np.float32))
    expert_Tk = jnp.asarray([rng.choice(9, 2, replace=False) for _ in range(tokens)], jnp.int32)  # 8: no expert
    choice = TopKRouting(expert_Tk, jnp.ones((tokens, 2)), jnp.zeros((tokens, 8)))
    capacity = full_capacity(moe, tokens)._replace(buffer=rows and Buffer(rows, tokens))
    sent, metadata, hot = permute_with_copies(x_TD, choice, moe, 4, capacity, jnp.asarray([6, 8, 1]))
    count_E = np.asarray(tokens_per_expert(expert_Tk, 8))
    np.testing.assert_array_equal(hot.rows.sizes, [[count_E[6], 0, count_E[1]]])
    assert not sent.sizes.reshape(-1)[np.asarray([6, 1])].any()
    others, _ = dropless.permute(
        x_TD,
        choice._replace(expert_Tk=jnp.where(jnp.isin(expert_Tk, jnp.asarray([6, 1])), 8, expert_Tk)),
        moe,
        4,
        capacity,
    )
    chex.assert_trees_all_equal(sent, others)
    whole = np.concatenate([sent.rows.reshape(-1, width), hot.rows.rows[0]])
    dest_Tk = np.asarray(metadata.permutation.dest_index_Tk)
    kept_Tk = dest_Tk < len(whole)
    for (token, choice_of), dest in np.ndenumerate(dest_Tk):
        if kept_Tk[token, choice_of]:
            np.testing.assert_array_equal(whole[dest], x_TD[token])
    assert len(set(dest_Tk[kept_Tk].tolist())) == kept_Tk.sum()
    assert kept_Tk.sum() + metadata.num_dropped == (expert_Tk < 8).sum()
    assert kept_Tk[np.isin(expert_Tk, [6, 1])].all(), "copies' rows need no space in a buffer"
