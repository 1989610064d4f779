"""What hooks are made of. T tokens of this device, P expert ranks, D model width."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Shaped


def _same(x: jax.Array, *_: object) -> jax.Array:
    return x


class WireCodec(NamedTuple):
    """The form in which rows travel through one exchange; nothing differentiates its functions.

    `encode` makes of the rows what travels, an array of any type that keeps the first dimension. `decode` makes rows of
    it again, in the shape that they had and the type that it is given.
    """

    encode: Callable[[Float[Array, "P ... D"]], Shaped[Array, "P ..."]] = _same
    decode: Callable[[Shaped[Array, "P ..."], jax.typing.DTypeLike], Float[Array, "P ... D"]] = _same


class Hooks(NamedTuple):
    """Functions around a MoE layer, and the codecs of its exchanges (FSMoE §3); without any, it is the layer alone.

    The layer's have gradients and keep shape and type. Backward, the cotangents of what an exchange brought travel as
    they would without hooks, with codecs of their own: gradients go straight through `encode` and `decode`.
    """

    before_layer: Callable[[Float[Array, "T D"]], Float[Array, "T D"]] = _same  # of what gate and routed experts see
    after_layer: Callable[[Float[Array, "T D"]], Float[Array, "T D"]] = _same  # of their weighted sums
    dispatch: WireCodec = WireCodec()
    combine: WireCodec = WireCodec()
    dispatch_backward: WireCodec = WireCodec()  # from the experts to the tokens' devices
    combine_backward: WireCodec = WireCodec()  # from the tokens' devices to the experts

    def codec(self, phase: str, *, backward: bool) -> WireCodec:
        """The codec of a phase: dispatch or combine."""
        codec: WireCodec = getattr(self, f"{phase}_backward" if backward else phase)
        return codec
