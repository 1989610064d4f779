"""Learning rates and weight decays of groups of parameters: `optimizer.groups`."""

import difflib
import re

import jax
import optax

from moe_jax.config import OptimizerConfig
from moe_jax.errors import ConfigError
from moe_jax.parallel.trees import Tree


def group_factors(optimizer: OptimizerConfig, parameters: Tree) -> tuple[Tree, Tree]:
    """Return the weight decay and the factor of the learning rate of each of the `optimizers.protocol.Parameter`s.

    Raises ConfigError for a group without parameters.
    """
    leaves, structure = jax.tree.flatten_with_path(parameters)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    group_of = [_first_match(optimizer, name) for name in names]
    for number, group in enumerate(optimizer.groups):
        if number not in group_of:
            _refuse(f"optimizer.groups[{number}].match={group.match}", group.match, names)
    decays, factors = [], []
    for (_, parameter), own in zip(leaves, group_of, strict=True):
        decay, factor = optimizer.weight_decay if len(parameter.spaces) > 1 else 0.0, 1.0
        if own is not None:
            group = optimizer.groups[own]
            decay, factor = decay if group.weight_decay is None else group.weight_decay, group.learning_rate_factor
        decays.append(decay)
        factors.append(factor)
    return jax.tree.unflatten(structure, decays), jax.tree.unflatten(structure, factors)


def with_decay(decays: Tree, factors: Tree) -> optax.GradientTransformation:
    """Add to each update its parameter times its decay, and multiply the sum by its factor."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        return jax.tree.map(_decayed, updates, params, decays, factors), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def _decayed(update: jax.Array, param: jax.Array, decay: float, factor: float) -> jax.Array:
    update = update + decay * param if decay else update
    return update if factor == 1 else factor * update


def _first_match(optimizer: OptimizerConfig, name: str) -> int | None:
    return next((n for n, group in enumerate(optimizer.groups) if re.search(group.match, name)), None)


def _refuse(setting: str, pattern: str, names: list[str]) -> None:
    if any(re.search(pattern, name) for name in names):
        raise ConfigError(f"{setting} finds only parameters of groups before it: put it before them, or leave it out")
    near = max(names, key=lambda name: difflib.SequenceMatcher(None, pattern, name).ratio())
    raise ConfigError(f"{setting} finds no parameter: use a part of a path such as {near}")
