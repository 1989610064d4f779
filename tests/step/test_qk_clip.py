"""QK-clip of each kind of attention scales heads as the slow reference does, and nothing else."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moe_jax.step.context import StepContext
from moe_jax.step.qk_clip import with_clipped_heads
from tests.small import first_params
from tests.step.gradients import mesh_of
from tests.step.one_step import by_path, clipped, config_of_settings

LATENTS = (
    "model.num_key_value_heads=null model.latent.kv_lora_rank=6 model.latent.q_lora_rank=5 "
    "model.latent.qk_nope_head_dim=4 model.latent.qk_rope_head_dim=2 model.latent.v_head_dim=3"
)
KINDS = {
    "a key for each head": "model.num_key_value_heads=null model.attention.bias=true",
    "shared keys": "model.num_key_value_heads=2 model.attention.bias=true",
    "latents": LATENTS,
    "latents of keys alone": f"{LATENTS} model.latent.q_lora_rank=null",
}


@pytest.mark.parametrize("kind", KINDS)
def test_heads_above_the_threshold_are_scaled(kind: str) -> None:
    config = config_of_settings(
        f"{KINDS[kind]} optimizer.qk_clip=2 model.num_layers=3 model.moe.moe_layer_freq=2 mesh.data=1"
    )
    mesh, heads = mesh_of(config), config.model.num_attention_heads
    context = StepContext.of(config, mesh)
    params = jax.tree.map(lambda leaf: leaf + 1.0, first_params(config.model))  # biases are not 0
    max_logit_LH = np.random.default_rng(0).uniform(-1, 6, (3, heads)).astype(np.float32)
    assert 0 < np.count_nonzero(max_logit_LH > 2) < max_logit_LH.size
    run = jax.shard_map(
        lambda params, max_logit_LH: with_clipped_heads(params, max_logit_LH, context),
        mesh=mesh,
        in_specs=(context.stored_specs, PartitionSpec()),
        out_specs=context.stored_specs,
        check_vma=False,
    )
    found, expected = (
        by_path(jax.device_get(jax.jit(run)(params, max_logit_LH))),
        by_path(clipped(params, max_logit_LH, config)),
    )
    assert found.keys() == expected.keys()
    for path, leaf in found.items():
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-6, err_msg=path)
    before = by_path(params)
    changed = {path.split("'")[-2] for path, leaf in found.items() if (leaf != before[path]).any()}
    assert changed == {"query", "key"} | ({"query_bias", "key_bias"} if config.model.attention.bias else set())
