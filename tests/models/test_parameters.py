"""The declared tree: segments cover every block in order, and first values do not depend on the mesh."""

import chex
import jax
import numpy as np
import pytest

from moe_jax.config import AttentionConfig, MambaConfig, MeshConfig, ModelConfig, MoEConfig
from moe_jax.config.layer_layout import segments
from moe_jax.models.parameters import init_params, param_dims, param_shapes
from moe_jax.parallel.mesh import Axis, make_mesh
from moe_jax.parallel.sharding import partitions, shardings
from tests.small import block_params

PATTERNS = [
    (4, MoEConfig()),
    (4, MoEConfig(num_experts=0)),
    (7, MoEConfig(first_k_dense_replace=1, moe_layer_freq=2)),
    (8, MoEConfig(first_k_dense_replace=1, moe_layer_freq=3)),
    (1, MoEConfig()),
]


VIEWS = [
    AttentionConfig(),
    AttentionConfig(sliding_window=4, full_every=2),
    AttentionConfig(sliding_window=4, full_every=3, nope_every=4),
]
_MAMBA = {"num_heads": 4, "attn_layer_offsets": (0, 2), "mixer_only_offsets": (1, 2)}
MIXERS = [MambaConfig(), *(MambaConfig(attn_layer_period=period, **_MAMBA) for period in (3, 5))]


@pytest.mark.parametrize(("num_layers", "moe"), PATTERNS)
@pytest.mark.parametrize("attention", VIEWS)
@pytest.mark.parametrize("mamba", MIXERS)
def test_segments_are_the_blocks_in_order(num_layers, moe, attention, mamba):
    model = ModelConfig(num_layers=num_layers, moe=moe, attention=attention, mamba=mamba)
    blocks = [
        block
        for segment in segments(model)
        for _ in range(segment.repeats)
        for block in zip(segment.kinds, segment.views, strict=True)
    ]
    assert blocks == list(zip(model.block_kinds, model.views, strict=True))


def blocks_that_repeat_only_in_places(num_layers: int, period: int) -> ModelConfig:
    """With attention above each block of Mamba-2 alone, as in Nemotron 3 Nano."""
    alone = (2, 6, 10, 14, 18, 23)
    places = {"attn_layer_offsets": tuple(place + 1 for place in alone), "mixer_only_offsets": alone}
    return ModelConfig(num_layers=num_layers, mamba=MambaConfig(num_heads=4, attn_layer_period=period, **places))


def test_blocks_that_repeat_only_in_places_are_the_longest_repetitions():
    model = blocks_that_repeat_only_in_places(29, 27)
    found = [(segment.kinds, segment.repeats) for segment in segments(model)]
    period = ("moe", "moe", "dense", "moe")
    assert found == [(period, 5), (("moe",), 3), (("dense",), 1), (("moe",), 1), (("moe",), 4)]
    assert [segment.views[-1].is_recurrent for segment in segments(model)] == [False, True, True, False, True]
    twice = blocks_that_repeat_only_in_places(54, 27)
    assert [(len(segment.kinds), segment.repeats) for segment in segments(twice)] == [(27, 2)]


@pytest.mark.parametrize(("num_layers", "moe"), PATTERNS)
def test_every_array_has_a_name_for_each_dimension(num_layers, moe):
    model = ModelConfig(num_layers=num_layers, moe=moe)
    shapes = param_shapes(model)
    dims = jax.tree.leaves(param_dims(model), is_leaf=lambda leaf: isinstance(leaf, tuple))
    assert [len(d) for d in dims] == [x.ndim for x in jax.tree.leaves(shapes)]
    blocks = block_params(jax.tree.map(lambda x: np.zeros(x.shape), shapes), model)
    assert ["moe" if "moe" in block else "dense" for block in blocks] == list(model.block_kinds)


def test_first_values_depend_on_the_seed_and_not_on_the_mesh():
    model = ModelConfig(hidden_size=16, intermediate_size=24, num_layers=2, moe=MoEConfig(intermediate_size=12))

    def first(seed: int, expert: int):
        placed = shardings(
            make_mesh(MeshConfig(data=8 // expert, expert=expert)), partitions(param_dims(model), Axis.EXPERT)
        )
        return jax.jit(lambda: init_params(model, seed), out_shardings=placed)()

    expected = first(seed=3, expert=1)
    chex.assert_trees_all_equal(first(seed=3, expert=8), expected)
    assert (first(seed=4, expert=1)["embedding"] != expected["embedding"]).all()
