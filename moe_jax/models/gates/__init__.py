"""Gates choose the experts of each token and their weights. One file each, one signature.

The file of a gate also declares what settings, plans and parameters need to know about it (`moe_jax.config.facts`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.config import MoEConfig, registry
from moe_jax.config.plugins import first_line_of, guarded, load_part
from moe_jax.errors import ConfigError
from moe_jax.models.gates import softmax
from moe_jax.models.gates.choice import Decision, TopKRouting
from moe_jax.models.gates.protocol import Gate, GateOutput, of_logits

GATES: dict[str, Gate] = {name: module.GATE for name, module in registry.GATE_FACTS.modules().items()}


@functools.cache
def gate_of(moe: MoEConfig) -> Gate:
    """Return the gate that a config names.

    Raises ConfigError for an unknown name, or for a function that is not a gate.
    """
    gate = load_part("model.moe.gate", moe.gate, GATES)
    if moe.gate in GATES:
        return _named(moe.gate, gate)
    _check(gate, moe)
    return of_logits(gate)


def _named(name: str, gate: Gate) -> Gate:
    """Return the gate, with a check of what it returns that names it."""

    @functools.wraps(gate)
    def decide(*inputs: Any, **named_inputs: Any) -> GateOutput:
        found = gate(*inputs, **named_inputs)
        if isinstance(found, GateOutput) and isinstance(found.decision, Decision):
            return found
        made, of = (found.decision, "a GateOutput of ") if isinstance(found, GateOutput) else (found, "")
        raise TypeError(
            f"model.moe.gate={name} returns {of}{type(made).__name__}: "
            "return a GateOutput of a Decision (models/gates/choice.py)"
        )

    return decide


def _check(gate: Any, moe: MoEConfig) -> None:
    if not callable(gate):
        raise ConfigError(f"model.moe.gate={moe.gate} is of type {type(gate).__name__}: name a function")
    tokens = moe.num_experts + 1  # T differs from E, so that swapped dimensions are noticed
    logit_TE = jax.ShapeDtypeStruct((tokens, moe.num_experts), jnp.float32)
    result = "a moe_jax.models.gates.choice.TopKRouting"
    form = f"it must take router logits [T, E] and the MoEConfig settings, and return {result}"
    call = guarded(f"model.moe.gate={moe.gate}", form, gate)
    try:
        found = jax.eval_shape(lambda logit_TE: call(logit_TE, moe), logit_TE)
    except TypeError as error:  # raised by jax for a result that is not an array
        raise ConfigError(
            f"model.moe.gate={moe.gate} returns what is no array ({first_line_of(error)}): {form}"
        ) from error
    own = jax.eval_shape(lambda logit_TE: softmax.choose(logit_TE, moe), logit_TE)
    if not isinstance(found, TopKRouting):
        raise ConfigError(f"model.moe.gate={moe.gate} returns {type(found).__name__}: return {result}")
    for name in TopKRouting._fields:
        is_a, must_be = _form(getattr(found, name)), _form(getattr(own, name))
        if is_a != must_be:
            raise ConfigError(
                f"model.moe.gate={moe.gate} makes {name} {is_a} of {tokens} tokens' logits: it must be {must_be}"
            )


def _form(x: object) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.ShapeDtypeStruct) else type(x).__name__
