"""`estimate` of a config that its cluster cannot run, one line with the nearest that it can; and of models whose blocks
are of several kinds.
"""

from pathlib import Path

import pytest

from moe_jax.config.yaml_io import load_config
from moe_jax.errors import ConfigError
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.estimate import estimate
from moe_jax.plan.step_times import Step

MODELS = Path(__file__).parents[2] / "configs" / "models"

SMALL = [
    *("model.hidden_size=64", "model.num_layers=2", "model.num_attention_heads=4", "model.moe.num_experts=8"),
    *("data.seq_len=64", "train.batch_size=64"),
]


@pytest.mark.parametrize(
    ("mesh", "cluster", "message"),
    [
        (
            "mesh.data=4 mesh.expert=8",
            "h100x8",
            "mesh.data=4 × mesh.expert=8 is a mesh of 32 devices, and h100x8 has 8: use mesh.data=1, or a cluster of",
        ),
        ("mesh.data=1 mesh.expert=8", "h100x1", "mesh.expert=8 is a mesh of 8 devices, and h100x1 has 1: use mesh.ex"),
        # three ranks cannot shard eight experts
        ("mesh.data=1 mesh.expert=8", "cpu-3", "mesh.expert=8 is a mesh of 8 devices, and cpu-3 has 3: use a cluster"),
        ("mesh.data=1", "h100x8", "mesh.data=1 is a mesh of 1 device, and h100x8 has 8: use mesh.data=8, or a cluster"),
        ("mesh.data=-1 mesh.expert=4", "h100x8", "mesh.data=-1 × mesh.expert=4 is open, and h100x8 has 8 devices"),
        (
            "mesh.data=-1 mesh.tensor=4",
            "h100x1",
            "mesh.data=-1 × mesh.tensor=4 is open, and h100x1 has 1 device",
        ),
        (
            "mesh.data=8 train.batch_size=12",
            "h100x8",
            "train.batch_size=12 is not divisible by train.grad_",
        ),
        (
            "mesh.data=1 mesh.pipeline=8 train.grad_accumulation=8",
            "h100x8",
            "mesh.pipeline=8 needs as many groups of blocks, and",
        ),
    ],
)
def test_an_impossible_mesh_is_refused_with_the_nearest_possible_one(mesh: str, cluster: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        estimate(load_config(None, [*SMALL, *mesh.split()]), find_cluster(cluster))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "name", ["granite_4_0_h_small", "nemotron_3_nano_30b_a3b", "qwen3_5_35b_a3b", "qwen3_next_80b_a3b"]
)
def test_all_blocks_count_of_models_that_are_simulated_with_a_few(name: str) -> None:
    """Cut from the top, Granite would have no attention left, and Nemotron other shares of blocks with experts."""
    settings = ["train.batch_size=64", "data.seq_len=4096", "mesh.data=1", "mesh.expert=8"]
    config, cluster = load_config(str(MODELS / f"{name}.yaml"), settings), find_cluster("h100x8")
    found, whole = estimate(config, cluster).busy, Step(config, cluster).seconds
    assert found.compute == pytest.approx(whole["compute"], rel=1e-9)
    assert found.exchange == pytest.approx(whole["exchange"], rel=1e-9)


def test_blocks_without_experts_at_the_bottom_of_a_period_are_estimated() -> None:
    mamba = ["model.mamba.num_heads=4", "model.mamba.head_dim=32", "model.mamba.attn_layer_period=4"]
    offsets = ["model.mamba.attn_layer_offsets=[2]", "model.mamba.mixer_only_offsets=[0,1]", "model.num_layers=32"]
    config = load_config(None, [*SMALL, *mamba, *offsets, "mesh.expert=8", "mesh.data=1"])
    whole = Step(config, find_cluster("h100x8")).seconds["compute"]
    assert estimate(config, find_cluster("h100x8")).busy.compute == pytest.approx(whole, rel=1e-9)
