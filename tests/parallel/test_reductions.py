"""Sums of a flat vector over mesh axes: values, the same bits everywhere, and what becomes of padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.parallel.mesh import BATCH_AXES, Axis
from moe_jax.parallel.reductions import REDUCTIONS, SCATTERS, scatter_of
from moe_jax.parallel.sharding import BATCH_SPEC, REPLICATED
from tests.parallel.per_device import on_mesh

AXES = {"both axes": BATCH_AXES, "data": (Axis.DATA,), "expert": (Axis.EXPERT,)}


def reduced(name, axes, x_8n, *, data=2, expert=4):
    def body(x_1n):
        return REDUCTIONS[name](x_1n[0], axes)[None]

    return np.asarray(on_mesh(body, BATCH_SPEC, BATCH_SPEC, data=data, expert=expert)(x_8n))


def groups_of(axes, x_8n, data=2, expert=4):
    """The vectors [groups, ranks, n] of the devices that sum with each other."""
    x_den = x_8n.reshape(data, expert, -1)
    if axes == BATCH_AXES:
        return x_8n[None]
    return x_den if axes == (Axis.EXPERT,) else x_den.swapaxes(0, 1)


@pytest.mark.parametrize("length", [1, 8, 13])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_rank_gets_the_sum_over_the_named_axes_only(name, axes, length):
    x = np.arange(8 * length, dtype=np.int32).reshape(8, length) ** 2  # whole numbers: sums are exact
    ours, given = groups_of(AXES[axes], reduced(name, AXES[axes], x)), groups_of(AXES[axes], x)
    np.testing.assert_array_equal(ours, np.broadcast_to(given.sum(axis=1, keepdims=True), given.shape))


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize(("name", "platform"), [*((name, "cpu") for name in SCATTERS), ("all_reduce", "tpu")])
def test_a_scattered_sum_leaves_every_rank_its_own_row(name, platform, axes):
    ranks = {"both axes": 8, "data": 2, "expert": 4}[axes]
    x = np.arange(8 * ranks * 3, dtype=np.int32).reshape(8, ranks, 3) ** 2

    def body(x_1Pm):
        return scatter_of(name, platform)(x_1Pm[0], AXES[axes])[None]

    own = np.asarray(on_mesh(body, BATCH_SPEC, BATCH_SPEC, data=2, expert=4)(x))
    given = groups_of(AXES[axes], x.reshape(8, -1)).reshape(-1, ranks, ranks, 3)
    np.testing.assert_array_equal(groups_of(AXES[axes], own), given.sum(axis=1))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_all_ranks_hold_the_same_bits_near_the_exact_sum(name):
    """Replicated parameters would drift apart otherwise."""
    x = np.asarray(jax.random.normal(jax.random.key(0), (8, 1001)))
    sums = reduced(name, BATCH_AXES, x)
    np.testing.assert_array_equal(sums, np.broadcast_to(sums[0], sums.shape))
    np.testing.assert_allclose(sums[0], x.astype(np.float64).sum(axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_sum_over_one_rank_changes_nothing(name):
    x = np.asarray(jax.random.normal(jax.random.key(1), (8, 5)))
    np.testing.assert_array_equal(reduced(name, (Axis.EXPERT,), x, data=8, expert=1), x)


@pytest.mark.parametrize(
    ("name", "collectives"),
    [
        ("all_reduce", {"all_reduce": 1}),
        ("scatter_gather", {"reduce_scatter": 1, "all_gather": 1}),
        ("ring", {"collective_permute": 14}),
        ("background", {}),
    ],
)
def test_each_way_is_the_collectives_it_names(name, collectives):
    body = on_mesh(lambda x: REDUCTIONS[name](x, BATCH_AXES), BATCH_SPEC, BATCH_SPEC, data=2, expert=4)
    text = body.lower(jnp.zeros(8 * 16)).as_text()
    kinds = ("all_reduce", "reduce_scatter", "all_gather", "collective_permute", "all_to_all")
    found = {kind: text.count(f'"stablehlo.{kind}"') for kind in kinds}
    assert {kind: count for kind, count in found.items() if count} == collectives


def test_the_part_that_other_tasks_wait_for_is_as_it_arrives():
    """XLA's simplifier forgets that something waits for an array which is used in no other way."""

    def start(x_Pm):
        return scatter_of("all_reduce", "tpu").start(x_Pm, BATCH_AXES)[-1]

    body = on_mesh(start, REPLICATED, BATCH_SPEC, data=2, expert=4)
    inner = next(eqn for eqn in jax.make_jaxpr(body)(jnp.zeros((8, 13))).jaxpr.eqns if "jaxpr" in eqn.params)
    while "jaxpr" in inner.params:
        program = getattr(inner.params["jaxpr"], "jaxpr", inner.params["jaxpr"])
        inner = program.eqns[-1]
    assert inner.primitive.name == "reduce_scatter"
    assert program.outvars == inner.outvars
