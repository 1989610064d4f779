"""The interface of hooks. T tokens of this device, P expert ranks, D model width."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Shaped


def _identity(x: jax.Array, *_: object) -> jax.Array:
    return x


class WireCodec(NamedTuple):
    """How rows are encoded for one exchange. Its functions are not differentiated.

    `encode` turns rows into what is sent, an array of any dtype that keeps the first dimension. `decode` restores rows
    of the original shape, in the dtype that is passed to it.
    """

    encode: Callable[[Float[Array, "P ... D"]], Shaped[Array, "P ..."]] = _identity
    decode: Callable[[Shaped[Array, "P ..."], jax.typing.DTypeLike], Float[Array, "P ... D"]] = _identity

    @property
    def keeps_rows(self) -> bool:
        """Whether rows travel as they are."""
        return self.encode is _identity and self.decode is _identity


class Hooks(NamedTuple):
    """Functions around an MoE layer, and the codecs of its exchanges (FSMoE §3). By default they do nothing.

    The functions around the layer are differentiated and keep shape and dtype. In the backward pass the cotangents of
    what an exchange brought are sent as without hooks, with codecs of their own: gradients pass straight through
    `encode` and `decode`.
    """

    before_layer: Callable[[Float[Array, "T D"]], Float[Array, "T D"]] = (
        _identity  # on the input of the gate and of routed experts
    )
    after_layer: Callable[[Float[Array, "T D"]], Float[Array, "T D"]] = (
        _identity  # on the weighted sums of routed experts
    )
    dispatch: WireCodec = WireCodec()
    combine: WireCodec = WireCodec()
    dispatch_backward: WireCodec = WireCodec()  # from the experts to the tokens' devices
    combine_backward: WireCodec = WireCodec()  # from the tokens' devices to the experts

    def codec(self, phase: str, *, backward: bool) -> WireCodec:
        """Return the codec of a phase: dispatch or combine."""
        codec: WireCodec = getattr(self, f"{phase}_backward" if backward else phase)
        return codec
