"""Every tensor rank exchanges all rows, as where activations are the same over the tensor axis (MoNTA's baseline).

An all-to-all carries t times the rows that `o1` sends.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.over_tensor.whole import Whole
from moe_jax.parallel.tensor_axis import gathered, summed


def _of_all(x: Shaped[Array, "P ..."]) -> Shaped[Array, "P t ..."]:
    return gathered(x[:, None], 1)


def _by_source(x: Shaped[Array, "P t ..."]) -> Shaped[Array, "tP ..."]:
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _by_target(x: Shaped[Array, "tP ..."]) -> Shaped[Array, "P t ..."]:
    ranks = jax.lax.axis_size(Axis.TENSOR)
    return jnp.swapaxes(x.reshape(ranks, x.shape[0] // ranks, *x.shape[1:]), 0, 1)


def _sum(x: Float[Array, "P t ..."]) -> Float[Array, "P ..."]:
    return summed(x, 1)[:, 0]


to_experts = Whole(before=_of_all, behind=_by_source)
from_experts = Whole(before=_by_target, behind=_sum)
