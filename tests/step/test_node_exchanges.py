"""The training step with exchanges by way of nodes: plain and scheduled, the function stays the same."""

import pytest

from moe_jax.config import Config, ExchangeConfig, MeshConfig, ModelConfig, MoEConfig
from moe_jax.errors import ConfigError
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.all_to_all import BY_NODE
from moe_jax.parallel.mesh import make_mesh
from tests.small import small_config
from tests.step.gradients import assert_equals_reference


def test_the_step_computes_what_the_reference_computes():
    """With data ranks as well as nodes; `test_every_step.py` has all else, and all exchanges."""
    config = small_config(
        *(2, 4),
        schedule={"policy": "unified", "microbatches": 2, "weight_grad": "greedy", "grad_reduce": "block"},
        exchange={"algorithm": "hier_2d", "ranks_per_node": 2},
        batch_size=16,
        seq_len=6,
        moe_layer_freq=1,
        model={"num_layers": 1},
    )
    assert_equals_reference(config)


def computation(expert: int, **exchange) -> ComputeConfig:
    config = Config(
        model=ModelConfig(moe=MoEConfig(num_experts=8)),
        mesh=MeshConfig(data=-1, expert=expert),
        exchange=ExchangeConfig(**exchange),
    )
    return ComputeConfig.of(config, make_mesh(config.mesh))


@pytest.mark.parametrize("name", BY_NODE)
def test_without_several_nodes_of_several_ranks_it_is_the_flat_one(name):
    assert computation(8, algorithm=name).exchange == "flat"  # one process: one node
    assert computation(8, algorithm=name, ranks_per_node=8).exchange == "flat"
    assert computation(8, algorithm=name, ranks_per_node=1).exchange == "flat"
    assert computation(1, algorithm=name).exchange == "flat"
    assert computation(8, algorithm=name, ranks_per_node=2).exchange == name
    assert computation(8, algorithm="ring", ranks_per_node=8).exchange == "ring"


def test_ranks_know_their_node_as_given_or_as_devices_report():
    assert computation(4, ranks_per_node=2).route.ranks.per_node == 2
    assert computation(4).route.ranks.per_node == 4
    with pytest.raises(ConfigError, match=r"ranks_per_node=4 does not divide mesh\.expert=2: use 1 or 2"):
        computation(2, ranks_per_node=4)
