"""Every tensor rank exchanges all rows, as where activations are the same over the tensor axis (MoNTA's baseline).

An all-to-all carries t times the rows that `o1` sends.
"""

from collections.abc import Callable

import jax
from jaxtyping import Array, Shaped

from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.over_tensor.chunks import Chunking
from moe_jax.parallel.tensor_axis import gathered, summed


def to_experts(
    x: Shaped[Array, "P ..."], send: Callable[[jax.Array], jax.Array], chunking: Chunking
) -> Shaped[Array, "tP ..."]:
    """Gather, then exchange."""
    whole = gathered(x[:, None], 1)
    received = jax.numpy.swapaxes(send(whole), 0, 1)
    return received.reshape(received.shape[0] * x.shape[0], *x.shape[1:])


def from_experts(
    x: Shaped[Array, "tP ..."], send: Callable[[jax.Array], jax.Array], chunking: Chunking
) -> Shaped[Array, "P ..."]:
    """Exchange, then sum."""
    ranks = jax.lax.axis_size(Axis.TENSOR)
    by_source = x.reshape(ranks, x.shape[0] // ranks, *x.shape[1:])
    return summed(send(jax.numpy.swapaxes(by_source, 0, 1)), 1)[:, 0]
