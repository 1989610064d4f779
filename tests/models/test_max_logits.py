"""The largest attention logit of each head: that of the slow reference, however keys are cut into tiles and ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moe_jax.config import AttentionConfig, LatentConfig, MeshConfig, ModelConfig
from moe_jax.models.attention import attend, tiles
from moe_jax.models.attention.core import AttentionImpl
from moe_jax.parallel.context import zigzag_shard
from moe_jax.parallel.mesh import Axis, make_mesh
from tests import references
from tests.small import first_params

LENGTH = 24
LATENTS = {
    "latent": LatentConfig(kv_lora_rank=6, q_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3),
    "num_key_value_heads": None,
}
SINKS = {"attention": AttentionConfig(sliding_window=7, sinks=True, bias=True)}
VARIANTS = {"grouped": {}, "sinks": SINKS, "latent": LATENTS}


def logits_of(
    model: ModelConfig, context: int, form: str, x: np.ndarray, document: np.ndarray | None
) -> tuple[np.ndarray, ...]:
    """The largest logits, and how far they change each gradient of something that adds them to attention's output."""
    params = jax.tree.map(lambda leaf: leaf[0], first_params(model)["segments"][0][0]["attention"])

    def body(params: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def added(params: dict[str, jax.Array], max_logits: bool) -> tuple[jax.Array, jax.Array | None]:
            of_all = None if document is None else jnp.asarray(document)
            impl = AttentionImpl(context_form=form, max_logits=max_logits)
            y, max_logit_H = attend(params, zigzag_shard(x), model, model.views[0], impl, of_all)
            return jnp.sum(jnp.square(y)) + (0 if max_logit_H is None else max_logit_H.sum()), max_logit_H

        (grads, max_logit_H), (plain, _) = (jax.grad(added, has_aux=True)(params, each) for each in (True, False))
        differs = jnp.stack([jnp.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (grads, plain)), strict=True)])
        return jax.lax.pmax((max_logit_H, differs), Axis.CONTEXT)

    mesh = make_mesh(MeshConfig(data=1, context=context), jax.devices()[:context])
    run = jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    return jax.device_get(jax.jit(run)(params, x))


@pytest.mark.parametrize(
    ("variant", "context", "form", "tile", "documents"),
    [
        ("grouped", 1, "ring", 512, False),
        ("grouped", 1, "ring", 16, True),  # of which the last one is filled up
        ("sinks", 1, "ring", 8, False),
        ("latent", 4, "ring", 3, True),
        ("latent", 2, "all_gather", 3, True),
        ("sinks", 2, "ring", 2, True),
        ("grouped", 4, "all_gather", 512, False),
    ],
)
def test_the_largest_logits_are_the_references(
    variant: str, context: int, form: str, tile: int, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "TILE", tile)
    settings = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2} | VARIANTS[variant]
    model = ModelConfig(num_layers=1, vocab_size=16, **settings)
    x = np.random.default_rng(0).standard_normal((2, LENGTH, model.hidden_size), np.float32)
    begins, is_padding = ([0, 9], [0, 17]), np.arange(LENGTH) >= np.array([[20], [LENGTH]])
    document = (np.arange(LENGTH) >= np.array([[9], [17]])).astype(np.int32)
    found, differs = logits_of(model, context, form, x, np.where(is_padding, -1, document) if documents else None)
    p = jax.tree.map(lambda leaf: leaf[0], first_params(model)["segments"][0][0]["attention"])
    pieces = [x[0], x[1]]
    if documents:
        ends = [[9, 20], [17, LENGTH]]
        pieces = [x[row, a:b] for row in (0, 1) for a, b in zip(begins[row], ends[row], strict=True)]
    expected = np.max([references.largest_logits(p, piece[None], model, 0)[0].max(axis=0) for piece in pieces], axis=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert not differs.any(), "no gradient goes through them"
