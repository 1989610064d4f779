"""Each tensor rank exchanges its own rows only, and they are gathered behind (MoNTA, O1)."""

from jaxtyping import Array, Float, Shaped

from moe_jax.parallel.over_tensor.whole import Whole, as_it_is
from moe_jax.parallel.tensor_axis import gathered, summed


def _of_all(x: Shaped[Array, "P ..."]) -> Shaped[Array, "tP ..."]:
    return gathered(x, 0)


def _sum(x: Float[Array, "tP ..."]) -> Float[Array, "P ..."]:
    return summed(x, 0)


to_experts = Whole(before=as_it_is, behind=_of_all)
from_experts = Whole(before=_sum, behind=as_it_is)
