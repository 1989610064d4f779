"""What hooks are made of. T tokens of this device, P expert ranks, D model width."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Shaped


def _same(x: jax.Array, *_: Any) -> jax.Array:
    return x


class Around(NamedTuple):
    """Functions before and after one exchange; nothing differentiates them.

    `before` makes of the rows what travels, an array of any type that keeps the first dimension; `after` makes rows of
    it again, in the shape that they had and the type that it is told.
    """

    before: Callable[[Float[Array, "P ... D"]], Shaped[Array, "P ..."]] = _same
    after: Callable[[Shaped[Array, "P ..."], jax.typing.DTypeLike], Float[Array, "P ... D"]] = _same


class Hooks(NamedTuple):
    """Functions around a MoE layer and its exchanges (FSMoE §3); without any, it is the layer alone.

    The layer's have gradients and keep shape and type. Backward, the cotangents of what an exchange brought travel as
    they would without hooks, with functions of their own around them: straight through what `before` and `after` do.
    """

    before_layer: Callable[[Float[Array, "T D"]], Float[Array, "T D"]] = _same  # of what gate and routed experts see
    after_layer: Callable[[Float[Array, "T D"]], Float[Array, "T D"]] = _same  # of their weighted sums
    dispatch: Around = Around()
    combine: Around = Around()
    dispatch_backward: Around = Around()  # from the experts to the tokens' devices
    combine_backward: Around = Around()  # from the tokens' devices to the experts

    def around(self, op: str, *, backward: bool) -> Around:
        """Those of the exchange `op`: dispatch or combine."""
        around: Around = getattr(self, f"{op}_backward" if backward else op)
        return around
