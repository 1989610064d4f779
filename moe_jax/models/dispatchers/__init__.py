"""Token dispatchers turn tokens into rows for the experts, and the results into tokens again. One file each.

Each has four functions. P expert ranks (`ep_size`), each with L of the E experts; T tokens of this device, or of a
microbatch of its batch; D model width.

- `permute(x_TD, decision, moe, ep_size, capacity)` → `ExpertRows`, whose rows are [P, …, D] with block p for rank p,
  and `DispatchMetadata`, from which `unpermute` restores the tokens;
- `experts(params, received, moe, product)` → outputs in the shape of the received rows [P, …, D]. `product` is the
  matrix product of rows in groups of any size;
- `unpermute(returned, metadata)` → each token's weighted sum [T, D];
- `split(sent, pieces)` → the same `ExpertRows` in pieces along the slots, which exchange and experts may process one by
  one.

The exchange between `permute` and `unpermute` is in `moe_jax/models/dispatch.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from moe_jax.config import MoEConfig, registry
from moe_jax.config.plugins import guarded, load_part
from moe_jax.errors import ConfigError
from moe_jax.models.dispatchers import capacity, dropless, expert_choice, one_hot, ragged, soft
from moe_jax.models.dispatchers.protocol import DispatchMetadata, ExpertRows, TokenDispatcher
from moe_jax.parallel.trees import Tree

BUILT_IN: dict[str, TokenDispatcher] = {
    name: module.DISPATCHER for name, module in registry.DISPATCHER_FACTS.modules().items()
}
DISPATCHERS: dict[str, TokenDispatcher] = {
    "capacity": capacity.DISPATCHER,
    "one_hot": one_hot.DISPATCHER,
    "ragged": TokenDispatcher(ragged.permute, ragged.lane_experts, ragged.unpermute, capacity.split, slot_axis=0),
    "dropless": TokenDispatcher(dropless.permute, dropless.experts, dropless.unpermute, dropless.split, slot_axis=1),
}
# for gates that fill slots themselves, by the kind of their decision
GATE_DISPATCHERS: dict[str, TokenDispatcher] = {
    "expert_choice": capacity.DISPATCHER._replace(permute=expert_choice.permute, unpermute=expert_choice.unpermute),
    "soft": capacity.DISPATCHER._replace(permute=soft.permute, unpermute=soft.unpermute),
}


def dispatcher_of(moe: MoEConfig, ragged: bool = False) -> TokenDispatcher:
    """Return the dispatcher that a config names.

    `ragged`: where experts have a capacity, only rows that exist are sent. Raises ConfigError for an unknown name.
    """
    if moe.gate_facts.fills_slots:
        return GATE_DISPATCHERS[moe.gate_facts.decides]
    if ragged:
        return DISPATCHERS["ragged"]
    if moe.sends_sized_rows:
        return DISPATCHERS["dropless"]
    dispatcher = load_part("model.moe.dispatcher", moe.dispatcher, BUILT_IN)
    if not isinstance(dispatcher, TokenDispatcher):
        raise ConfigError(
            f"model.moe.dispatcher={moe.dispatcher} is of type {type(dispatcher).__name__}: "
            "name a moe_jax.models.dispatchers.protocol.TokenDispatcher"
        )
    return dispatcher if moe.dispatcher in BUILT_IN else _guarded(moe.dispatcher, dispatcher)


@functools.cache
def _guarded(name: str, dispatcher: TokenDispatcher) -> TokenDispatcher:
    """Wrap the functions of a dispatcher in checks.

    They raise ConfigError with its name if a function takes or returns something else.
    """
    part = f"model.moe.dispatcher={name}"
    parts = "moe_jax/models/dispatchers/__init__.py says what the four functions take"

    def call(field: str) -> Callable[..., Any]:
        return guarded(f"{part}: {field}", parts, getattr(dispatcher, field))

    def permute(x_TD: jax.Array, *rest: Any) -> tuple[ExpertRows, DispatchMetadata]:
        found = call("permute")(x_TD, *rest)
        if not isinstance(found, tuple) or len(found) != len(("sent", "metadata")):
            raise ConfigError(f"{part}: permute returns {type(found).__name__}: return ExpertRows and metadata")
        sent, metadata = found
        if not isinstance(sent, ExpertRows):
            raise ConfigError(
                f"{part}: permute returns {type(sent).__name__} to send: "
                "return moe_jax.models.dispatchers.protocol.ExpertRows"
            )
        if not isinstance(metadata, DispatchMetadata):
            raise ConfigError(
                f"{part}: permute returns {type(metadata).__name__} as metadata: return a NamedTuple with num_dropped"
            )
        back = jax.eval_shape(call("unpermute"), sent.rows, metadata)
        if getattr(back, "shape", None) != x_TD.shape:
            raise ConfigError(
                f"{part}: unpermute returns {getattr(back, 'shape', type(back).__name__)} for {len(x_TD)} tokens of "
                f"width {x_TD.shape[-1]}: return a weighted sum of each, [T, D]"
            )
        return sent, metadata

    def experts(params: Tree, received: ExpertRows, *rest: Any) -> jax.Array:
        found = call("experts")(params, received, *rest)
        shape, rows = getattr(found, "shape", None), received.rows.shape
        if shape != rows:
            raise ConfigError(
                f"{part}: experts returns {shape or type(found).__name__} for received rows {rows}: return outputs "
                "of the same shape"
            )
        return found

    return TokenDispatcher(permute, experts, call("unpermute"), call("split"), dispatcher.slot_axis)
