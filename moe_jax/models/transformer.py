"""The decoder, inside `shard_map`: per-device code, with every collective a visible call.

B sequences of L tokens of this device, N tokens of each that it has (the share of its context and tensor ranks), T =
B·N, D model width, M blocks with experts, E experts.
"""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import AttentionView, Config, ModelConfig, MoEConfig
from moe_jax.config.attention_kernels import Capability, kernel_of
from moe_jax.config.layer_layout import Segment, decoder_segments, segments
from moe_jax.config.validate import check_node_split
from moe_jax.distributed.hosts import hosts
from moe_jax.models import hot_experts
from moe_jax.models import moe as moe_layer
from moe_jax.models.attention import attend
from moe_jax.models.attention.core import AttentionImpl
from moe_jax.models.dispatch import dispatch_compute_combine
from moe_jax.models.dispatchers import dispatcher_of
from moe_jax.models.dispatchers.hot import HotRows
from moe_jax.models.dispatchers.protocol import (
    DispatchMetadata,
    ExpertRows,
    balanced_fill,
    buffer_of,
    full_capacity,
)
from moe_jax.models.exchange_choice import exchange_of
from moe_jax.models.gates import gate_of
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.models.grouped_products import GROUPED_PRODUCTS, GroupedProduct, product_name, product_of
from moe_jax.models.hooks import hooks_of
from moe_jax.models.layers import block_norm, mlp, scaled
from moe_jax.models.moe import RouterContext, RouterStats, run_experts
from moe_jax.models.mtp import mtp_input
from moe_jax.parallel.all_to_all import BY_NODE, check_exchange
from moe_jax.parallel.gathered_params import save_all_but_gathered
from moe_jax.parallel.mesh import Axes, Axis, expert_axis, with_sizes_of
from moe_jax.parallel.ranks import Ranks, ranks_per_node
from moe_jax.parallel.sequence_shards import tp_all_gather, tp_reduce_scatter
from moe_jax.parallel.tensor_dispatch import WHOLE_EXPERTS, DispatchRoute
from moe_jax.parallel.trees import Params, Tree


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
    """How the model is computed, as opposed to what it computes."""

    dtype: Literal["float32", "bfloat16"]
    remat: Literal["none", "dots", "full"]
    unroll: int  # periods of blocks in one iteration of the scan
    platform: str  # of the devices: cpu, gpu or tpu
    exchange: str  # the all-to-all's algorithm, never auto
    ranks_per_node: int  # of the ranks over which experts are sharded
    rank_capacity_factor: float | None  # buffer for rows without capacity / even share; None: worst case
    tensor_form: str = "sharded"  # how tensor ranks share an exchange
    tensor_chunks: int = 1
    attention: AttentionImpl = dataclasses.field(default_factory=AttentionImpl)
    expert_axis: Axes = Axis.EXPERT  # the axes over which experts are sharded
    seed: int = 0  # of the random numbers of gates
    loss_chunk: int | None = None  # tokens whose logits are in memory at once; None: see moe_jax.config.loss_chunks
    grouped_product: str = "blocks"  # the product of rows in groups of any size, never auto
    hot_experts: int = 0  # the most experts of a block that all expert ranks have copies of
    balanced_fill: float = 1.0  # the share of a dropless buffer's rows that exist if routing is balanced
    rank_speeds: tuple[float, ...] | None = None  # of the expert ranks; None: all equal
    exchanges_inside_nodes: bool = False  # GPUs are in several nodes, and no exchange of experts' rows leaves one

    @property
    def route(self) -> DispatchRoute:
        """The route of rows to the experts and back."""
        ranks = Ranks(self.expert_axis, self.platform, self.ranks_per_node)
        return DispatchRoute(self.exchange, ranks, self.tensor_form, self.tensor_chunks)

    @property
    def experts_are_whole(self) -> bool:
        """Whether experts are sharded over tensor ranks, instead of each expert's hidden width."""
        return self.tensor_form == WHOLE_EXPERTS

    @property
    def product(self) -> GroupedProduct:
        """The product of rows in groups of any size."""
        product = product_of(self.grouped_product, GROUPED_PRODUCTS[self.platform])
        assert product is not None, "checked by product_name"
        return product._replace(filled=self.balanced_fill)

    def ep_size(self) -> int:
        """Return the number of ranks that have different experts. Runs inside `shard_map`."""
        return self.route.ranks.size()

    @classmethod
    def of(cls, config: Config, mesh: jax.sharding.Mesh) -> "ComputeConfig":
        """Return the computation that a config asks for on the devices of a mesh. Raises ConfigError."""
        config = with_sizes_of(mesh, config)
        capability, platform = capability_of(mesh.devices.flat[0]), mesh.devices.flat[0].platform
        if config.model.moe.num_experts:
            for lookup in (gate_of, dispatcher_of, hooks_of):
                lookup(config.model.moe)  # raises ConfigError now if the name is invalid
        platform = "gpu" if platform in ("cuda", "rocm") else platform
        size, per_node = config.mesh.expert_ranks(mesh.shape), config.exchange.ranks_per_node
        if per_node is None:
            dims = map(mesh.axis_names.index, config.mesh.expert_axes)
            per_node = ranks_per_node(mesh.devices, *dims, hosts=hosts())
        node = ranks_per_node(mesh.devices, *range(mesh.devices.ndim), hosts=hosts())
        check_node_split(per_node, config.mesh)
        shared_by = config.mesh.expert_tensor_ranks(mesh.shape)
        exchange = exchange_of(config, platform, shared_by)
        if exchange in BY_NODE and per_node in (1, size):  # nothing to gain
            exchange = "flat"
        if config.exchange.is_elsewhere and config.model.moe.num_experts:
            check_exchange(exchange, Ranks(expert_axis(config.mesh), platform, per_node), mesh)
        return cls(
            dtype=config.train.compute_dtype,
            # the backward pass of a recomputed chunk needs all residuals
            remat="none" if config.schedule.remat == "chunk" else config.schedule.remat,
            unroll=config.schedule.unroll,
            platform=platform,
            exchange=exchange,
            ranks_per_node=per_node,
            rank_capacity_factor=config.exchange.rank_capacity_factor,
            tensor_form=_tensor_form(config, mesh.shape[Axis.TENSOR]),
            tensor_chunks=config.exchange.tensor_chunks,
            attention=AttentionImpl(
                kernel_of(config, platform, capability),
                config.exchange.context_form,
                config.optimizer.qk_clip is not None,
                platform,
            ),
            expert_axis=expert_axis(config.mesh),
            seed=config.train.seed,
            loss_chunk=config.train.loss_chunk,
            grouped_product=product_name(config, platform, shared_by, capability),
            hot_experts=config.exchange.hot_experts,
            balanced_fill=balanced_fill(config.model.moe, config.exchange.rank_capacity_factor, size),
            rank_speeds=config.rank_speeds,
            exchanges_inside_nodes=platform == "gpu" and 1 < per_node == size and node < mesh.size,
        )


def _tensor_form(config: Config, tensor_ranks: int) -> str:
    """Return the form over tensor ranks. With one of them all forms are the same, and a schedule may run the two
    transfers of `sharded` as tasks of their own.
    """
    if tensor_ranks == 1 or config.exchange.tensor_form == "sharded_scheduled":
        return "sharded"
    return WHOLE_EXPERTS if config.mesh.experts_over_tensor else config.exchange.tensor_form


def capability_of(device: jax.Device) -> Capability | None:
    """Return the compute capability of an NVIDIA GPU, or None."""
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(found[1]), int(found[2])) if found else None


class Output(NamedTuple):
    """What the blocks return."""

    x_BND: Float[Array, "B N D"]  # the residual stream after the decoder's last block
    stats: RouterStats | None  # with a leading dimension M; None if no block has experts
    # the largest attention logit of the heads of this tensor rank, if that was asked for; L blocks
    max_logit_LH: Float[Array, "L H"] | None
    mtp_BND: Float[Array, "B N D"] | None = None  # after the block of multi-token prediction, if that was asked for


class Routed(NamedTuple):
    """The state of a block with experts before its dispatch."""

    x_BND: Float[Array, "B N D"]  # the residual stream with attention and shared experts
    sent: ExpertRows
    metadata: DispatchMetadata
    stats: RouterStats
    hot: HotRows | None  # without copies of experts None
    max_logit_H: Float[Array, " H"] | None  # the largest attention logits, if they were asked for


def attend_and_route(
    params: Any,
    x_BND: Float[Array, "B N D"],
    model: ModelConfig,
    view: AttentionView,
    compute: ComputeConfig,
    context: RouterContext,
    ragged: bool = False,
    document_BL: Int[Array, "B L"] | None = None,
) -> Routed:
    """Run attention, shared experts, gate and permute. `ragged`: the rows are for a ragged exchange."""
    added_BND, max_logit_H = attend(params["attention"], x_BND, model, view, compute.attention, document_BL)
    x_BND = x_BND + added_BND
    h_BND = block_norm(params, x_BND, model)
    h_TD = h_BND.reshape(-1, x_BND.shape[-1])
    context = context._replace(inputs=context.inputs and context.inputs.flat())
    routed = moe_layer.route(params["moe"], h_TD, model.moe, compute.ep_size(), context, len(x_BND), ragged)
    for shared in moe_layer.shared_experts(params["moe"]):
        x_BND = x_BND + _sharded_mlp(shared, h_BND, model)
    return Routed(x_BND, *routed, max_logit_H)


def experts_of(moe: MoEConfig, compute: ComputeConfig) -> Callable[[Params, ExpertRows], jax.Array]:
    """Return the function of a rank's experts: parameters, received rows → their outputs."""
    return partial(run_experts, moe=moe, product=compute.product, are_whole=compute.experts_are_whole)


def rejoin(
    x_BND: Float[Array, "B N D"],
    returned: jax.Array,
    metadata: DispatchMetadata,
    model: ModelConfig,
    ragged: bool = False,
) -> Float[Array, "B N D"]:
    """Return the residual stream with what the experts returned."""
    y_TD = moe_layer.unpermute(returned, metadata, model.moe, ragged)
    return x_BND + scaled(y_TD, model.residual_multiplier).reshape(x_BND.shape)


def dense_block(
    params: Any,
    x_BND: Float[Array, "B N D"],
    model: ModelConfig,
    view: AttentionView,
    impl: AttentionImpl,
    document_BL: Int[Array, "B L"] | None = None,
) -> tuple[Float[Array, "B N D"], Float[Array, " H"] | None]:
    """Run one block without experts. Also return the largest attention logits if `impl` asks for them."""
    added_BND, max_logit_H = attend(params["attention"], x_BND, model, view, impl, document_BL)
    x_BND = x_BND + added_BND
    if not view.has_mlp:
        return x_BND, max_logit_H
    return x_BND + _sharded_mlp(params["mlp"], block_norm(params, x_BND, model), model), max_logit_H


@jax.named_scope("mlp")
def _sharded_mlp(params: Any, h_BND: Float[Array, "B N D"], model: ModelConfig) -> Float[Array, "B N D"]:
    """Return what an MLP adds to the residual stream. Its hidden width is sharded over tensor ranks."""
    return scaled(tp_reduce_scatter(mlp(params, tp_all_gather(h_BND, 1)), 1), model.residual_multiplier)


def block(
    params: Any,
    x_BND: Float[Array, "B N D"],
    model: ModelConfig,
    view: AttentionView,
    compute: ComputeConfig,
    context: RouterContext,
    document_BL: Int[Array, "B L"] | None = None,
) -> tuple[Float[Array, "B N D"], RouterStats | None, Float[Array, " H"] | None]:
    """Run one decoder block on a device's whole batch.

    Also return the statistics of its router, with experts, and the largest attention logits, if they are asked for.
    """
    if "moe" not in params:
        x_BND, max_logit_H = dense_block(params, x_BND, model, view, compute.attention, document_BL)
        return x_BND, None, max_logit_H
    length = x_BND.shape[1]
    capacity = full_capacity(model.moe, x_BND.shape[0] * length)
    capacity = capacity._replace(buffer=buffer_of(model.moe, compute.rank_capacity_factor, length, compute.ep_size()))
    copying = (
        partial(hot_experts.hottest, most=compute.hot_experts, axis=compute.expert_axis)
        if compute.hot_experts
        else None
    )
    context = context._replace(capacity=capacity, choose_hot=copying)
    routed = attend_and_route(params, x_BND, model, view, compute, context, document_BL=document_BL)
    own = params["moe"]["experts"]
    experts = partial(experts_of(model.moe, compute), own)
    returned = dispatch_compute_combine(routed.sent, experts, compute.route, model.moe)
    of_copies = model.moe, compute.route, compute.product, compute.dtype
    returned = hot_experts.with_hot_rows(returned, own, routed.hot, *of_copies)
    return rejoin(routed.x_BND, returned, routed.metadata, model), routed.stats, routed.max_logit_H


@jax.named_scope("embed")
def embed(
    embedding: Float[Array, "V D"], token_BN: Int[Array, "B N"], model: ModelConfig, compute: ComputeConfig
) -> Float[Array, "B N D"]:
    """Return the rows of the embedding for the tokens, times their multiplier."""
    # cast after the lookup: the gradient of a frequent token is a long sum, which bfloat16 would lose
    return scaled(jnp.take(embedding, token_BN, axis=0), model.embedding_multiplier).astype(compute.dtype)


def forward(
    params: Params,
    token_BN: Int[Array, "B N"],
    model: ModelConfig,
    compute: ComputeConfig,
    router_inputs: RouterInputs | None = None,
    slot_ME: Int[Array, "M E"] | None = None,
    document_BL: Int[Array, "B L"] | None = None,
    gathers: Tree | None = None,
    next_BN: Int[Array, "B N"] | None = None,
) -> Output:
    """Return the residual stream after the blocks and router statistics.

    If `document_BL` has the document of each token of whole sequences, tokens attend to their own document (see
    `attend`). `gathers` returns each array of a block whole, by segment, if `params` has shards of them; the backward
    pass gathers them again. With `next_BN`, the token after each one, the block of multi-token prediction runs, too.
    """
    x_BND, decoded_BND = embed(params["embedding"], token_BN, model, compute), None
    stats, max_logits, below, moe_below = [], [], 0, 0
    for number, segment in enumerate(decoder_segments(model) if next_BN is None else segments(model)):
        own = router_inputs and router_inputs.above(below)
        moe_here = segment.kinds.count("moe") * segment.repeats
        slots = None if slot_ME is None else slot_ME[moe_below : moe_below + moe_here]
        run = partial(_run_segment, document_BL=document_BL, gathers=None if gathers is None else gathers[number])
        if next_BN is not None and below == model.num_layers:
            decoded_BND, next_BND = x_BND, embed(params["embedding"], next_BN, model, compute)
            run = partial(run, enter=partial(mtp_input, norm_D=params["norm"], next_BnD=next_BND, model=model))
        x_BND, own_stats, own_logits = run(params["segments"][number], x_BND, segment, model, compute, own, slots)
        stats += own_stats
        max_logits += own_logits
        below += len(segment.kinds) * segment.repeats
        moe_below += moe_here
    in_order = jax.tree.map(lambda *parts: jnp.concatenate(parts), *stats) if stats else None
    max_logit_LH = jnp.concatenate(max_logits) if max_logits else None
    if decoded_BND is None:
        return Output(x_BND, in_order, max_logit_LH)
    return Output(decoded_BND, in_order, max_logit_LH, x_BND)


_ALWAYS_SAVED = jax.checkpoint_policies.save_only_these_names(hot_experts.CHOICE)
REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _ALWAYS_SAVED
    ),
    "full": _ALWAYS_SAVED,
}


def _run_segment(
    params: Any,
    x_BND: jax.Array,
    segment: Segment,
    model: ModelConfig,
    compute: ComputeConfig,
    router_inputs: RouterInputs | None,
    slot_mE: jax.Array | None,
    document_BL: jax.Array | None,
    gathers: Tree | None,
    enter: Callable[[Any, jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, list[RouterStats], list[jax.Array]]:
    """Scan over the segment's periods, with experts in the slots `slot_mE`.

    `enter` makes the input of the block of multi-token prediction, which is a segment by itself. Statistics and largest
    logits come back as one tree in a list each, with blocks in order; a list is empty without experts, or if logits are
    not asked for.
    """
    length = len(segment.kinds)

    def period(
        x_BND: jax.Array, inputs: tuple[Any, jax.Array | None, jax.Array | None]
    ) -> tuple[jax.Array, tuple[list[RouterStats], list[jax.Array]]]:
        params, iteration, slots = inputs
        if gathers is not None:
            params = jax.tree.map(lambda gather, shard: gather(shard), gathers, params)
        if enter is not None:
            x_BND = enter(params[0]["mtp_input"], x_BND)
        stats: list[RouterStats] = []
        max_logits: list[jax.Array] = []
        for place, view in enumerate(segment.views):
            own = (
                None if iteration is None or router_inputs is None else router_inputs.above(iteration * length + place)
            )
            slot_E = (
                slots[segment.kinds[:place].count("moe")]
                if slots is not None and segment.kinds[place] == "moe"
                else None
            )
            context = RouterContext(own, slot_E=slot_E, speed_P=compute.rank_speeds)
            x_BND, block_stats, max_logit_H = block(params[place], x_BND, model, view, compute, context, document_BL)
            stats += [] if block_stats is None else [block_stats]
            max_logits += [] if max_logit_H is None else [max_logit_H]
        return x_BND, (stats, max_logits)

    unroll = min(compute.unroll, segment.repeats)
    if compute.remat != "none" or gathers is not None:
        # a loop keeps the compiler from merging recomputation with the first computation; unrolled code does not
        fully_unrolled = unroll == segment.repeats
        period = jax.checkpoint(
            period, policy=REMAT_POLICIES.get(compute.remat, save_all_but_gathered), prevent_cse=fully_unrolled
        )
    iterations = None if router_inputs is None else jnp.arange(segment.repeats)
    slots = None if slot_mE is None else slot_mE.reshape(segment.repeats, -1, slot_mE.shape[1])
    x_BND, (stats, max_logits) = jax.lax.scan(period, x_BND, (params, iterations, slots), unroll=unroll)
    return x_BND, _in_order(stats), _in_order(max_logits)


def _in_order(blocks: list[Tree]) -> list[Tree]:
    """Return the trees of a period's blocks, stacked over the periods, as one tree with blocks in order."""
    if not blocks:
        return []
    in_order = jax.tree.map(lambda *each: jnp.stack(each, axis=1), *blocks)  # [repeats, per period, …]
    return [jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), in_order)]
