"""State cut over devices: the same training, less memory of each device, and gradients that travel once."""

import dataclasses
import re

import chex
import jax
import numpy as np
import pytest
from jax.extend.core import Jaxpr, jaxprs_in_params

from moe_jax.config import Config, ModelConfig, MoEConfig, OptimizerConfig
from moe_jax.measure.hlo import parse
from moe_jax.measure.traffic import bytes_sent
from moe_jax.models.gates import GATES
from moe_jax.models.parameters import param_dims
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.gathered_params import gathers_of
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.sharding import map_dims
from moe_jax.parallel.zero import ShardSpec
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.param_gathers import gathered_bytes
from moe_jax.plan.traffic import traffic
from moe_jax.step.scheduled.build import reductions_of
from moe_jax.step.scheduled.issue_order import IssueOrder
from moe_jax.step.trainer import make_trainer
from tests.small import small_config, tokens_of
from tests.step.gradients import mesh_of
from tests.step.test_tensor_axis import UNIFIED
from tests.step.test_trainer import run_steps

CHUNKED = {"weight_grad": "greedy", "grad_reduce": "bucketed", "bucket_cap_mb": 0.002}
LOOPED = {"model": {"num_layers": 4}, "moe_layer_freq": 1}
CASES = {
    "autodiff, each part summed": (2, small_config(2, 4, grad_accumulation=2, batch_size=16)),
    "loops of blocks": (1, small_config(2, 4, schedule={**UNIFIED, **CHUNKED}, batch_size=16, **LOOPED)),
}


def with_zero(config: Config, stage: int) -> Config:
    return dataclasses.replace(config, optimizer=OptimizerConfig(zero=stage))


def test_cut_state_trains_to_the_same_parameters():
    """Several steps; the first one, of all stages and meshes, is in `test_every_step.py`."""
    stage, whole = 1, small_config(3, 2, schedule=CHUNKED, exchange={"reduction": "ring"}, batch_size=6)
    assert whole.model.hidden_size % 3, "a width that data does not divide"
    expected, records = run_steps(whole)
    state, cut_records = run_steps(with_zero(whole, stage))
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([r[key] for r in cut_records], [r[key] for r in records], rtol=1e-5)
    chex.assert_trees_all_close(state["optimizer"], expected["optimizer"], rtol=1e-4, atol=1e-8)
    chex.assert_trees_all_close(state["params"], expected["params"], rtol=1e-4, atol=1e-5)


def test_gathers_and_sums_with_links_of_their_own_change_no_number(monkeypatch):
    """Those of loops on GPUs in several nodes, which wait for compute tasks, and which compute tasks wait for."""
    config = with_zero(small_config(2, 2, schedule={**UNIFIED, **CHUNKED}, batch_size=8, **LOOPED), 3)
    expected, records = run_steps(config)
    of, after_network, asked = ComputeConfig.of, IssueOrder.after_network, []
    inside = {"platform": "gpu", "exchanges_inside_nodes": True}
    monkeypatch.setattr(ComputeConfig, "of", lambda *given: dataclasses.replace(of(*given), **inside))
    monkeypatch.setattr(IssueOrder, "after_network", lambda *given: asked.append(given) or after_network(*given))
    state, own_records = run_steps(config)
    assert asked
    np.testing.assert_allclose([r["loss"] for r in own_records], [r["loss"] for r in records], rtol=1e-6)
    chex.assert_trees_all_close(state["params"], expected["params"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("stage", "of_params"), [(1, 1), (3, 8)])
def test_each_device_has_its_part_of_the_state(stage, of_params):
    config = with_zero(small_config(8, 1), stage)
    trainer = make_trainer(config, mesh_of(config))
    for name, parts in (("params", of_params), ("optimizer", 8)):
        for leaf in jax.tree.leaves(trainer.state_shapes[name]):
            if leaf.ndim > 1:
                assert leaf.sharding.shard_shape(leaf.shape) != leaf.shape or parts == 1
                size = jax.numpy.prod(jax.numpy.array(leaf.sharding.shard_shape(leaf.shape)))
                assert size * parts == leaf.size


@pytest.mark.parametrize(("name", "times"), [("autodiff, each part summed", 2), ("loops of blocks", 1)])
def test_a_compiled_step_scatters_sums_and_gathers_parameters(name, times):
    """Whole gradients go nowhere: what is left to all-reduce are counts, losses and norms."""
    stage, whole = CASES[name]
    config = with_zero(whole, stage)
    mesh = mesh_of(config)
    trainer = make_trainer(config, mesh)
    program = parse(trainer.step.lower(trainer.state_shapes, tokens_of(config)).compile().as_text())
    sent = {kind: bytes_sent(program, kind, 8) for kind in ("reduce-scatter", "all-reduce", "all-gather")}
    once = sum(sum(owner.sent_bytes(mesh.shape)) for owner in reductions_of(config, mesh, None))
    assert sent["reduce-scatter"] == pytest.approx(times * once)
    assert sent["all-gather"] == pytest.approx(once)
    assert sent["all-reduce"] < 0.03 * once
    planned = traffic(config, find_cluster("cpu-8"))
    assert planned["gradients"] == pytest.approx(times * once)
    assert planned["parameters"] == pytest.approx(once)


@pytest.mark.parametrize(
    ("schedule", "axes"),
    [({}, ("expert",)), ({**UNIFIED, **CHUNKED}, None)],
    ids=["plain, hybrid", "scheduled, sharded"],
)
def test_sharded_parameters_are_gathered_for_each_pass(schedule, axes):
    """With hybrid sharding all data ranks have the same shards, and only sums of these go between them."""
    config = small_config(2, 4, schedule=schedule, batch_size=16, **LOOPED)
    config = dataclasses.replace(config, optimizer=OptimizerConfig(zero=3, zero_axes=axes))
    mesh = mesh_of(config)
    trainer = make_trainer(config, mesh)
    program = parse(trainer.step.lower(trainer.state_shapes, tokens_of(config)).compile().as_text())
    *owners, head = gathered_bytes(config, mesh.shape)
    embedding, *blocks = (sum(owner.values()) for owner in owners)
    passes = 2 * sum(blocks) - (blocks[-1] if schedule else 0)  # forward and backward; the highest block keeps its own
    expected = embedding + passes + sum(head.values())
    sent = {kind: bytes_sent(program, kind, 8) for kind in ("reduce-scatter", "all-reduce", "all-gather")}
    assert sent["all-gather"] == pytest.approx(expected, rel=0.02)  # routers are too small to cut
    planned = traffic(config, find_cluster("cpu-8"))
    if axes is None:
        assert sent["reduce-scatter"] == pytest.approx(planned["gradients"])
        return
    assert sent["reduce-scatter"] + sent["all-reduce"] == pytest.approx(planned["gradients"], rel=0.05)
    for leaf in jax.tree.leaves(trainer.state_shapes):
        assert "data" not in str(leaf.sharding.spec)


def gathered_in(jaxpr: Jaxpr, name: str) -> list[list[tuple[int, ...]]]:
    """The shapes that each operation of a name gathers inside of it."""

    def inside(jaxpr: Jaxpr) -> list[tuple[int, ...]]:
        own = [eqn.outvars[0].aval.shape for eqn in jaxpr.eqns if eqn.primitive.name == "all_gather"]
        return own + [shape for eqn in jaxpr.eqns for each in jaxprs_in_params(eqn.params) for shape in inside(each)]

    found = []
    for eqn in jaxpr.eqns:
        for each in jaxprs_in_params(eqn.params):
            found += [inside(each)] if eqn.primitive.name == name else gathered_in(each, name)
    return found


@pytest.mark.parametrize(
    ("mesh", "experts"), [({"context": 2}, [(8, 16, 12), (8, 12, 16)]), ({"tensor": 2}, [])], ids=str
)
def test_a_plain_step_gathers_again_what_only_one_axis_shards(mesh, experts):
    """The backward pass gathers a block's matrices, but not the keys and values of context ranks."""
    config = small_config(1, 1, exchange={"context_form": "all_gather"}, **mesh, **LOOPED)
    config = dataclasses.replace(config, optimizer=OptimizerConfig(zero=3))
    trainer = make_trainer(config, mesh_of(config))
    program = trainer.step.trace(trainer.state_shapes, tokens_of(config)).jaxpr
    forward, backward = gathered_in(program.jaxpr, "scan")
    assert {(16, 8), *experts} <= set(forward), "the router and experts"
    assert {(16, 8), *experts} <= set(backward)
    keys = (8, 12, 2, 4)
    assert (keys in forward) == (mesh == {"context": 2})
    assert keys not in backward


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_is_gathered_in_float32(gate):
    moe = MoEConfig(gate=gate, num_experts=8, top_k=1, bias=True, capacity_factor=1.0)
    dims = param_dims(ModelConfig(moe=moe))
    specs = map_dims(lambda _: ShardSpec(0, (Axis.DATA,)), dims)
    gathers = gathers_of(specs, dims, "bfloat16", "cpu", experts="compute", rounds_embedding=True)
    sent = {jax.tree_util.keystr(path): own.sent for path, own in jax.tree.leaves_with_path(gathers)}
    assert {sent[path] for path in sent if re.search(r"\['moe'\]\['\w+'\]$", path)} <= {"float32"}
    assert {sent[path] for path in sent if "'query'" in path} == {"bfloat16"}
