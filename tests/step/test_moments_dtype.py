"""Moments in bfloat16: rounded numbers have the right mean, and replicas of a shard are rounded alike."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from moe_jax.config import OptimizerConfig
from moe_jax.parallel.mesh import Axis
from moe_jax.step.optimizer import in_bfloat16, rounded_at_random, updates_done
from moe_jax.step.optimizers import OPTIMIZERS
from moe_jax.step.optimizers.protocol import Parameter
from tests.small import small_config
from tests.step.gradients import mesh_of


def test_numbers_are_rounded_to_a_neighbour_and_not_at_all_where_they_can_stay() -> None:
    normal = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    x = np.concatenate([normal, 1e-30 * normal, 1e30 * normal]).astype(np.float32)
    found = np.asarray(rounded_at_random(jnp.asarray(x), jnp.uint32(3))).astype(np.float32)
    assert (np.abs(found - x) < np.abs(x) * 2**-7).all()
    assert 0.4 < (np.abs(found) > np.abs(x)).mean() < 0.6
    kept = np.concatenate([found, np.float32([0, -0.0, np.inf, -np.inf, np.nan])])
    again = np.asarray(rounded_at_random(jnp.asarray(kept), jnp.uint32(4))).astype(np.float32)
    np.testing.assert_array_equal(again, kept)


def test_a_mean_follows_gradients_that_rounding_to_the_nearest_loses() -> None:
    """The mean of 1 and 1.1 with weights 0.99 and 0.01 rounds to 1 in every step."""

    def after(steps: int, rounded: bool) -> float:
        def step(number: jax.Array, mean: jax.Array) -> jax.Array:
            new = 0.99 * mean.astype(jnp.float32) + 0.01 * 1.1
            return rounded_at_random(new, number.astype(jnp.uint32)) if rounded else new.astype(jnp.bfloat16)

        return float(jax.lax.fori_loop(0, steps, step, jnp.ones(4096, jnp.bfloat16)).astype(jnp.float32).mean())

    assert after(100, rounded=False) == 1
    assert abs(after(100, rounded=True) - (1.1 - 0.1 * 0.99**100)) < 1e-3


def test_replicas_are_rounded_alike_and_shards_apart() -> None:
    mesh = mesh_of(small_config(2, 1, tensor=2))
    spec = PartitionSpec(None, Axis.TENSOR)
    known = {"up": Parameter(("model", "hidden"), spec)}
    rule = in_bfloat16(OPTIMIZERS["adamw"](OptimizerConfig(), known, "cpu"), known, updates_done)
    row = np.random.default_rng(0).standard_normal((1, 32), np.float32)
    grads = {"up": np.tile(row, (8, 2))}  # both tensor ranks have the same numbers, and so do all rows

    def moment(grads: dict[str, jax.Array]) -> jax.Array:
        state = rule.init(grads)
        for _ in range(2):
            _, state = rule.update(grads, state, grads, is_good=jnp.bool_(True))
        return state.mu["up"]

    on_mesh = jax.shard_map(moment, mesh=mesh, in_specs=({"up": spec},), out_specs=spec, check_vma=False)
    found = jax.jit(on_mesh)(grads)
    assert found.dtype == jnp.bfloat16
    of_rank: dict[str, list[np.ndarray]] = {}
    for shard in found.addressable_shards:
        of_rank.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    for first, second in of_rank.values():
        np.testing.assert_array_equal(first, second)
    (one, _), (other, _) = of_rank.values()
    assert (one != other).any()
    assert (one != one[:1]).any(), "rows are rounded apart"
    np.testing.assert_allclose(one.astype(np.float32), np.tile(0.19 * row, (8, 1)), rtol=0.02)
