"""Copies of the most loaded experts in a plan (`exchange.hot_experts`): the load that they leave, bytes and memory."""

from collections.abc import Mapping

from moe_jax.config import Config
from moe_jax.plan.resources import count_parameters

_FLOAT32 = 4  # bytes of a copy's gradient


def copied_parameters(config: Config) -> float:
    """Parameters of the copies of one block."""
    model = config.model
    blocks = model.block_kinds.count("moe")
    if not config.exchange.hot_experts or not blocks:
        return 0.0
    return count_parameters(model).expert / model.moe.num_experts / blocks * config.exchange.hot_experts


def leaving_bytes(config: Config, ranks: int, item: int) -> tuple[float, float]:
    """Bytes that leave each of the expert `ranks` for the copies of one block, and for the sums of their gradients.

    Both are all-reduces around a ring, of numbers of `item` bytes and of float32.
    """
    leaving = 2 * (1 - 1 / ranks) * copied_parameters(config)
    return leaving * item, leaving * _FLOAT32


def sent_again(config: Config) -> bool:
    """Whether weights of copies are sent again for the backward pass instead of stored.

    With `schedule.remat=chunk` the whole forward pass is repeated.
    """
    return config.schedule.remat in ("dots", "full")


def stored_copies_bytes(config: Config, item: int) -> float:
    """Bytes of the copies of one block that the forward pass stores for the backward pass."""
    return 0.0 if sent_again(config) else copied_parameters(config) * item


def copies_bytes(config: Config, item: int) -> float:
    """Bytes of one block's copies while its backward pass runs, if they are not stored, and of their gradients."""
    return copied_parameters(config) * (_FLOAT32 + (item if sent_again(config) else 0))


def load_with_copies(config: Config, mesh: Mapping[str, int], load: float) -> float:
    """The busiest rank's rows / the mean of all ranks, if they are `load` without copies.

    The experts of the busiest rank are assumed to be equally loaded, and to be the ones that are copied: of the rows of
    a copied expert, an even share is left. This underrates a copy of one hot expert among others, and overrates copies
    if several ranks are overloaded.
    """
    ranks = config.mesh.expert_ranks(mesh)
    local = config.model.moe.num_experts // ranks
    copied = min(config.exchange.hot_experts, local) / local
    return max(1.0, load * (1 - copied * (1 - 1 / ranks)))
