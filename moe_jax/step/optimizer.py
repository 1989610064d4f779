"""The optimizer of a config: updates by one of `optimizers/`, weight decay, and the learning rate of each step."""

import itertools
from typing import Any

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

from moe_jax.config import Config
from moe_jax.models.parameters import param_dims, param_shapes
from moe_jax.parallel.mesh import expert_axis
from moe_jax.parallel.sharding import REPLICATED, Dims, map_dims, partitions
from moe_jax.parallel.trees import Cuts, ParamDims, Params, Specs, Tree
from moe_jax.parallel.zero import ShardSpec, cuts_of, no_cuts
from moe_jax.step.moments_dtype import in_bfloat16
from moe_jax.step.optimizers import scale_of
from moe_jax.step.optimizers.protocol import Parameter
from moe_jax.step.parameter_groups import group_factors, with_decay
from moe_jax.step.router_bias import score_biases


def learning_rate(config: Config) -> optax.Schedule:
    """Return the schedule from step (0 is the first) to learning rate: linear warm-up, then the configured decay.

    With W = `warmup_steps`, step 0 has 1/(W + 1) of the peak, step W has the peak, and the last step of `train.steps`
    has `final_fraction` of it (or the peak, if no step follows W). Later steps keep the last value.
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
    known = _known(dims, specs)
    learned = jax.tree.map(lambda parameter, bias: optax.MaskedNode() if bias else parameter, known, is_bias)
    rule = optax.chain(
        scale_of(settings)(settings, learned, platform),
        with_decay(*group_factors(settings, learned)),
        optax.scale_by_learning_rate(learning_rate(config)),
    )
    if settings.moments_dtype == "bfloat16":
        rule = in_bfloat16(rule, learned, updates_done)
    is_learned = jax.tree.map(lambda bias: not bias, is_bias)
    return rule if all(jax.tree.leaves(is_learned)) else optax.masked(rule, is_learned)


def _known(dims: ParamDims, specs: Specs | None) -> Tree:
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
        found = next((of_path[path[first:]] for first in range(len(path)) if path[first:] in of_path), None)
        if found is None:
            return REPLICATED
        shape, spec = found
        return PartitionSpec(
            *(None if own != whole else axes for own, whole, axes in zip(x.shape, shape, spec, strict=True))
        )

    partitions: Tree = jax.tree.map_with_path(of_array, jax.eval_shape(optimizer.init, params))
    return partitions


def state_cuts(config: Config, mesh: Mesh) -> Cuts:
    """Return how each parameter's moments, and the gradient they are computed from, are sharded over devices
    by ZeRO.
    """
    dims = param_dims(config.model)
    specs = partitions(dims, expert_axis(config.mesh))
    if not config.optimizer.zero:
        whole: Cuts = no_cuts(specs)
        return whole
    cuts = cuts_of(param_shapes(config.model), specs, mesh.shape, config.optimizer.sharding_axes)
    moved: Cuts = jax.tree.map(lambda cut, is_bias: ShardSpec() if is_bias else cut, cuts, score_biases(dims))
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
