"""The interface of token dispatchers, and the values that pass between their functions.

P expert ranks, each with L of the E experts; T tokens of this device, or of a microbatch of its batch; k choices of
each; at most S rows in a ragged exchange; D model width.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoEConfig
from moe_jax.models.routing import TokenPermutation, expert_capacity, to_rows
from moe_jax.parallel.all_to_all.ragged import row_shape


class RowSource(NamedTuple):
    """What rows are gathered from, to send them a second time. It has no gradients."""

    x_TD: Float[Array, "T D"]
    permutation: TokenPermutation

    def gather(self) -> Float[Array, "S ..."]:
        """Return the rows, each in the shape of `row_shape`."""
        tokens, features = self.x_TD.shape
        return to_rows(self.x_TD.reshape(tokens, *row_shape(features)), self.permutation)


class ExpertRows(NamedTuple):
    """Rows as they are sent, and what is sent with them."""

    rows: Float[Array, "..."]  # [P, …, D], block p for rank p; ragged: [S, …], sorted by expert
    # how many rows each expert gets, [P, L]; ragged: [E]; None: every row is used
    sizes: Int[Array, "..."] | None = None
    source: RowSource | None = None  # ragged only


@runtime_checkable
class DispatchMetadata(Protocol):
    """What `unpermute` needs to restore the tokens of a device: a pytree of arrays."""

    @property
    def num_dropped(self) -> Int[Array, ""]:
        """The number of pairs that found no slot, or no space in the buffer."""


class TopKMetadata(NamedTuple):
    """Where the rows of each token's choices are."""

    permutation: TokenPermutation
    weight_Tk: Float[Array, "T k"]
    num_dropped: Int[Array, ""]


class TokenDispatcher(NamedTuple):
    """The functions of a dispatcher (`moe_jax.models.dispatchers`), and the dimension of its rows that counts slots."""

    permute: Callable[..., tuple[ExpertRows, DispatchMetadata]]
    experts: Callable[..., jax.Array]
    unpermute: Callable[..., jax.Array]
    split: Callable[..., list[ExpertRows]]
    slot_axis: int


class Buffer(NamedTuple):
    """How many rows a rank can receive from each source, where experts have no capacity."""

    rows: int  # of each sequence
    tokens: int  # of a sequence


class CapacityState(NamedTuple):
    """How much of the experts' capacity is left for a part of a device's batch (Lancet, capacity passing)."""

    slots: int  # of each expert, for this device's whole batch
    used_E: Int[Array, " E"]  # pairs of earlier parts that chose each expert, dropped ones included
    parts: int = 1  # into which the batch is split
    buffer: Buffer | None = None  # used instead of slots; None: sized for the worst case


def full_capacity(moe: MoEConfig, tokens: int) -> CapacityState:
    """Return all slots of a batch of `tokens` tokens, none of them used."""
    return CapacityState(slots=expert_capacity(moe, tokens), used_E=jnp.zeros(moe.num_experts, jnp.int32))


def buffer_of(moe: MoEConfig, factor: float | None, tokens: int, ep_size: int) -> Buffer | None:
    """Return a buffer of ceil(f·N·k/P) rows on each rank: `factor` f times an even share of a sequence of N `tokens`.

    Returns None if the buffer is sized for the worst case, which cannot overflow.
    """
    if factor is None or not moe.sends_sized_rows:
        return None
    share = math.ceil(Fraction(str(factor)) * tokens * moe.top_k / ep_size)
    worst = tokens * min(moe.top_k, moe.num_experts // ep_size)
    return Buffer(share, tokens) if share < worst else None


def balanced_fill(moe: MoEConfig, factor: float | None, ep_size: int) -> float:
    """Return the share of the rows of these buffers that exist if routing is balanced; 1 for rows in slots."""
    if not moe.num_experts or not moe.sends_sized_rows:
        return 1.0
    worst = min(moe.top_k, moe.num_experts // ep_size) * ep_size / moe.top_k
    return 1 / (worst if factor is None else min(factor, worst))


def piece_bounds(size: int, pieces: int) -> list[int]:
    """Return the `pieces` + 1 bounds that split `size` slots into pieces as equal as possible."""
    return [size * i // pieces for i in range(pieces + 1)]
