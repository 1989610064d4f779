"""Attention over context ranks: each rank's tokens see what they would on one device."""

import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moe_jax.config import AttentionConfig, LatentConfig, MeshConfig, ModelConfig, MoEConfig
from moe_jax.models.attention import attend, tiles
from moe_jax.models.attention.core import AttentionImpl
from moe_jax.parallel.context import zigzag_shard
from moe_jax.parallel.mesh import Axis, make_mesh
from tests.small import first_params

LENGTH = 48
SHAPE = {
    "vocab_size": 8,
    "hidden_size": 8,
    "num_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 8,
}
LATENTS = LatentConfig(kv_lora_rank=6, q_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3)
VARIANTS = {
    "grouped": {},
    "window": {"attention": AttentionConfig(sliding_window=7), "qk_norm": True},
    "sinks": {"attention": AttentionConfig(sliding_window=20, sinks=True, bias=True, nope_every=1)},
    "latent": {"latent": LATENTS, "num_key_value_heads": None},
    "latent sinks": {
        "latent": LATENTS,
        "num_key_value_heads": None,
        "attention": AttentionConfig(sliding_window=3, sinks=True),
    },
}


def pieces(context: int) -> np.ndarray:
    """Places of a sequence's tokens, rank by rank: of 2C pieces the r-th from the front and from the end."""
    numbers = np.split(np.arange(LENGTH), 2 * context)
    return np.concatenate([piece for r in range(context) for piece in (numbers[r], numbers[-1 - r])])


def attended(model: ModelConfig, context: int, form: str, documents: bool):
    """What attention adds, its gradients by parameters and inputs, all as of one device."""
    params = jax.tree.map(lambda leaf: leaf[0], first_params(model)["segments"][0][0]["attention"])
    x, weight = np.random.default_rng(0).standard_normal((2, 2, LENGTH, model.hidden_size), np.float32)
    order = pieces(context)
    document = np.arange(LENGTH) // np.array([[11], [17]])  # borders inside pieces

    def body(params, x, weight):
        def total(params, x):
            impl, of_all = AttentionImpl(context_form=form), jnp.asarray(document) if documents else None
            y = attend(params, zigzag_shard(x), model, model.views[0], impl, of_all).added_BnD
            return jnp.sum(y * zigzag_shard(weight)), y

        grads, y = jax.grad(total, (0, 1), has_aux=True)(params, x)
        return y, jax.lax.psum(grads, Axis.CONTEXT)

    mesh = make_mesh(MeshConfig(data=1, context=context), jax.devices()[:context])
    everywhere, by_rank = PartitionSpec(), PartitionSpec(None, Axis.CONTEXT)
    run = jax.shard_map(body, mesh=mesh, in_specs=everywhere, out_specs=(by_rank, everywhere), check_vma=False)
    y, grads = jax.device_get(jax.jit(run)(params, x, weight))
    return y[:, np.argsort(order)], grads


@pytest.mark.parametrize(
    ("variant", "context", "form", "tile", "documents"),
    [
        ("grouped", 2, "ring", 3, True),
        ("grouped", 8, "ring", 512, False),
        ("window", 4, "ring", 2, False),
        ("window", 4, "all_gather", 512, True),
        ("sinks", 8, "ring", 512, False),
        ("latent", 4, "ring", 512, True),
        ("latent sinks", 8, "all_gather", 3, True),
        ("latent sinks", 2, "ring", 4, False),
    ],
)
def test_values_and_gradients_are_those_of_whole_sequences(variant, context, form, tile, documents, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", tile)
    model = ModelConfig(**(SHAPE | VARIANTS[variant]), moe=MoEConfig(num_experts=0))
    found, expected = (attended(model, ranks, form, documents) for ranks in (context, 1))
    chex.assert_trees_all_close(found, expected, rtol=2e-5, atol=5e-6)


def test_gradients_of_narrow_weights_are_added_up_in_float32():
    """Each hop makes keys of latents by the same weights, which ZeRO 3 gathers as bfloat16."""
    model = ModelConfig(**(SHAPE | VARIANTS["latent"]), moe=MoEConfig(num_experts=0))
    params = jax.tree.map(lambda leaf: leaf[0].astype(jnp.bfloat16), first_params(model)["segments"][0][0]["attention"])

    def total(params, x):
        return attend(params, x, model, model.views[0], AttentionImpl()).added_BnD.astype(jnp.float32).sum()

    mesh, everywhere = make_mesh(MeshConfig(data=1, context=4), jax.devices()[:4]), PartitionSpec()
    run = jax.shard_map(jax.grad(total), mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    program = str(jax.make_jaxpr(run)(params, jnp.ones((2, LENGTH // 4, 8), jnp.bfloat16)))
    of_keys = re.findall(r":(\w+)\[6,4,4\] = add(?:_any)? ", program)
    assert len(of_keys) == 3, "four hops"
    assert set(of_keys) == {"f32"}


@pytest.mark.parametrize("window", [None, 7])
def test_every_pair_of_a_rank_and_gathered_keys_is_computed_once(window):
    ranks = 4
    tile, pairs_CP2 = tiles.of_gathered(ranks, LENGTH // ranks, window, 3)
    position = pieces(ranks)
    computed = np.zeros((LENGTH, LENGTH), int)
    for own, pairs in zip(position.reshape(ranks, -1, tile), pairs_CP2, strict=True):
        for query, key in pairs:
            other = position.reshape(-1, tile)[key]
            age = own[query][:, None] - other
            computed[np.ix_(own[query], other)] += (age >= 0) & (age < (window or LENGTH))
    age = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    np.testing.assert_array_equal(computed, (age >= 0) & (age < (window or LENGTH)))
    if window is None:
        assert len(pairs_CP2[0]) * ranks == (LENGTH // tile) * (LENGTH // tile + 1) // 2, "no hidden pair is computed"


@pytest.mark.parametrize(("ranks", "tile"), [(2, 4), (3, 2), (4, 3), (8, 3)])
@pytest.mark.parametrize("window", [None, 1, 4, 7, 30])
def test_every_pair_of_tokens_is_computed_once_and_no_tile_without_one(ranks, tile, window):
    """Without a window, ranks have equally much to do, too, and all of it is needed."""
    found, position = tiles.ring_of(ranks, LENGTH // ranks, window, tile), pieces(ranks).reshape(ranks, -1, tile)
    assert found.tile == tile
    computed = np.zeros((LENGTH, LENGTH), int)
    useless = 0
    for hop, rank in itertools.product(found.hops, range(ranks)):
        pairs = hop.pairs_CP2[rank]
        assert len(set(map(tuple, pairs))) == len(pairs)
        for query, key in pairs:
            age = position[rank, query][:, None] - position[(rank - hop.distance) % ranks, key]
            seen = (age >= 0) & (age < (window or LENGTH))
            assert hop.masked or seen.all(), "tiles without a mask are seen by all"
            useless += not seen.any()
            computed[np.ix_(position[rank, query], position[(rank - hop.distance) % ranks, key])] += seen
    age = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    np.testing.assert_array_equal(computed, (age >= 0) & (age < (window or LENGTH)))
    if window is None:
        assert useless == 0
        assert (
            sum(hop.pairs_CP2.shape[1] for hop in found.hops) * ranks == ((LENGTH // tile) * (LENGTH // tile + 1)) // 2
        )


def test_a_short_window_leaves_out_hops():
    """A piece sees the one before it, which is with the neighbour on either side."""
    assert [hop.distance for hop in tiles.ring_of(8, 64, 30, 16).hops] == [0, 1, 7]
    assert [hop.distance for hop in tiles.ring_of(8, 64, 34, 16).hops] == [0, 1, 2, 6, 7]
    assert len(tiles.ring_of(8, 64, None, 16).hops) == 8
