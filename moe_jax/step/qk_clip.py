"""QK-clip: weights of attention shrink where a head's logits grow too large (`optimizer.qk_clip`).

Kimi Team 2025 (Kimi K2), section 2.1, algorithm 1. A head whose largest logit in a step is S, above the threshold t,
gets a factor t / S on its logits: after the update its query and key weights are multiplied by √(t / S) each. With
latents the rotated key, which all heads share, stays as it is, and the head's rotated query gets the whole factor.
Heads that share a key by grouped queries, of which the paper does not speak, are scaled together, by the largest S of
them. Biases of queries and keys are weights, too. Moments stay as they are.

A parts of a batch, L blocks, H heads, of which a tensor rank has h; G heads of keys; R rows of a stacked array.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.config import ModelConfig
from moe_jax.config.layer_layout import segments
from moe_jax.parallel.mesh import TOKEN_AXES, Axis
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.trees import Params
from moe_jax.parallel.zero import ShardSpec
from moe_jax.step.context import StepContext
from moe_jax.step.losses import ObjectiveParts
from moe_jax.step.stage_rows import UNUSED, block_of_row, own_rows


def max_over_batch(parts: ObjectiveParts, context: StepContext) -> tuple[ObjectiveParts, Float[Array, "L H"] | None]:
    """Return the terms of the objective without the largest attention logits of this device, and those of all devices.

    On CPUs the terms come after the logits, so that sums over them do, too. Without QK-clip there are no logits.
    """
    if parts.max_logit_ALH is None:
        return parts, None
    own_Lh, platform = parts.max_logit_ALH.max(axis=0), context.compute.platform
    lowest_LH = jnp.full((len(own_Lh), context.config.model.num_attention_heads), -jnp.inf)
    first = jax.lax.axis_index(Axis.TENSOR) * own_Lh.shape[1]
    with jax.named_scope("max_logits"):
        max_logit_LH = jax.lax.pmax(jax.lax.dynamic_update_slice_in_dim(lowest_LH, own_Lh, first, 1), TOKEN_AXES)
    parts = parts._replace(max_logit_ALH=None)
    if platform == "cpu":
        parts = depend_on(parts, max_logit_LH, platform)
    return parts, max_logit_LH


def with_clipped_heads(own: Params, max_logit_LH: Float[Array, "L H"] | None, context: StepContext) -> Params:
    """Return this device's shards of the parameters after QK-clip; unchanged without it. Runs inside `shard_map`."""
    threshold, stages = context.config.optimizer.qk_clip, context.stages
    if threshold is None or max_logit_LH is None:
        return own
    factor_LH = jnp.where(max_logit_LH > threshold, threshold / max_logit_LH, 1.0)
    heads = max_logit_LH.shape[1] // jax.lax.axis_size(Axis.TENSOR)
    factor_Lh = jax.lax.dynamic_slice_in_dim(factor_LH, jax.lax.axis_index(Axis.TENSOR) * heads, heads, 1)
    changed = dict(own["segments"])
    for number, segment in enumerate(segments(stages.model)):
        for place in range(len(segment.kinds)):
            block_R = own_rows(block_of_row(stages, number, place))
            factor_Rh = jnp.where(block_R[:, None] == UNUSED, 1.0, factor_Lh[block_R])
            block = changed[number][place]
            shard_specs = context.shard_specs["segments"][number][place]["attention"]
            attention = block["attention"] | {
                name: block["attention"][name] * _shard(factor, block["attention"][name], shard_specs[name])
                for name, factor in _factors(factor_Rh, stages.model).items()
                if name in block["attention"]
            }
            changed[number] = changed[number] | {place: block | {"attention": attention}}
    return own | {"segments": changed}


def _factors(factor_Rh: Float[Array, "R h"], model: ModelConfig) -> dict[str, jax.Array]:
    """Return the factors of each array of attention, with the array's dimensions, of which some have size 1."""
    if model.has_latents:
        root_Rh1, whole_Rh1 = jnp.sqrt(factor_Rh)[..., None], factor_Rh[..., None]
        widths = model.latent.qk_nope_head_dim, model.latent.qk_rope_head_dim
        parts = [jnp.repeat(each, width, axis=-1) for each, width in zip((root_Rh1, whole_Rh1), widths, strict=True)]
        return {"query": jnp.concatenate(parts, axis=-1)[:, None], "key": root_Rh1[:, None]}
    shared = model.num_attention_heads // model.kv_heads  # heads with one key
    root_RG1 = jnp.sqrt(factor_Rh.reshape(len(factor_Rh), -1, shared).min(axis=2))[..., None]
    root_Rh1 = jnp.repeat(root_RG1, shared, axis=1)
    return {"query": root_Rh1[:, None], "query_bias": root_Rh1, "key": root_RG1[:, None], "key_bias": root_RG1}


def _shard(factor: jax.Array, own: jax.Array, shard_spec: ShardSpec) -> jax.Array:
    """Return the factors of the numbers in this device's shard of an array."""
    return shard_spec.local_shard(jnp.broadcast_to(factor, shard_spec.whole_shape(own.shape)))
