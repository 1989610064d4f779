"""Optimizers: one file each, one signature (`protocol.Scale`)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from moe_jax.config import OptimizerConfig, registry
from moe_jax.config.plugins import guarded, load_part
from moe_jax.errors import ConfigError
from moe_jax.parallel.trees import Tree
from moe_jax.step.optimizers.protocol import Parameter, Scale, unless_bad

OPTIMIZERS: dict[str, Scale] = {name: module.scale for name, module in registry.OPTIMIZER_FACTS.modules().items()}


def scale_of(optimizer: OptimizerConfig) -> Scale:
    """Return the optimizer that a config names.

    Raises ConfigError for an unknown name, or for something else than an optimizer.
    """
    found = load_part("optimizer.name", optimizer.name, OPTIMIZERS)
    if optimizer.name in OPTIMIZERS:
        return OPTIMIZERS[optimizer.name]
    part = f"optimizer.name={optimizer.name}"
    if not callable(found):
        raise ConfigError(f"{part} is of type {type(found).__name__}: name a function")
    form = "it must take an OptimizerConfig, a tree of Parameters and a platform, and return an optax transformation"
    call = guarded(part, form, found)
    _check(part, form, call(optimizer, {"up": Parameter(("model", "hidden"))}, "cpu"))

    def scale(optimizer: OptimizerConfig, parameters: Tree, platform: str) -> optax.GradientTransformationExtraArgs:
        return _unless_bad(call(optimizer, parameters, platform))

    return scale


def _check(part: str, form: str, made: Any) -> None:
    """Raise ConfigError for something else than a transformation of float32 arrays, with moments of their shape."""
    if not isinstance(made, optax.GradientTransformation):
        raise ConfigError(f"{part} returns {type(made).__name__}: {form}")
    params = {"up": jax.ShapeDtypeStruct((4, 6), jnp.float32)}
    update = guarded(part, "its update must take gradients, a state and parameters", _unless_bad(made).update)

    def once(params: Tree) -> Any:
        state = made.init(params)
        return update(params, state, params, is_good=jnp.bool_(True)), state

    (updates, after), before = jax.eval_shape(once, params)
    if updates != params:
        raise ConfigError(f"{part} makes {updates} of gradients {params}: return updates of the same shapes and types")
    if after != before:
        raise ConfigError(f"{part} makes {after} of the state {before}: return a state of the same shapes and types")
    for path, moment in jax.tree.leaves_with_path(before):
        if moment.ndim and (moment.shape != (4, 6) or path[-1] != jax.tree_util.DictKey("up")):
            name = jax.tree_util.keystr(path)
            raise ConfigError(f"{part} has {moment.dtype}{list(moment.shape)} as {name}: use trees like the parameters")


def _unless_bad(made: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the same transformation, whose state does not change in a bad step."""
    plain = optax.with_extra_args_support(made)

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None, *, is_good: jax.Array
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, moved = plain.update(grads, state, params, is_good=is_good)
        return updates, unless_bad(is_good, moved, state)

    return optax.GradientTransformationExtraArgs(made.init, update)
