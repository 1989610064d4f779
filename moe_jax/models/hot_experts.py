"""Copies of the most loaded experts on all expert ranks, chosen in each step by its own load (`exchange.hot_experts`).

Each rank computes its own tokens of a copied expert, so that they are neither sent nor wait for the expert's owner.
Every row is multiplied by the same numbers as without copies. FasterMoE (He et al. 2022) calls this shadowing.

P expert ranks with L positions each, S = P · L positions of experts, at most K copies; T tokens of this device.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moe_jax.config import MoEConfig
from moe_jax.models.dispatchers.hot import HotRows, joined
from moe_jax.models.dispatchers.protocol import ExpertRows
from moe_jax.models.grouped_products import GroupedProduct
from moe_jax.models.moe import run_experts
from moe_jax.parallel.expert_copies import copied_experts
from moe_jax.parallel.mesh import Axes
from moe_jax.parallel.tensor_dispatch import DispatchRoute
from moe_jax.parallel.trees import Params

CHOICE = "hot_experts"  # name of the positions of copied experts, which rematerialization saves


@jax.named_scope("choose_hot_experts")
def hottest(count_S: Int[Array, " S"], most: int, axis: Axes) -> Int[Array, " K"]:
    """Return the positions of at most `most` experts to copy, from this device's pairs for each; S: not used.

    All ranks get the counts of all, and so make the same choice. `schedule.remat` does not repeat it.
    """
    return checkpoint_name(choose(jax.lax.all_gather(count_S, axis), most), CHOICE)


def choose(count_PS: Int[Array, "P S"], most: int) -> Int[Array, " K"]:
    """Return the positions of at most `most` experts, given how many rows each rank has for each; S: not used.

    Greedy: each copy is the one that makes the ranks' loads most even, by the sum of their squares. Copying an expert
    moves each rank's rows for it from its owner to that rank. None is copied that would make loads less even.
    """
    ranks, slots = count_PS.shape
    is_owner_PS = jnp.arange(ranks)[:, None] == jnp.arange(slots) // (slots // ranks)
    total_S = count_PS.sum(axis=0)
    load_P = jnp.where(is_owner_PS, total_S, 0).sum(axis=1)
    mean = jnp.maximum(load_P.sum() / ranks, 1)  # of which squares are in float32's range
    change_PS = count_PS - jnp.where(is_owner_PS, total_S, 0)

    def squares(load: Int[Array, "P _"]) -> Float[Array, " _"]:
        return jnp.square(load / mean).sum(axis=0)

    chosen = []
    for _ in range(most):
        after_S = squares(load_P[:, None] + change_PS)
        best = jnp.argmin(after_S)
        helps = after_S[best] < squares(load_P[:, None])[0]
        chosen.append(jnp.where(helps, best, slots))
        load_P = load_P + jnp.where(helps, change_PS[:, best], 0)
        change_PS = change_PS.at[:, best].set(0)
    return jnp.stack(chosen).astype(jnp.int32)


def with_hot_rows(
    returned: Float[Array, "P ... D"],  # as dispatched; with copies [P, W, D]
    params: Params,
    hot: HotRows | None,
    moe: MoEConfig,
    route: DispatchRoute,
    product: GroupedProduct,
    dtype: str,
) -> jax.Array:
    """Return the experts' outputs for all rows, in the order of their metadata: those `returned`, then of copies.

    `params` are this rank's experts.
    """
    if hot is None:
        return returned
    at_once = returned.shape[1] * (1 if route.goes_by_hops else len(returned))
    run = run_copies(moe, product, at_once, len(jax.tree.leaves(params)[0]))
    copies = copied_experts(params, hot.position_K, route.ranks.axis, dtype)
    return joined(returned, run(copies, hot.rows))


def run_copies(
    moe: MoEConfig, product: GroupedProduct, at_once: int, local_experts: int
) -> Callable[[Params, ExpertRows], Float[Array, "1 H D"]]:
    """Return the function of copies: weights [K, …], their rows → outputs.

    Rows are multiplied in tiles like those of `at_once` rows of this rank's experts, which makes their results those
    of the owner.
    """
    tile = product.tile(at_once, local_experts)
    return partial(run_experts, moe=moe, product=product._replace(min_tile=tile, max_tile=tile), are_whole=True)
