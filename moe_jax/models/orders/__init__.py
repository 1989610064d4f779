"""How tokens are put in order for the exchange, run through the experts, and put back. One file each.

Each has four functions. P expert ranks, each with L of the E experts; T tokens of this device, or of a microbatch of
its batch; D model width.

- `order(x_TD, decision, moe, ranks, room)` → what is sent, a tree of arrays [P, …] of which block p goes to rank p,
  and a ticket that finds the way back;
- `experts(params, received, moe, product)` → outputs in the shape of the received rows [P, …], `product` being that
  of rows in groups of any size;
- `inverse(returned, ticket)` → each token's weighted sum [T, D];
- `cut(sent, pieces)` → the same in pieces along the slots, which exchange and experts may treat one by one.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from moe_jax.config import MoE, registry
from moe_jax.config.plugins import guarded, named
from moe_jax.errors import ConfigError
from moe_jax.models.orders import dropless, irregular, mixed, one_hot, picked, slots
from moe_jax.models.orders.protocol import Order

OWN: dict[str, Order] = {name: module.ORDER for name, module in registry.ORDER_FACTS.modules().items()}
ORDERS: dict[str, Order] = {
    "slots": slots.ORDER,
    "one_hot": one_hot.ORDER,
    "irregular": Order(irregular.order, irregular.experts, irregular.inverse, slots.cut, slot_axis=0),
    "dropless": Order(dropless.order, dropless.experts, dropless.inverse, dropless.cut, slot_axis=1),
}
# of gates that fill slots themselves, by what they decide
FILLED: dict[str, Order] = {
    "picked": Order(picked.order, slots.experts, picked.inverse, slots.cut, slot_axis=2),
    "mixed": Order(mixed.order, slots.experts, mixed.inverse, slots.cut, slot_axis=2),
}


def order_of(moe: MoE, ragged: bool = False) -> Order:
    """The order that a config asks for; `ragged`: no row that does not exist is sent, where there is a capacity.

    Raises ConfigError if what it names is none.
    """
    if moe.gate_facts.fills_slots:
        return FILLED[moe.gate_facts.decides]
    if ragged:
        return ORDERS["irregular"]
    if moe.sends_sized_rows:
        return ORDERS["dropless"]
    order = named("model.moe.dispatcher", moe.dispatcher, OWN)
    if not isinstance(order, Order):
        raise ConfigError(
            f"model.moe.dispatcher={moe.dispatcher} is of type {type(order).__name__}: "
            "name a moe_jax.models.orders.protocol.Order"
        )
    return order if moe.dispatcher in OWN else _guarded(moe.dispatcher, order)


@functools.cache
def _guarded(name: str, order: Order) -> Order:
    """The same functions; ConfigError names the order where one takes or returns something else than orders do."""
    part, parts = f"model.moe.dispatcher={name}", "moe_jax/models/orders/__init__.py says what the four functions take"

    def call(field: str) -> Callable[..., Any]:
        return guarded(f"{part}: {field}", parts, getattr(order, field))

    def ordered(x_TD: jax.Array, *rest: Any) -> tuple[Any, Any]:
        found = call("order")(x_TD, *rest)
        if not isinstance(found, tuple) or len(found) != len(("sent", "ticket")):
            raise ConfigError(f"{part}: order returns {type(found).__name__}: return what is sent and a ticket")
        sent, ticket = found
        rows = [
            leaf for leaf in jax.tree.leaves(sent) if getattr(leaf, "ndim", 0) > 1 and leaf.shape[-1] == x_TD.shape[-1]
        ]
        if len(rows) == 1:
            back = jax.eval_shape(call("inverse"), rows[0], ticket)
            if getattr(back, "shape", None) != x_TD.shape:
                raise ConfigError(
                    f"{part}: inverse returns {getattr(back, 'shape', type(back).__name__)} for {len(x_TD)} tokens of "
                    f"width {x_TD.shape[-1]}: return a weighted sum of each, [T, D]"
                )
        return sent, ticket

    def computed(params: Any, received: Any, *rest: Any) -> Any:
        found = call("experts")(params, received, *rest)
        shape, rows = getattr(found, "shape", None), [leaf.shape for leaf in jax.tree.leaves(received)]
        if shape not in rows:
            wanted = rows[0] if rows else "none"
            raise ConfigError(
                f"{part}: experts returns {shape or type(found).__name__} for received rows {wanted}: return outputs "
                "of the same shape"
            )
        return found

    return Order(ordered, computed, call("inverse"), call("cut"), order.slot_axis)
