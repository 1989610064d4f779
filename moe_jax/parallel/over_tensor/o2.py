"""As `o1` in chunks: one chunk is gathered, or summed, beside the exchange of the next (MoNTA, O2)."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Shaped

from moe_jax.parallel.over_tensor.chunks import Chunking, cut, in_order, join, side_by_side
from moe_jax.parallel.tensor_axis import gathered, summed


def to_experts(
    x: Shaped[Array, "P ..."], send: Callable[[jax.Array], jax.Array], chunking: Chunking
) -> Shaped[Array, "tP ..."]:
    """Exchanges one after another, each chunk gathered beside the next one's."""
    first, *others = cut(x, chunking)
    sent, rows = send(first), []
    for chunk in others:
        after = send(in_order(chunk, sent, chunking.platform))
        whole, sent = side_by_side(gathered(sent, 0), after)
        rows.append(whole)
    return join([*rows, gathered(sent, 0)])


def from_experts(
    x: Shaped[Array, "tP ..."], send: Callable[[jax.Array], jax.Array], chunking: Chunking
) -> Shaped[Array, "P ..."]:
    """Sums one after another, each chunk sent beside the next one's."""
    first, *others = cut(x, chunking)
    own, rows = summed(first, 0), []
    for chunk in others:
        after = summed(in_order(chunk, own, chunking.platform), 0)
        returned, own = side_by_side(send(own), after)
        rows.append(returned)
    return join([*rows, send(own)])
