"""Which tasks of a scheduled step wait for which, beyond what they compute with."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from moe_jax.config import Config
from moe_jax.parallel.reductions import ReduceImpl
from moe_jax.step.scheduled.grad_reduce import GradientReducer
from moe_jax.step.scheduled.issue_order import IssueOrder
from moe_jax.step.scheduled.jaxpr_utils import needed_for

SENT = 3  # collectives, each issued before a compute task


def issued(platform: str, *, gathers: bool) -> list[list[str]]:
    """Issue collectives ("sin") and compute tasks ("cos") in turn, which share no data; return what each task needs."""

    def step(sent: list[jax.Array], computed: list[jax.Array]) -> list[jax.Array]:
        order, results = IssueOrder(platform, gathers), []
        for x, y in zip(sent, computed, strict=True):
            order.record_comm(jnp.sin(order.after_comm(x)))
            results.append(jnp.cos(order.after_compute(y)))
            order.record_compute(results[-1])
        return results

    arrays = [jnp.ones(2)] * SENT
    program = jax.make_jaxpr(step)(arrays, arrays).jaxpr
    return [[eqn.primitive.name for eqn in needed_for([out], program.eqns)] for out in program.outvars]


@pytest.mark.parametrize(
    ("platform", "gathers", "collectives"),
    [("tpu", True, [0, 1, 1]), ("tpu", False, [0, 0, 0]), ("gpu", True, [0, 0, 0])],
)
def test_where_tpus_gather_weights_compute_waits_for_earlier_collectives(platform, gathers, collectives):
    """XLA:TPU starts collectives as late as possible: without this, most would be at the end of an iteration."""
    needed = issued(platform, gathers=gathers)
    assert [names.count("cos") for names in needed] == [1, 2, 3]
    assert [names.count("sin") for names in needed] == collectives


def test_gathers_between_nodes_overlap_with_two_compute_tasks():
    """An exchange waits for no gather, a gather for the compute task before it and the gather before it, and a compute
    task for what was issued before the task before the previous one. XLA:GPU would place gathers next to each other.
    """

    def step(shards: list[jax.Array], rows: list[jax.Array], computed: list[jax.Array]) -> list[list[jax.Array]]:
        order, gathered, sent, results = IssueOrder("gpu", gathers=True, uses_network=True), [], [], []
        for shard, row, y in zip(shards, rows, computed, strict=True):
            gathered.append(jnp.tan(order.after_gather(shard)))
            order.record_gather(gathered[-1])
            sent.append(jnp.sin(order.after_comm(row)))
            order.record_comm(sent[-1])
            results.append(jnp.cos(order.after_compute(y)))
            order.record_compute(results[-1], jnp.exp(y))
        return [gathered, sent, results]

    arrays = [jnp.ones(2)] * SENT
    program = jax.make_jaxpr(step)(arrays, arrays, arrays).jaxpr
    needed = [[eqn.primitive.name for eqn in needed_for([out], program.eqns)] for out in program.outvars]
    gathered, sent, results = needed[:SENT], needed[SENT : 2 * SENT], needed[2 * SENT :]
    assert [(names.count("tan"), names.count("cos"), names.count("sin")) for names in gathered] == [
        (1, 0, 0),
        (2, 1, 0),
        (3, 2, 0),
    ]
    assert [(names.count("tan"), names.count("cos"), names.count("sin")) for names in sent] == [
        (0, 0, 1),
        (0, 0, 2),
        (0, 0, 3),
    ]
    # all results of the task before are awaited
    assert [(names.count("tan"), names.count("exp")) for names in results] == [(0, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize(("platform", "sums"), [("tpu", 1), ("cpu", 2)])
def test_on_tpus_small_sums_are_last(platform, sums):
    """They are synchronous there: next to an exchange, compute would wait for it."""
    impl = ReduceImpl(lambda x, _: (jnp.sin(x),), lambda started: started[0])

    def step(large: jax.Array, small: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        dims = SimpleNamespace(config=Config(), compute=SimpleNamespace(platform=platform))
        reducer = GradientReducer((), SimpleNamespace(dims=dims, order=IssueOrder(platform)), None)
        _, started = [reducer._started(impl, gradient, ()) for gradient in (large, small)]
        sent = jnp.cos(reducer.tasks.order.after_comm(rows))
        reducer.tasks.order.record_comm(sent)
        return sent, started.arrive(lambda x: x)

    program = jax.make_jaxpr(step)(jnp.ones(2**16), jnp.ones(4), jnp.ones(3)).jaxpr
    sent, small = [[eqn.primitive.name for eqn in needed_for([out], program.eqns)] for out in program.outvars]
    assert sent.count("sin") == sums
    assert small.count("cos") == 2 - sums
