"""Lion (Chen et al. 2023): the sign of a mean of gradients."""

from typing import Any

import jax
import optax

from moe_jax.config import OptimizerConfig
from moe_jax.config.facts import OptimizerFacts
from moe_jax.parallel.trees import Tree
from moe_jax.step.optimizers.protocol import unless_bad

FACTS = OptimizerFacts(listed=2, settings=("beta1", "beta2", "moments_dtype"), moments=1)


def scale(optimizer: OptimizerConfig, parameters: Tree, platform: str) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_lion`, except that moments do not change in a bad step."""
    lion = optax.scale_by_lion(optimizer.beta1, optimizer.beta2)

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None, *, is_good: jax.Array, **_: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, moved = lion.update(grads, state, params)
        return updates, moved._replace(mu=unless_bad(is_good, moved.mu, state.mu))

    return optax.GradientTransformationExtraArgs(lion.init, update)
