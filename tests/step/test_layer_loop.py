"""Loops over turns of blocks: the step stays the same function, keeps little, and does not grow with depth."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, jaxprs_in_params

from moe_jax.config import ScheduleConfig
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.step.scheduled import layer_loop_weights
from moe_jax.step.scheduled.build import make_plan
from moe_jax.step.scheduled.jaxpr_utils import communicates
from moe_jax.step.scheduled.scan_residuals import ScanBody
from moe_jax.step.scheduled.step_dims import StepDims
from moe_jax.step.trainer import make_trainer
from tests.parallel.per_device import on_mesh
from tests.small import first_params, small_config, tokens_of
from tests.step.gradients import assert_equals_reference, mesh_of, sharded_gradients
from tests.step.one_step import config_of_settings

GREEDY = {"weight_grad": "greedy", "grad_reduce": "bucketed", "bucket_cap_mb": 0.002}
CASES = {
    "dense blocks between, below and left over": (
        (1, 4),
        8,
        {"policy": "unified", "microbatches": 2, "backward_microbatches": 1, "grad_reduce": "block", "remat": "dots"},
        {"first_k_dense_replace": 1, "moe_layer_freq": 2, "num_shared_experts": 1},
    ),
    "periods left over, sums at the end": (
        (2, 2),
        7,
        {"policy": "vanilla", "weight_grad": "greedy", "unroll": 2},
        {"capacity_factor": None},
    ),
}


@pytest.mark.parametrize(
    ("name", "least"),
    [("dense blocks between, below and left over", True), ("periods left over, sums at the end", False)],
)
def test_a_looped_step_computes_what_the_reference_computes(name, least, monkeypatch):
    """`least`: with what other platforms keep for the backward pass."""
    monkeypatch.setattr(StepDims, "min_cut_remat", least)
    mesh, layers, schedule, moe = CASES[name]
    moe = {"moe_layer_freq": 1} | moe
    model = {"num_layers": layers} | moe.pop("model", {})
    config = small_config(*mesh, schedule=schedule, model=model, batch_size=16, seq_len=6, **moe)
    assert make_plan(config, mesh_of(config)).scanned
    assert_equals_reference(config)


def test_a_model_without_experts_runs_in_loops():
    config = small_config(2, 1, model={"num_layers": 3}, num_experts=0, schedule={"weight_grad": "greedy"})
    assert make_plan(config, mesh_of(config)).scanned
    params, tokens = first_params(config.model), tokens_of(config)
    expected = sharded_gradients(dataclasses.replace(config, schedule=ScheduleConfig()), params, tokens)
    chex.assert_trees_all_close(sharded_gradients(config, params, tokens), expected, rtol=1e-4, atol=1e-6)


def test_the_program_does_not_grow_with_depth():
    lines = []
    for layers in (8, 16):
        schedule = {"policy": "unified", "microbatches": 2, "unroll": 2, **GREEDY}
        config = small_config(1, 2, schedule=schedule, model={"num_layers": layers}, moe_layer_freq=1)
        trainer = make_trainer(config, mesh_of(config))
        lines.append(trainer.step.lower(trainer.state_shapes, tokens_of(config)).as_text().count("\n"))
    assert lines[1] < 1.02 * lines[0]


def test_a_turn_stacks_neither_weights_nor_what_follows_from_them_nor_anything_twice():
    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32) * x

    def turn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None, tuple]:
        y, first = jax.vjp(layer, w, x)
        z, second = jax.vjp(layer, w, x)
        return y + z, None, (first, second, w, x, jnp.arange(3))

    x, w = jnp.linspace(-1, 1, 10).reshape(2, 5), jnp.linspace(-1, 1, 25).reshape(5, 5)
    traced = ScanBody(turn, x, w)
    y, _, stacked = jax.jit(traced)(x, w)
    assert {leaf.shape for leaf in stacked} == {(2, 5)}
    assert sum(leaf.dtype == x.dtype and bool(jnp.array_equal(leaf, x)) for leaf in stacked) == 1
    expected_y, _, (first, _, *others) = turn(x, w)
    np.testing.assert_allclose(y, expected_y, rtol=1e-2)  # bfloat16
    again, _, *rest = traced.rebuild(w, stacked)
    chex.assert_trees_all_equal(rest, others)
    chex.assert_trees_all_close(again(jnp.ones((2, 5))), first(jnp.ones((2, 5))), rtol=1e-2)


def test_what_a_collective_brings_is_not_asked_for_again():
    """Sizes of an exchange, with a gate that reads no features, follow from constants alone."""

    def turn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None, jax.Array]:
        total = jax.lax.psum(w, Axis.EXPERT)
        return x * total, None, 2 * total

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        traced = ScanBody(turn, x, w)
        _, _, stacked = traced(x, w)
        again = jax.make_jaxpr(traced.rebuild)(w, stacked)
        assert not any(map(communicates, again.eqns))
        return traced.rebuild(w, stacked)

    w = jnp.arange(8.0)
    twice = on_mesh(body, (BATCH_SPEC, BATCH_SPEC), BATCH_SPEC, data=1, expert=8)(jnp.ones(8), w)
    chex.assert_trees_all_equal(twice, jnp.full(8, 2 * w.sum()))


def test_a_call_inside_a_turn_may_return_a_constant():
    """As the attention kernels of GPUs do."""

    @jax.jit
    def call(x: jax.Array) -> tuple[jax.Array, float]:
        return 2 * x, 3.0

    def turn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None, tuple]:
        doubled, three = call(x)
        return doubled + w, None, (doubled, three)

    x, w = jnp.arange(4.0), jnp.ones(4)
    traced = ScanBody(turn, x, w)
    _, _, stacked = traced(x, w)
    chex.assert_trees_all_equal(stacked, [2 * x])
    chex.assert_trees_all_equal(traced.rebuild(w, stacked), (2 * x, jnp.float32(3)))


@pytest.mark.parametrize(("data", "expert", "carried"), [(1, 4, False), (2, 2, True)])
def test_turns_pass_on_the_experts_that_other_devices_have_too(data, expert, carried):
    """A device's own are read where they are stored: passed on they would be copies, in float32."""
    config = config_of_settings(
        f"mesh.data={data} mesh.expert={expert} schedule.policy=unified schedule.microbatches=2 optimizer.zero=3 "
        "model.num_layers=4 model.moe.moe_layer_freq=1"
    )
    trainer = make_trainer(config, mesh_of(config))
    batch = jax.ShapeDtypeStruct((config.train.batch_size, config.data.seq_len + 1), "int32")
    program = jax.make_jaxpr(trainer.step)(*trainer.step_shapes(batch))
    one_block = (8 // expert, 16, 12)
    found = [aval for aval in passed_on(program.jaxpr) if aval.shape == one_block]
    assert bool(found) == carried


BFLOAT16 = (
    "mesh.data=1 mesh.expert=2 schedule.policy=unified schedule.microbatches=2 train.compute_dtype=bfloat16 "
    "model.num_layers=4 model.moe.moe_layer_freq=1 "
)


@pytest.mark.parametrize("zero", ["optimizer.zero=0", "optimizer.zero=3"])
def test_a_turn_casts_each_expert_matrix_once(zero):
    config = config_of_settings(BFLOAT16 + zero)
    trainer = make_trainer(config, mesh_of(config))
    batch = jax.ShapeDtypeStruct((config.train.batch_size, config.data.seq_len + 1), "int32")
    program = jax.make_jaxpr(trainer.step)(*trainer.step_shapes(batch))
    of_turns = [[*casts(turn)] for turn in turns(program.jaxpr)]
    for shape, matrices in (((4, 16, 12), 2), ((4, 12, 16), 1)):
        assert [found.count(shape) for found in of_turns if shape in found] == 2 * [matrices]  # forward, backward


def turns(program: Jaxpr) -> Iterator[Jaxpr]:
    """The bodies of a program's loops, but not of loops inside them."""
    for eqn in program.eqns:
        for inner in jaxprs_in_params(eqn.params):
            yield from [inner] if eqn.primitive.name == "scan" else turns(inner)


def casts(program: Jaxpr) -> Iterator[tuple[int, ...]]:
    """The shapes of all arrays that are cast to bfloat16."""
    for eqn in program.eqns:
        if eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.dtype == jnp.bfloat16:
            yield eqn.outvars[0].aval.shape
        for inner in jaxprs_in_params(eqn.params):
            yield from casts(inner)


@pytest.mark.usefixtures("exact")
def test_casts_of_weights_change_no_gradient(monkeypatch):
    """Those of a whole turn, on TPUs, and those inside products."""
    of, cast = ComputeConfig.of, layer_loop_weights.cast_for_products
    monkeypatch.setattr(ComputeConfig, "of", lambda *given: dataclasses.replace(of(*given), platform="tpu"))
    config, called = config_of_settings(BFLOAT16 + "exchange.algorithm=flat"), []
    params, tokens = first_params(config.model), tokens_of(config)

    def counted(*given: Any) -> Any:
        called.append(given)
        return cast(*given)

    monkeypatch.setattr(layer_loop_weights, "cast_for_products", counted)
    once = sharded_gradients(config, params, tokens)
    assert called
    monkeypatch.setattr(layer_loop_weights, "cast_for_products", lambda _, weights: weights)
    chex.assert_trees_all_equal(once, sharded_gradients(config, params, tokens))


def passed_on(program: Jaxpr) -> Iterator[Any]:
    """The arrays that turns of a program's loops pass on, or stack."""
    for eqn in program.eqns:
        for inner in jaxprs_in_params(eqn.params):
            yield from (var.aval for var in inner.outvars if eqn.primitive.name == "scan")
            yield from passed_on(inner)
