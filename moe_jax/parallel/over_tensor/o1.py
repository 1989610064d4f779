"""Each tensor rank exchanges its own rows only, and they are gathered behind (MoNTA, O1)."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Shaped

from moe_jax.parallel.over_tensor.chunks import Chunking
from moe_jax.parallel.tensor_axis import gathered, summed


def to_experts(
    x: Shaped[Array, "P ..."], send: Callable[[jax.Array], jax.Array], chunking: Chunking
) -> Shaped[Array, "tP ..."]:
    """Exchange, then gather."""
    return gathered(send(x), 0)


def from_experts(
    x: Shaped[Array, "tP ..."], send: Callable[[jax.Array], jax.Array], chunking: Chunking
) -> Shaped[Array, "P ..."]:
    """Sum, then exchange."""
    return send(summed(x, 0))
