"""Dropless dispatch of a step in which ranks have copies of some experts: their rows stay on the device.

P expert ranks, W rows that a rank can receive from each source, S positions of experts, K copies; T tokens of this
device, k choices of each, D model width. A device can have up to H = T·min(k, K) rows for its copies.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoEConfig
from moe_jax.models import routing
from moe_jax.models.dispatchers import dropless
from moe_jax.models.dispatchers.protocol import CapacityState, ExpertRows, TopKMetadata
from moe_jax.models.gates.choice import TopKRouting


class HotRows(NamedTuple):
    """The rows of this device for copies of experts, which are not exchanged."""

    rows: ExpertRows  # [1, H, D], with sizes [1, K]
    position_K: Int[Array, " K"]  # of the copied experts, the same on all expert ranks; S: not used


def permute_with_copies(
    x_TD: Float[Array, "T D"],
    choice: TopKRouting,
    moe: MoEConfig,
    ep_size: int,
    capacity: CapacityState | None,
    position_K: Int[Array, " K"],
) -> tuple[ExpertRows, TopKMetadata, HotRows]:
    """Return the rows to send, as `dropless.permute` does, without those of copies, and the latter.

    The metadata are of all rows [P·W + H, D], those of copies last. Rows of copies need no space in a rank's buffer.
    """
    slots, copies = moe.num_experts, len(position_K)
    copy_S = jnp.full(slots, copies).at[position_K].set(jnp.arange(copies), mode="drop")
    copy_Tk = jnp.append(copy_S, copies)[choice.expert_Tk]  # K: to be sent, or no expert
    is_hot_Tk = copy_Tk < copies
    sent = dropless.place(jnp.where(is_hot_Tk, slots, choice.expert_Tk), moe, ep_size, capacity)
    hot = dropless.place(copy_Tk, dataclasses.replace(moe, num_experts=copies), 1, None)
    num_sent = ep_size * sent.width
    dest_index_Tk = jnp.where(is_hot_Tk, num_sent + hot.dest_index_Tk, sent.dest_index_Tk)
    permutation = routing.make_permutation(dest_index_Tk, is_hot_Tk | sent.keep_mask_Tk, num_sent + hot.width)
    rows, hot_rows = jnp.split(routing.to_rows(x_TD, permutation), [num_sent])
    return (
        ExpertRows(rows.reshape(ep_size, sent.width, -1), sent.count_PL),
        TopKMetadata(permutation, choice.weight_Tk, sent.num_dropped),
        HotRows(ExpertRows(hot_rows[None], hot.count_PL), position_K),
    )


def joined(returned: Float[Array, "P W D"], of_copies: Float[Array, "1 H D"]) -> Float[Array, "1 R D"]:
    """Return the outputs of all R = P·W + H rows as one block, in the order of their metadata."""
    return jnp.concatenate([returned.reshape(1, -1, returned.shape[-1]), of_copies], axis=1)
