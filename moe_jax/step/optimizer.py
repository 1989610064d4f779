"""AdamW with warm-up and decay of the learning rate, and no weight decay for vectors."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh

from moe_jax.config import Config
from moe_jax.models.parameters import param_dims, param_shapes
from moe_jax.parallel.mesh import expert_axis
from moe_jax.parallel.sharding import REPLICATED, Dims, map_dims, partitions
from moe_jax.parallel.trees import Cuts, ParamDims, Params, Specs, Tree
from moe_jax.parallel.zero import ShardSpec, cuts_of, no_cuts
from moe_jax.step.router_bias import score_biases


def learning_rate(config: Config) -> optax.Schedule:
    """Return the schedule from step (0 is the first) to learning rate: linear warm-up, then the configured decay.

    With W = `warmup_steps`, step 0 has 1/(W + 1) of the peak, step W has the peak, and the last step of `train.steps`
    has `final_fraction` of it (or the peak, if no step follows W). Later steps keep the last value.
    """
    settings, steps = config.optimizer, config.train.steps
    peak, end = settings.learning_rate, settings.learning_rate * settings.final_fraction
    decay_steps = max(1, steps - 1 - settings.warmup_steps)
    decay = {
        "cosine": optax.cosine_decay_schedule(peak, decay_steps, alpha=settings.final_fraction),
        "linear": optax.linear_schedule(peak, end, decay_steps),
        "constant": optax.constant_schedule(peak),
    }[settings.schedule]
    # a warm-up from 0 would waste the first step
    warmup = optax.linear_schedule(peak / (settings.warmup_steps + 1), peak, settings.warmup_steps)
    return optax.join_schedules([warmup, decay], [settings.warmup_steps])


def make_optimizer(config: Config, dims: ParamDims) -> optax.GradientTransformationExtraArgs:
    """Return AdamW, equivalent to `optax.adamw`. `dims` names each parameter's dimensions: matrices decay, stacks of
    vectors do not.

    Its update also takes `is_good`, which is false for a bad step: moments then stay unchanged. Score biases are not
    optimized here and have no moments.
    """
    settings = config.optimizer
    is_matrix = map_dims(_is_matrix, dims)
    adamw = optax.chain(
        _scale_by_adam(settings.beta1, settings.beta2, settings.eps),
        optax.add_decayed_weights(settings.weight_decay, is_matrix),
        optax.scale_by_learning_rate(learning_rate(config)),
    )
    learned = jax.tree.map(lambda is_bias: not is_bias, score_biases(dims))
    return adamw if all(jax.tree.leaves(learned)) else optax.masked(adamw, learned)


def _scale_by_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam`, except that moments do not change in a bad step.

    If the moments were selected after the whole update, XLA would copy all of them: the selection would read the old
    moments after they are overwritten.
    """
    adam = optax.scale_by_adam(b1, b2, eps)

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None, *, is_good: jax.Array, **_: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        moved = adam.update(grads, state, params)[1]
        mu, nu = unless_bad(is_good, (moved.mu, moved.nu), (state.mu, state.nu))
        mean = optax.tree_utils.tree_bias_correction(mu, b1, moved.count)
        square = optax.tree_utils.tree_bias_correction(nu, b2, moved.count)
        updates = jax.tree.map(lambda m, v: m / (jax.numpy.sqrt(v) + eps), mean, square)
        return updates, moved._replace(mu=mu, nu=nu)

    return optax.GradientTransformationExtraArgs(adam.init, update)


def unless_bad(is_good: jax.Array, new: Tree, old: Tree) -> Tree:
    """Return the new tree, or the old one, bit for bit, if the step is bad."""
    return jax.tree.map(lambda n, o: jax.numpy.where(is_good, n, o), new, old)


def with_counts_unless_bad(is_good: jax.Array, new: optax.OptState, old: optax.OptState) -> optax.OptState:
    """Return the new optimizer state with the step counts of the old one if the step is bad; moments are already
    selected.
    """
    return jax.tree.map(lambda n, o: n if n.ndim else jax.numpy.where(is_good, n, o), new, old)


def _is_matrix(dims: Dims) -> bool:
    """Whether an array maps one space to another. Heads and their width count as one dimension; layers and experts do
    not count.
    """
    return len({"head" if "heads" in name else name for name in dims} - {"layers", "experts"}) > 1


def state_partitions(optimizer: optax.GradientTransformation, params: Params, specs: Specs) -> Tree:
    """Return the PartitionSpecs of the optimizer state: moments are sharded like their parameters, counters are
    replicated.
    """
    state = jax.eval_shape(optimizer.init, params)
    return optax.tree_utils.tree_map_params(
        optimizer,
        lambda moment, spec: moment if _is_missing(moment) else spec,
        state,
        specs,
        transform_non_params=lambda _: REPLICATED,
        is_leaf=_is_missing,
    )


def _is_missing(moment: Any) -> bool:
    """Whether a parameter has no moment."""
    return isinstance(moment, optax.MaskedNode)


def state_cuts(config: Config, mesh: Mesh) -> Cuts:
    """Return how each parameter's moments, and the gradient they are computed from, are sharded over devices
    by ZeRO.
    """
    dims = param_dims(config.model)
    specs = partitions(dims, expert_axis(config.mesh))
    if not config.optimizer.zero:
        whole: Cuts = no_cuts(specs)
        return whole
    cuts = cuts_of(param_shapes(config.model), specs, mesh.shape)
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
