"""AdamW with warm-up, decay and a mask that spares vectors."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh

from moe_jax.config import Config
from moe_jax.models.parameters import param_dims, param_shapes
from moe_jax.parallel.mesh import expert_axis
from moe_jax.parallel.sharding import REPLICATED, Dims, map_dims, partitions
from moe_jax.parallel.zero import Cut, cuts_of, no_cuts
from moe_jax.train.balance import score_biases


def learning_rate(config: Config) -> optax.Schedule:
    """Step (0 is the first) → learning rate: linear warm-up, then the configured decay down to the last step."""
    settings, steps = config.optimizer, config.train.steps
    peak, end = settings.learning_rate, settings.learning_rate * settings.final_fraction
    decay_steps = max(1, steps - settings.warmup_steps)
    decay = {
        "cosine": optax.cosine_decay_schedule(peak, decay_steps, alpha=settings.final_fraction),
        "linear": optax.linear_schedule(peak, end, decay_steps),
        "constant": optax.constant_schedule(peak),
    }[settings.schedule]
    # the first step already learns: warm-up starts one step above 0
    warmup = optax.linear_schedule(peak / (settings.warmup_steps + 1), peak, settings.warmup_steps)
    return optax.join_schedules([warmup, decay], [settings.warmup_steps])


def make_optimizer(config: Config, dims: Any) -> optax.GradientTransformation:
    """AdamW. `dims` names each parameter's dimensions: matrices decay, stacks of vectors do not.

    Score biases are none of its business: they have no moments.
    """
    settings = config.optimizer
    is_matrix = map_dims(_is_matrix, dims)
    adamw = optax.adamw(
        learning_rate(config),
        b1=settings.beta1,
        b2=settings.beta2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        mask=is_matrix,
    )
    learned = jax.tree.map(lambda is_bias: not is_bias, score_biases(dims))
    return adamw if all(jax.tree.leaves(learned)) else optax.masked(adamw, learned)


def _is_matrix(dims: Dims) -> bool:
    """Whether an array leads from one space to another; heads with their width are one, layers and experts none."""
    return len({"head" if "heads" in name else name for name in dims} - {"layers", "experts"}) > 1


def state_partitions(optimizer: optax.GradientTransformation, params: Any, specs: Any) -> Any:
    """PartitionSpecs of the optimiser state: moments like their parameters, counters everywhere."""
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
    """Whether a parameter has none."""
    return isinstance(moment, optax.MaskedNode)


def state_cuts(config: Config, mesh: Mesh) -> Any:
    """How each parameter's moments, and the gradient that they are made of, are cut over devices."""
    dims = param_dims(config.model)
    specs = partitions(dims, expert_axis(config.mesh))
    if not config.optimizer.zero:
        return no_cuts(specs)
    cuts = cuts_of(param_shapes(config.model), specs, mesh.shape)
    return jax.tree.map(lambda cut, is_bias: Cut() if is_bias else cut, cuts, score_biases(dims))


def clip_factor(norm: jax.Array, clip_norm: float | None) -> jax.Array:
    """What to multiply gradients with so that their global norm is at most `clip_norm`."""
    if clip_norm is None:
        return jax.numpy.ones_like(norm)
    return jax.numpy.minimum(1.0, clip_norm / jax.numpy.maximum(norm, 1e-30))
