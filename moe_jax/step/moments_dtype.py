"""Moments that are stored as bfloat16, with stochastic rounding: `optimizer.moments_dtype`.

A mean of gradients moves in steps of 1 - beta of a gradient. Rounded to the nearest of bfloat16's numbers, which are
0.4 % or more apart, it would ignore small ones. Rounded up with the probability that makes the rounded number's mean
the number itself, it follows them on average (Gupta et al. 2015, section 3).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from moe_jax.parallel.trees import Tree
from moe_jax.parallel.word_hash import index_of, mix
from moe_jax.step.optimizers.protocol import Parameter


def in_bfloat16(
    rule: optax.GradientTransformationExtraArgs, parameters: Tree, steps_of: Callable[[optax.OptState], jax.Array]
) -> optax.GradientTransformationExtraArgs:
    """Return the same transformation, with moments that are bfloat16 between updates and float32 in them.

    Moments have the shapes of their parameters. `steps_of` returns the number of updates in a state. All devices with
    the same shard round it alike.
    """
    known = dict(jax.tree.leaves_with_path(parameters))

    def init(params: optax.Params) -> optax.OptState:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim else x, rule.init(params))

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **rest: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.ndim else x, state)
        updates, moved = rule.update(grads, exact, params, **rest)
        leaves, structure = jax.tree.flatten_with_path(moved)
        step = steps_of(moved).astype(jnp.uint32)
        rounded = [
            _stored(x, mix(step ^ mix(jnp.uint32(number))), _parameter_of(path, known)) if x.ndim else x
            for number, (path, x) in enumerate(leaves)
        ]
        return updates, jax.tree.unflatten(structure, rounded)

    return optax.GradientTransformationExtraArgs(init, update)


def _parameter_of(path: tuple[Any, ...], known: dict[Any, Parameter]) -> Parameter:
    """Return the parameter whose path ends the path of a moment."""
    return next(known[path[first:]] for first in range(len(path)) if path[first:] in known)


def _stored(x: jax.Array, word: jax.Array, parameter: Parameter) -> jax.Array:
    axes = [axis for entry in parameter.spec if entry for axis in (entry if isinstance(entry, tuple) else (entry,))]
    shard = jax.lax.axis_index(tuple(axes)) if axes else 0
    return rounded_at_random(x, mix(word ^ jnp.uint32(shard)))


def rounded_at_random(x: Float[Array, "..."], word: jax.Array) -> Float[Array, "..."]:
    """Return float32 numbers as bfloat16, each rounded up or down by a hash of its index and a 32-bit word.

    What bfloat16 can represent stays as it is, as do infinities and NaN.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    added = mix(index_of(x.shape) ^ word) >> 16  # up to the weight of bfloat16's last bit
    cut = jax.lax.bitcast_convert_type((bits + added) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)
