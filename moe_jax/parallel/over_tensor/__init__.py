"""Ways for t tensor ranks, each with a t-th part of every expert's width, to share an exchange: one file each.

`to_experts` brings the own rows [P, …] of each of P expert ranks to all tensor ranks of the rank they are for, and
returns what all sources sent there [t·P, …]; `from_experts` brings back the sum of what the tensor ranks made of them,
and is its transpose. `send` exchanges rows [P, …] between expert ranks that have the same place on the tensor axis.
All ways return the same bits. Those with one exchange are `Whole`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from moe_jax.parallel.over_tensor import o1, o2, o3, replicated
from moe_jax.parallel.over_tensor.chunks import Chunking
from moe_jax.parallel.ranks import Ranks

Send = Callable[[jax.Array], jax.Array]


Way = Callable[[jax.Array, Send, Chunking], jax.Array]


class Form(NamedTuple):
    """A way to the experts and back."""

    to_experts: Way
    from_experts: Way


FORMS = {
    "replicated": Form(replicated.to_experts, replicated.from_experts),
    "o1": Form(o1.to_experts, o1.from_experts),
    "o2": Form(o2.to_experts, o2.from_experts),
    "o3": Form(o3.to_experts, o3.from_experts),
}


class Route(NamedTuple):
    """How rows travel to the experts and back: between expert ranks by `algorithm`, over tensor ranks in a `form`."""

    algorithm: str
    ranks: Ranks
    form: str = "o1"
    chunks: int = 1

    def way(self, *, to_experts: bool) -> Way:
        """To the experts, or from them."""
        form = FORMS[self.form]
        return form.to_experts if to_experts else form.from_experts

    def carry(self, x: jax.Array, send: Send, *, to_experts: bool) -> jax.Array:
        """`x` to the experts, or from them, exchanged by `send`."""
        return self.way(to_experts=to_experts)(x, send, Chunking(self.chunks, self.ranks.platform))
