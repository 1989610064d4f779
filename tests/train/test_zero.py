"""Moments cut over devices: the same training, less memory of each device."""

import dataclasses

import chex
import jax
import pytest
from jax.sharding import PartitionSpec

from moe_jax.config import Optimizer
from moe_jax.train.step import make_trainer
from moe_jax.train.zero import Cut, cuts_of
from tests.small import small_config
from tests.train.gradients import mesh_of
from tests.train.test_step import run_steps
from tests.train.test_tensor_axis import UNIFIED, tensor_config

CONFIGS = {
    "data": small_config(8, 1),
    "data and experts": small_config(2, 4, schedule=UNIFIED, batch_size=16),
    "tensor ranks": tensor_config(2, 2, 2),
    "experts over context": small_config(
        *(2, 2), context=2, experts_over_context=True, seq_len=8, every=1, model={"num_layers": 1}
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_sharded_moments_train_to_the_same_parameters(name):
    whole = CONFIGS[name]
    cut = dataclasses.replace(whole, optimizer=Optimizer(sharded=True))
    expected, records = run_steps(whole)
    state, cut_records = run_steps(cut)
    assert [r["loss"] for r in cut_records] == [r["loss"] for r in records]
    chex.assert_trees_all_equal(state, expected)


def test_each_device_has_its_part_of_the_moments():
    config = dataclasses.replace(CONFIGS["data"], optimizer=Optimizer(sharded=True))
    trainer = make_trainer(config, mesh_of(config))
    for name, parts in (("params", 1), ("optimizer", 8)):
        for leaf in jax.tree.leaves(trainer.state_shapes[name]):
            if leaf.ndim > 1:
                assert leaf.sharding.shard_shape(leaf.shape) != leaf.shape or parts == 1
                size = jax.numpy.prod(jax.numpy.array(leaf.sharding.shard_shape(leaf.shape)))
                assert size * parts == leaf.size


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        ((6, 16), (None, None), Cut(1, ("data", "expert"))),
        ((6, 16), ("expert", None), Cut(1, ("data",))),
        ((8, 6), ("expert", None), Cut(1, ("data",))),
        ((8, 16), (("context", "expert"), None), Cut(1, ("data",))),
        ((6, 3), (None, None), Cut(0, ("data",))),
        ((3, 5), (None, None), Cut()),
    ],
)
def test_a_whole_dimension_is_cut_over_as_many_devices_as_divide_it(shape, spec, expected):
    mesh = {"data": 2, "expert": 4, "tensor": 1, "context": 1}
    assert cuts_of(jax.ShapeDtypeStruct(shape, "float32"), PartitionSpec(*spec), mesh) == expected
