"""As `o2`, and each chunk is copied to its place beside the transfers of later ones (MoNTA, O3)."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Shaped

from moe_jax.parallel.over_tensor.chunks import Chunking, Places, cut, in_order, side_by_side
from moe_jax.parallel.tensor_axis import gathered, summed


def to_experts(
    x: Shaped[Array, "P ..."], send: Callable[[jax.Array], jax.Array], chunking: Chunking
) -> Shaped[Array, "tP ..."]:
    """Exchange of one chunk, gather of the one before, copy of the one before that."""
    first, *others = cut(x, chunking)
    sent, places = send(first), Places(x)
    for chunk in others:
        after = send(in_order(chunk, sent, chunking.platform))
        whole, sent = side_by_side(gathered(sent, 0), after)
        places.add(whole)
    return places.add(gathered(sent, 0))


def from_experts(
    x: Shaped[Array, "tP ..."], send: Callable[[jax.Array], jax.Array], chunking: Chunking
) -> Shaped[Array, "P ..."]:
    """Sum of one chunk, exchange of the one before, copy of the one before that."""
    first, *others = cut(x, chunking)
    own, places = summed(first, 0), Places(x)
    for chunk in others:
        after = summed(in_order(chunk, own, chunking.platform), 0)
        returned, own = side_by_side(send(own), after)
        places.add(returned)
    return places.add(send(own))
