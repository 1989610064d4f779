"""The decoder, inside `shard_map`: per-device code, every collective a visible call.

B sequences of this device, N tokens of each, T = B·N, D model width, V vocabulary, M blocks with experts, E experts.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import Config, Model
from moe_jax.models import moe as moe_layer
from moe_jax.models.attention import attend
from moe_jax.models.layers import mlp, rms_norm
from moe_jax.models.moe import RouterStats
from moe_jax.models.parameters import Segment, segments
from moe_jax.parallel.mesh import Axis


@dataclasses.dataclass(frozen=True)
class Computation:
    """How the model is computed, as opposed to what it is."""

    dtype: Literal["float32", "bfloat16"]
    remat: Literal["none", "dots", "full"]
    unroll: int  # periods of blocks in one turn of the scan
    platform: str  # of the devices: cpu, gpu or tpu

    @classmethod
    def of(cls, config: Config, mesh: jax.sharding.Mesh) -> "Computation":
        """As the config says, for the devices of a mesh."""
        platform = mesh.devices.flat[0].platform
        return cls(config.train.compute_dtype, config.schedule.remat, config.schedule.unroll, platform)


def block(
    params: Any, x_BND: Float[Array, "B N D"], model: Model, how: Computation
) -> tuple[Float[Array, "B N D"], RouterStats | None]:
    """One decoder block; with experts, also what its router did."""
    x_BND = x_BND + attend(params["attention"], x_BND, model)
    h_BND = rms_norm(x_BND, params["norm"], model.norm_eps)
    if "mlp" in params:
        return x_BND + mlp(params["mlp"], h_BND), None
    h_TD = h_BND.reshape(-1, h_BND.shape[-1])
    sent, ticket, stats = moe_layer.route(params["moe"], h_TD, model.moe, jax.lax.axis_size(Axis.EXPERT))
    received = moe_layer.exchange(sent, "dispatch")
    returned = moe_layer.exchange(moe_layer.run_experts(params["moe"], received, model.moe, how.platform), "combine")
    y_TD = moe_layer.combine(params["moe"], returned, ticket, h_TD, model.moe)
    return x_BND + y_TD.reshape(x_BND.shape), stats


def forward(
    params: Any, token_BN: Int[Array, "B N"], model: Model, how: Computation
) -> tuple[Float[Array, "B N V"], RouterStats | None]:
    """Logits in float32 and, if any block has experts, router statistics with a leading dimension M."""
    # cast behind the lookup: the gradient of a frequent token is a long sum, which bfloat16 would lose
    x_BND = jnp.take(params["embedding"], token_BN, axis=0).astype(how.dtype)
    stats = []
    for number, segment in enumerate(segments(model)):
        x_BND, segment_stats = _run_segment(params["segments"][number], x_BND, segment, model, how)
        stats += segment_stats
    in_order = jax.tree.map(lambda *parts: jnp.concatenate(parts), *stats) if stats else None
    return unembed(params, x_BND, model), in_order


def unembed(params: Any, x_BND: Float[Array, "B N D"], model: Model) -> Float[Array, "B N V"]:
    """The last norm and the head: logits in float32."""
    x_BND = rms_norm(x_BND, params["norm"], model.norm_eps)
    head = params["embedding"].T if model.tie_embeddings else params["head"]
    return jnp.matmul(x_BND, head.astype(x_BND.dtype), preferred_element_type=jnp.float32)


_REMAT_POLICIES = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}


def _run_segment(
    params: Any, x_BND: jax.Array, segment: Segment, model: Model, how: Computation
) -> tuple[jax.Array, list[RouterStats]]:
    """Scan over the segment's periods. Statistics come back as one tree, blocks in order, or none."""

    def period(x_BND: jax.Array, params: Any) -> tuple[jax.Array, list[RouterStats]]:
        stats = []
        for place in range(len(segment.kinds)):
            x_BND, block_stats = block(params[place], x_BND, model, how)
            stats += [block_stats] if block_stats is not None else []
        return x_BND, stats

    unroll = min(how.unroll, segment.repeats)
    if how.remat != "none":
        # a loop keeps the compiler from merging the second computation with the first; unrolled, it must be told
        fully_unrolled = unroll == segment.repeats
        period = jax.checkpoint(period, policy=_REMAT_POLICIES[how.remat], prevent_cse=fully_unrolled)
    x_BND, stats = jax.lax.scan(period, x_BND, params, unroll=unroll)
    if not stats:
        return x_BND, []
    in_order = jax.tree.map(lambda *blocks: jnp.stack(blocks, axis=1), *stats)  # [repeats, per period, …]
    return x_BND, [jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), in_order)]
