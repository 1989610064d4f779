"""Sizes that are constant during a step, and the microbatches and pieces that an action covers.

A microbatch is a part of a device's sequences. A *piece* is the finest split of the rows that exchanges and experts
process: where forward and backward chunks differ, a chunk consists of several pieces.
"""

import math
from dataclasses import dataclass

import jax

from moe_jax.config import AttentionView, Config
from moe_jax.config.registry import EXCHANGE_FACTS
from moe_jax.models.dispatch import RaggedExchange
from moe_jax.models.dispatchers import dispatcher_of
from moe_jax.models.dispatchers.protocol import Buffer, TokenDispatcher, buffer_of
from moe_jax.models.dispatchers.ragged import lane_widths
from moe_jax.models.routing import expert_capacity
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.context import context_ranks
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.sequence_shards import own_count
from moe_jax.schedule.actions import NO_BLOCK, Action
from moe_jax.schedule.shape import StepShape


@dataclass(frozen=True)
class StepDims:
    """Everything about a step's tasks that is constant during the step."""

    config: Config
    compute: ComputeConfig
    shape: StepShape
    routed_tokens: int | jax.Array  # the number of tokens of the global batch that are not padding
    loss_divisor: int | jax.Array  # the number of targets of the global batch that the loss counts
    tokens: int  # on this device
    first_block: int | None = None  # the first block of a pipeline stage; None without stages

    def is_mtp(self, block: int) -> bool:
        """Return whether a block is that of multi-token prediction."""
        return self.shape.mtp and block == len(self.shape.kinds) - 1

    def view(self, block: int) -> AttentionView:
        """Return how a block's attention is masked."""
        return self.config.model.views[(self.first_block or 0) + block]

    @property
    def own_heads(self) -> int:
        """Attention heads of this tensor rank. Used inside `shard_map`."""
        return own_count(self.config.model.num_attention_heads)

    @property
    def num_pieces(self) -> int:
        """Pieces of the device's rows in a block."""
        return math.lcm(self.shape.forward.chunks, self.shape.backward.chunks)

    @property
    def last_moe(self) -> int:
        """The highest block with experts; NO_BLOCK if its backward pass does not directly follow its forward pass."""
        if self.first_block is not None:
            return NO_BLOCK
        return max((block for block, kind in enumerate(self.shape.kinds) if kind == "moe"), default=NO_BLOCK)

    @property
    def microbatches(self) -> int:
        """Microbatches of the forward pass; the backward pass may process several at once."""
        return self.shape.forward.microbatches

    @property
    def ragged(self) -> bool:
        """Whether only existing rows are exchanged (no padding); each microbatch is then one piece."""
        return EXCHANGE_FACTS.of(self.compute.exchange).ragged

    @property
    def min_cut_remat(self) -> bool:
        """Whether tasks save less for their backward pass than differentiation does (see
        `min_cut_remat.cut_residuals`).

        XLA:CPU and XLA:GPU do not fuse elementwise operations into a product, so recomputed values would be written
        again.
        """
        return self.compute.remat == "none" and self.compute.platform == "tpu"

    @property
    def dispatcher(self) -> TokenDispatcher:
        """The dispatcher that permutes tokens into rows."""
        return dispatcher_of(self.config.model.moe, self.ragged)

    @property
    def slots(self) -> int:
        """Capacity of an expert for the device's whole batch, however it is split."""
        return expert_capacity(self.config.model.moe, self.tokens)

    @property
    def buffer(self) -> Buffer | None:
        """Limit on the rows that an expert rank can receive. Used inside `shard_map`."""
        config, ep_size = self.config, self.compute.ep_size()
        own = config.data.seq_len // (jax.lax.axis_size(Axis.TENSOR) * context_ranks())
        return buffer_of(config.model.moe, self.compute.rank_capacity_factor, own, ep_size)

    @property
    def ragged_exchange(self) -> RaggedExchange:
        """The ragged exchange of a microbatch's rows. Used inside `shard_map`."""
        tokens, ranks = self.tokens // self.microbatches, self.compute.route.ranks
        widths = lane_widths(self.slots, self.microbatches, tokens, ranks.size())
        return RaggedExchange(ranks, widths, tokens * self.config.model.moe.top_k)

    def microbatches_of(self, action: Action) -> range:
        """Return the forward microbatches that an action covers."""
        return _share(action.part, self.shape.num_parts(action.direction, action.op), self.microbatches)

    def pieces_of(self, action: Action) -> range:
        """Return the pieces that an action covers."""
        return _share(action.part, self.shape.num_parts(action.direction, action.op), self.num_pieces)

    def pieces_of_microbatch(self, microbatch: int) -> range:
        """Return the pieces that a microbatch's rows are split into."""
        return _share(microbatch, self.microbatches, self.num_pieces)

    def microbatch_ended_by(self, piece: int) -> int | None:
        """Return the microbatch of which a piece is the last one, or None."""
        microbatch, place = divmod(piece, self.num_pieces // self.microbatches)
        return microbatch if place == self.num_pieces // self.microbatches - 1 else None


def _share(part: int, parts: int, total: int) -> range:
    return range(part * total // parts, (part + 1) * total // parts)
