"""AdamW (Loshchilov and Hutter 2019): a mean of gradients over the root of a mean of their squares."""

from typing import Any

import jax
import optax

from moe_jax.config import OptimizerConfig
from moe_jax.config.facts import OptimizerFacts
from moe_jax.parallel.trees import Tree
from moe_jax.step.optimizers.protocol import unless_bad

FACTS = OptimizerFacts(listed=0, settings=("beta1", "beta2", "eps", "moments_dtype"))


def scale(optimizer: OptimizerConfig, parameters: Tree, platform: str) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam`, except that moments do not change in a bad step.

    If the moments were selected after the whole update, XLA would copy all of them: the selection would read the old
    moments after they are overwritten.
    """
    b1, b2, eps = optimizer.beta1, optimizer.beta2, optimizer.eps
    adam = optax.scale_by_adam(b1, b2, eps)

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None, *, is_good: jax.Array, **_: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        moved = adam.update(grads, state, params)[1]
        mu, nu = unless_bad(is_good, (moved.mu, moved.nu), (state.mu, state.nu))
        # bias corrections, as factors: XLA rewrites a division of a division in one program and not in another
        of_mean, of_square = 1 / (1 - b1**moved.count), 1 / (1 - b2**moved.count)
        updates = jax.tree.map(lambda m, v: of_mean * m / (jax.numpy.sqrt(of_square * v) + eps), mu, nu)
        return updates, moved._replace(mu=mu, nu=nu)

    return optax.GradientTransformationExtraArgs(adam.init, update)
