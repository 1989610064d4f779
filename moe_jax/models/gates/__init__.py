"""Gates: which experts a token goes to and how much each counts. One file each, one signature."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.config import MoE
from moe_jax.errors import ConfigError
from moe_jax.models.gates import sigmoid, softmax
from moe_jax.models.gates.choice import Choice
from moe_jax.models.named import named

Gate = Callable[[jax.Array, MoE], Choice]
GATES: dict[str, Gate] = {"softmax": softmax.choose, "sigmoid": sigmoid.choose}


@functools.cache
def gate_of(moe: MoE) -> Gate:
    """The one that a config names. Raises ConfigError if it is none."""
    gate = named("model.moe.gate", moe.gate, GATES)
    if moe.gate not in GATES:
        _check(gate, moe)
    return gate


def _check(gate: Any, moe: MoE) -> None:
    if not callable(gate):
        raise ConfigError(f"model.moe.gate={moe.gate} is of type {type(gate).__name__}: name a function")
    tokens = moe.num_experts + 1  # T and E must not be mistaken for each other
    logit_TE = jax.ShapeDtypeStruct((tokens, moe.num_experts), jnp.float32)
    found = jax.eval_shape(lambda logit_TE: gate(logit_TE, moe), logit_TE)
    own = jax.eval_shape(lambda logit_TE: GATES["softmax"](logit_TE, moe), logit_TE)
    if not isinstance(found, Choice):
        raise ConfigError(
            f"model.moe.gate={moe.gate} returns {type(found).__name__}: return a moe_jax.models.gates.choice.Choice"
        )
    for name in Choice._fields:
        is_a, must_be = getattr(found, name), getattr(own, name)
        if (getattr(is_a, "shape", None), getattr(is_a, "dtype", None)) != (must_be.shape, must_be.dtype):
            raise ConfigError(
                f"model.moe.gate={moe.gate} makes {name} {_form(is_a)} of {tokens} tokens' logits: "
                f"it must be {_form(must_be)}"
            )


def _form(x: object) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.ShapeDtypeStruct) else type(x).__name__
