"""The optimizer of a config: updates by one of `optimizers/`, weight decay, and the learning rate of each step.

Groups of parameters may have other learning rates and weight decays (`optimizer.groups`).

Moments may be stored as bfloat16, with stochastic rounding (`optimizer.moments_dtype`). A mean of gradients moves in
steps of 1 - beta of a gradient. Rounded to the nearest of bfloat16's numbers, which are 0.4 % or more apart, it would
ignore small ones. Rounded up with the probability that makes the rounded number's mean the number itself, it follows
them on average (Gupta et al. 2015, section 3).
"""

import difflib
import itertools
import math
import re
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from moe_jax.config import Config, OptimizerConfig
from moe_jax.errors import ConfigError
from moe_jax.models.parameters import param_dims, param_shapes
from moe_jax.parallel.mesh import expert_axis
from moe_jax.parallel.sharding import REPLICATED, Dims, map_dims, partitions
from moe_jax.parallel.trees import ParamDims, Params, ShardSpecs, Specs, Tree
from moe_jax.parallel.word_hash import index_of, mix
from moe_jax.parallel.zero import ShardSpec, shard_specs_of, unsharded_specs
from moe_jax.step.offload import array_by_array
from moe_jax.step.optimizers import scale_of
from moe_jax.step.optimizers.protocol import Parameter, of_parameter
from moe_jax.step.router_bias import score_biases


def in_bfloat16(
    rule: optax.GradientTransformationExtraArgs, parameters: Tree, steps_of: Callable[[optax.OptState], jax.Array]
) -> optax.GradientTransformationExtraArgs:
    """Return the same transformation, with moments that are bfloat16 between updates and float32 in them.

    Moments have the shapes of their parameters. `steps_of` returns the number of updates in a state. All devices with
    the same shard round it alike. `first_row` of an update: the index of the first row in the whole arrays, of which
    these are some rows.
    """
    known = dict(jax.tree.leaves_with_path(parameters))

    def init(params: optax.Params) -> optax.OptState:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim else x, rule.init(params))

    def update(
        grads: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        first_row: jax.Array | int = 0,
        **rest: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.ndim else x, state)
        updates, moved = rule.update(grads, exact, params, **rest)
        step = steps_of(moved).astype(jnp.uint32)

        def rounded(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            parameter = of_parameter(path, known) if x.ndim else None
            return x if parameter is None else _stored(x, mix(step ^ mix(_word_of(path))), parameter, first_row)

        return updates, jax.tree.map_with_path(rounded, moved)

    return optax.GradientTransformationExtraArgs(init, update)


def _word_of(path: tuple[Any, ...]) -> jax.Array:
    return jnp.uint32(zlib.crc32(jax.tree_util.keystr(path).encode()))


def _stored(x: jax.Array, word: jax.Array, parameter: Parameter, first_row: jax.Array | int) -> jax.Array:
    axes = [axis for entry in parameter.spec if entry for axis in (entry if isinstance(entry, tuple) else (entry,))]
    shard = jax.lax.axis_index(tuple(axes)) if axes else 0
    return rounded_at_random(x, mix(word ^ jnp.uint32(shard)), first_row)


def rounded_at_random(x: Float[Array, "..."], word: jax.Array, first_row: jax.Array | int = 0) -> Float[Array, "..."]:
    """Return float32 numbers as bfloat16, each rounded up or down by a hash of its index and a 32-bit word.

    What bfloat16 can represent stays as it is, as do infinities and NaN. Rows are counted from `first_row`.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    first = jnp.uint32(first_row) * jnp.uint32(math.prod(x.shape[1:]) % 2**32)
    added = mix((index_of(x.shape) + first) ^ word) >> 16  # up to the weight of bfloat16's last bit
    cut = jax.lax.bitcast_convert_type((bits + added) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)


_QK_WEIGHTS = re.compile(r"attention\.(query|key)(_bias)?$")  # that QK-clip scales


def group_factors(optimizer: OptimizerConfig, parameters: Tree) -> tuple[Tree, Tree]:
    """Return the weight decay and the factor of the learning rate of each of the `optimizers.protocol.Parameter`s.

    Raises ConfigError for a group without parameters, and for one that keeps what QK-clip scales.
    """
    leaves, structure = jax.tree.flatten_with_path(parameters)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    group_of = [_first_match(optimizer, name) for name in names]
    for number, group in enumerate(optimizer.groups):
        if number not in group_of:
            _refuse(f"optimizer.groups[{number}].match={group.match}", group.match, names)
    decays, factors = [], []
    for (_, parameter), name, own in zip(leaves, names, group_of, strict=True):
        decay, factor = optimizer.weight_decay if parameter.decays else 0.0, 1.0
        if own is not None:
            group = optimizer.groups[own]
            decay, factor = decay if group.weight_decay is None else group.weight_decay, group.learning_rate_factor
            if optimizer.qk_clip is not None and factor == 0 and _QK_WEIGHTS.search(name):
                raise ConfigError(
                    f"optimizer.qk_clip={optimizer.qk_clip} scales queries and keys, and optimizer.groups[{own}].match="
                    f"{group.match} keeps {name} as it is by learning_rate_factor=0: use optimizer.qk_clip=null, or "
                    "leave queries and keys out of the group"
                )
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


def learning_rate(config: Config) -> optax.Schedule:
    """Return the schedule from step (0 is the first) to learning rate: linear warm-up, then the configured decay.

    With W = `warmup_steps`, step 0 has 1/(W + 1) of the peak, step W has the peak, and the last step of `train.steps`
    has `final_fraction` of it, or the peak if no step follows W or the schedule is constant. Later steps keep the last
    value.
    """
    settings, warmup_steps = config.optimizer, config.optimizer.warmup_steps
    peak, end = settings.learning_rate, settings.learning_rate * settings.final_fraction
    last = config.train.steps - 1
    decay_steps = max(1, last - warmup_steps)
    starts: list[int] = [warmup_steps]
    if settings.schedule == "cosine":  # with restarts: Loshchilov and Hutter 2017, section 3, in equal cycles
        cycles = settings.restarts + 1
        starts = [warmup_steps + cycle * (decay_steps + 1) // cycles for cycle in range(cycles)]
        lengths = [after - first for first, after in itertools.pairwise([*starts, warmup_steps + decay_steps + 1])]
        decays = [optax.cosine_decay_schedule(peak, each - 1, alpha=settings.final_fraction) for each in lengths]
    elif settings.schedule == "wsd":  # warm-up, stable, decay: Hu et al. 2024, section 4
        first = max(warmup_steps, last - round(settings.decay_fraction * config.train.steps))
        starts += [first]
        decays = [optax.constant_schedule(peak), optax.linear_schedule(peak, end, max(1, last - first))]
    elif settings.schedule == "linear":
        decays = [optax.linear_schedule(peak, end, decay_steps)]
    else:
        decays = [optax.constant_schedule(peak)]
    # a warm-up from 0 would waste the first step
    warmup = optax.linear_schedule(peak / (warmup_steps + 1), peak, warmup_steps)
    return optax.join_schedules([warmup, *decays], starts)


def make_optimizer(
    config: Config, dims: ParamDims, specs: Specs | None = None, platform: str = "cpu"
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of a config: what its name stands for, decay of matrices, and the learning rate.

    `dims` names each parameter's dimensions, and `specs` says how gradients and moments are sharded over devices (None:
    they are not). The update also takes `is_good`, which is false for a bad step: moments then stay unchanged. Score
    biases are not optimized here and have no moments.
    """
    settings, is_bias = config.optimizer, score_biases(dims)
    known = known_parameters(dims, specs)
    learned = jax.tree.map(lambda parameter, bias: optax.MaskedNode() if bias else parameter, known, is_bias)

    def moments_of(some: Tree) -> optax.GradientTransformationExtraArgs:
        rule = scale_of(settings)(settings, some, platform)
        return in_bfloat16(rule, some, updates_done) if settings.moments_dtype == "bfloat16" else rule

    rule = optax.chain(
        array_by_array(moments_of, learned, platform) if settings.offload_moments else moments_of(learned),
        with_decay(*group_factors(settings, learned)),
        optax.scale_by_learning_rate(learning_rate(config)),
    )
    is_learned = jax.tree.map(lambda bias: not bias, is_bias)
    return rule if all(jax.tree.leaves(is_learned)) else optax.masked(rule, is_learned)


def known_parameters(dims: ParamDims, specs: Specs | None = None) -> Tree:
    """Return a `Parameter` for each array."""

    def known(path: tuple[Any, ...], own: Dims, spec: PartitionSpec) -> Parameter:
        return Parameter(own, spec, is_gate=len(path) > 1 and path[-2] == jax.tree_util.DictKey("moe"))

    if specs is None:
        specs = map_dims(lambda _: REPLICATED, dims)
    return jax.tree.map_with_path(known, dims, specs, is_leaf=lambda leaf: isinstance(leaf, tuple))


def with_counts_unless_bad(is_good: jax.Array, new: optax.OptState, old: optax.OptState) -> optax.OptState:
    """Return the new optimizer state with the step counts of the old one if the step is bad; moments are already
    selected.
    """
    return jax.tree.map(lambda n, o: n if n.ndim else jax.numpy.where(is_good, n, o), new, old)


def state_partitions(optimizer: optax.GradientTransformation, params: Params, specs: Specs) -> Tree:
    """Return the PartitionSpecs of the optimizer state: moments are sharded like their parameters, and replicated in
    dimensions that they do not have; counters are replicated.
    """
    of_path = {
        path: (leaf.shape, spec)
        for (path, leaf), spec in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(specs), strict=True)
    }

    def of_array(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> PartitionSpec:
        found = of_parameter(path, of_path)
        if found is None:
            return REPLICATED
        shape, spec = found
        return PartitionSpec(
            *(None if own != whole else axes for own, whole, axes in zip(x.shape, shape, spec, strict=True))
        )

    partitions: Tree = jax.tree.map_with_path(of_array, jax.eval_shape(optimizer.init, params))
    return partitions


def state_shard_specs(config: Config, mesh: Mesh) -> ShardSpecs:
    """Return how each parameter's moments, and the gradient they are computed from, are sharded over devices
    by ZeRO.
    """
    dims = param_dims(config.model)
    specs = partitions(dims, expert_axis(config.mesh))
    if not config.optimizer.zero:
        whole: ShardSpecs = unsharded_specs(specs)
        return whole
    shard_specs = shard_specs_of(param_shapes(config.model), specs, mesh.shape, config.optimizer.sharding_axes)
    moved: ShardSpecs = jax.tree.map(
        lambda spec, is_bias: ShardSpec() if is_bias else spec, shard_specs, score_biases(dims)
    )
    return moved


def updates_done(state: optax.OptState) -> jax.Array:
    """Return the number of updates in an optimizer state: all steps but the bad ones."""
    count: jax.Array = optax.tree_utils.tree_get_all_with_path(state, "count")[0][1]
    return count


def clip_factor(norm: jax.Array, clip_norm: float | None) -> jax.Array:
    """Return the factor that limits the global norm of the gradients to `clip_norm`."""
    if clip_norm is None:
        return jax.numpy.ones_like(norm)
    return jax.numpy.minimum(1.0, clip_norm / jax.numpy.maximum(norm, 1e-30))
