"""As `o2`, and each chunk is copied to its place beside the transfers of later ones (MoNTA, O3)."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Shaped

from moe_jax.parallel.over_tensor.chunks import Chunking, cut, in_order, place
from moe_jax.parallel.tensor_axis import gathered, summed


def to_experts(
    x: Shaped[Array, "P ..."], send: Callable[[jax.Array], jax.Array], chunking: Chunking
) -> Shaped[Array, "tP ..."]:
    """Exchange of one chunk, gather of the one before, copy of the one before that."""
    target: jax.Array | None = None
    sent: jax.Array | None = None
    start = 0
    for chunk in cut(x, chunking):
        sent = send(in_order(chunk, sent, chunking.platform))
        target = place(target, gathered(sent, 0), x.shape[-2], start)
        start += chunk.shape[-2]
    assert target is not None
    return target


def from_experts(
    x: Shaped[Array, "tP ..."], send: Callable[[jax.Array], jax.Array], chunking: Chunking
) -> Shaped[Array, "P ..."]:
    """Copy of one chunk, sum of the one before, exchange of the one before that."""
    target: jax.Array | None = None
    own: jax.Array | None = None
    start = 0
    for chunk in cut(x, chunking):
        own = summed(in_order(chunk, own, chunking.platform), 0)
        target = place(target, send(own), x.shape[-2], start)
        start += chunk.shape[-2]
    assert target is not None
    return target
