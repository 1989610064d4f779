"""As `o1` in chunks: one chunk is gathered, or summed, beside the exchange of the next (MoNTA, O2)."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Shaped

from moe_jax.parallel.over_tensor.chunks import Chunking, cut, in_order, join
from moe_jax.parallel.tensor_axis import gathered, summed


def to_experts(
    x: Shaped[Array, "P ..."], send: Callable[[jax.Array], jax.Array], chunking: Chunking
) -> Shaped[Array, "tP ..."]:
    """Exchanges one after another, each chunk gathered as soon as it is there."""
    sent: list[jax.Array] = []
    for chunk in cut(x, chunking):
        sent.append(send(in_order(chunk, sent[-1] if sent else None, chunking.platform)))
    return join([gathered(chunk, 0) for chunk in sent])


def from_experts(
    x: Shaped[Array, "tP ..."], send: Callable[[jax.Array], jax.Array], chunking: Chunking
) -> Shaped[Array, "P ..."]:
    """Sums one after another, each chunk sent as soon as it is there."""
    sums: list[jax.Array] = []
    for chunk in cut(x, chunking):
        sums.append(summed(in_order(chunk, sums[-1] if sums else None, chunking.platform), 0))
    return join([send(chunk) for chunk in sums])
