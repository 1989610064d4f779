"""No two collectives of a step, compiled for CPUs, can run into each other: steps of the model that the README trains.

Only steps that no program of `test_every_step.py` and `test_every_pipeline.py`, which are searched for races, too, is
like: two stacks of blocks, a loop above a dense block, and several settings together.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.measure.races import RaceError, check_races
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.step.scheduled.issue_order import IssueOrder
from moe_jax.step.trainer import make_trainer

# The model of the config, a loop over its blocks included; narrower, which changes no collective.
NARROW = ["model.hidden_size=32", "model.moe.intermediate_size=32", "data.seq_len=32", "train.batch_size=32"]
PIPELINED = "mesh.data=1 mesh.pipeline=2 mesh.expert=2 train.grad_accumulation=4"
MIGRATION = "migration.enabled=true migration.payback_steps=null"
COPIES = "migration.replicas=2 model.moe.capacity_factor=null"
TWO_STACKS = "model.num_layers=4 model.moe.moe_layer_freq=2 model.moe.first_k_dense_replace=1"
FEW_TOKENS = "train.batch_size=4 data.seq_len=96"  # with so many, the last norm is summed after the backward loop
CASES = {
    "plain, parameters in shards": f"mesh.data=2 mesh.expert=2 {FEW_TOKENS} optimizer.zero=3",
    "plain, context, moments in shards": f"mesh.data=1 mesh.context=2 mesh.expert=2 {FEW_TOKENS} optimizer.zero=1",
    "ragged, parts": "mesh.data=2 mesh.expert=2 exchange.algorithm=ragged schedule.policy=unified "
    "schedule.microbatches=2 train.grad_accumulation=2 optimizer.zero=1",
    "context, dense block below the loop": "mesh.data=1 mesh.context=2 mesh.expert=2 schedule.policy=unified "
    "schedule.microbatches=2 schedule.grad_reduce=end model.num_layers=4 model.moe.first_k_dense_replace=1 "
    "model.moe.moe_layer_freq=1",
    "tensor, remat, dense block below the loop": "mesh.data=1 mesh.expert=2 mesh.tensor=2 schedule.policy=unified "
    "schedule.microbatches=2 schedule.remat=full schedule.unroll=2 model.num_layers=8 "
    "model.moe.first_k_dense_replace=1 model.moe.moe_layer_freq=1",
    "copies of two stacks": f"mesh.data=2 mesh.expert=2 {MIGRATION} {COPIES} {TWO_STACKS}",
    "copies, parts, cut": f"mesh.data=2 mesh.expert=2 {MIGRATION} {COPIES} {TWO_STACKS} "
    "schedule.policy=unified schedule.microbatches=2 schedule.grad_reduce=end train.grad_accumulation=2",
    "copies, sizes that follow from no features": f"mesh.data=2 mesh.expert=2 {MIGRATION} {COPIES} model.moe.gate=hash "
    "schedule.policy=unified schedule.microbatches=2 schedule.expert_chunks=3",
    "copies, pipeline": f"{PIPELINED} {MIGRATION} {COPIES} schedule.pipeline=zero_bubble",
}


def config_of(settings: str) -> Config:
    return load_config("configs/shakespeare_cpu.yaml", [*NARROW, "mesh.cpu_devices=4", *settings.split()])


def step_text(config: Config) -> str:
    """The step as a run compiles it."""
    mesh = make_mesh(config.mesh, jax.devices()[: math.prod(config.mesh.sizes.values())])
    trainer = make_trainer(config, mesh)
    shape = (config.train.batch_size, config.data.seq_len + 1)
    batch = jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
    return trainer.step.lower(*trainer.step_shapes(batch)).compile().as_text() or ""


@pytest.mark.parametrize("name", CASES)
def test_no_step_has_collectives_that_run_into_each_other(name):
    check_races(step_text(config_of(CASES[name])))


@pytest.mark.parametrize(
    "settings",
    [
        "mesh.data=2 mesh.expert=2 schedule.policy=unified schedule.microbatches=2",
        "mesh.data=1 mesh.context=2 schedule.weight_grad=greedy",
    ],
    ids=["sums of blocks and embedding", "sums of a context mesh"],
)
def test_loops_that_wait_for_nothing_are_seen(settings, monkeypatch):
    """As steps were once: sums of the embedding's gradients crashed into those of the blocks."""
    nothing: dict[str, Any] = {
        "into_loop": lambda _, number_n: number_n,
        "end_of_iteration": lambda _: None,
        "out_of_loop": lambda *_: None,
    }
    for name, function in nothing.items():
        monkeypatch.setattr(IssueOrder, name, function)
    with pytest.raises(RaceError, match=r"G\.embed"):
        check_races(step_text(config_of(settings)))


def test_a_whole_batch_is_what_its_parts_wait_for(monkeypatch):
    """Ring attention of the last part took the keys of the parts before."""
    settings = "mesh.data=1 mesh.context=2 train.grad_accumulation=2 schedule.weight_grad=greedy"
    config = config_of(settings)
    check_races(step_text(config))
    monkeypatch.setattr("moe_jax.step.scheduled.gradients.depend_on_all", lambda x, *_: x)
    with pytest.raises(RaceError, match="ppermute"):
        check_races(step_text(dataclasses.replace(config)))
