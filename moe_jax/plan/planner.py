"""Choose how to train a model on a cluster: the mesh, rematerialisation, schedule and exchange, by simulated steps.

First every mesh is tried with one good guess of a schedule, and with each way to save memory in the fewest parts of a
batch that fit into memory. Meshes that a lower bound of the step shows to be slower than the best ones are not
simulated. Then the best few meshes are tried with every policy and degree, bucket sizes, and forms over tensor ranks.
"""

import bisect
import contextlib
import dataclasses
import gc
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moe_jax.config import Config
from moe_jax.config.draft import Draft
from moe_jax.config.registry import OPEN_EXCHANGE
from moe_jax.config.validate import check_ranges
from moe_jax.errors import ConfigError, UserError
from moe_jax.plan.candidates import Refused, on_meshes, with_rates
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.infeasible import no_plan_message, too_large
from moe_jax.plan.search import Candidate, MeshConfigs, PlanSearch, step_s
from moe_jax.plan.speeds_text import with_rank_speeds

_RANKED = 8  # meshes that are simulated at least
_REFINED = 4  # meshes
_REFINED_STAGED = 4  # meshes with pipeline stages, which gain more from it
_OBJECTS_BETWEEN_COLLECTIONS = 200_000


class PlanError(UserError):
    """No feasible plan was found for a model on a cluster."""


@dataclass(frozen=True, kw_only=True)
class Plans:
    """The fastest candidate on each of the best meshes, the best first; and the meshes without one."""

    cluster: Cluster
    ranked: tuple[Candidate, ...]
    refused: tuple[Refused, ...]
    slower: int = 0  # further meshes, which are slower than the first ones of `ranked` and were not simulated

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    @property
    def config(self) -> Config:
        """The config of the best plan.

        It names the algorithm of a hierarchical exchange. Others are left open for the program to choose. If experts
        migrate, it has the speeds of the cluster's devices.
        """
        config, algorithm = with_rank_speeds(self.best.config, self.cluster), self.best.estimate.algorithm
        if algorithm == "flat" or config.exchange.algorithm != OPEN_EXCHANGE:
            return config
        exchange: dict[str, Any] = {"algorithm": algorithm}
        return dataclasses.replace(config, exchange=dataclasses.replace(config.exchange, **exchange))


def plan(draft: Draft, cluster: Cluster, memory_factor: float = 1.0) -> Plans:
    """Choose the open settings for the fastest step. Raises PlanError if nothing fits, ConfigError for invalid numbers.

    `memory_factor` is the ratio of the memory that a compiler takes to the estimate of `plan/memory.py`.
    """
    check_ranges(draft)
    if draft.optimizer.zero_axes is not None and "optimizer.zero" in draft.open:
        raise ConfigError(
            f"optimizer.zero_axes=[{', '.join(draft.optimizer.zero_axes)}] leaves a plan no choice of optimizer.zero: "
            "set optimizer.zero=1, 2 or 3, or optimizer.zero_axes=null"
        )
    with _rare_collections():
        return _plan(draft, cluster, memory_factor)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Run the garbage collector rarely: a search keeps nearly all its objects, and each collection visits them all."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _plan(draft: Draft, cluster: Cluster, memory_factor: float) -> Plans:
    free = {f"mesh.{name}" for name, size in draft.mesh.sizes.items() if size == -1}
    schedule = with_rates(draft.schedule, cluster)
    search = PlanSearch(dataclasses.replace(draft, schedule=schedule, open=draft.open | free), cluster, memory_factor)
    possible: list[Config] = []
    refused: list[Refused] = []
    large: list[Config] = []
    for each in on_meshes(search.draft, cluster):
        if isinstance(each, Refused):
            refused.append(each)
        elif infeasible := too_large(search, each):
            refused.append(infeasible)
            large.append(each)
        else:
            possible.append(each)
    found = _fastest(search, possible) or search.with_other_placements(large)
    slower = max(len(possible) - len(found), 0)
    if not found:
        raise PlanError(no_plan_message(search, refused))
    found.sort(key=step_s)
    staged = [each for each in found if each.config.mesh.pipeline > 1]
    promising = {each.mesh for each in (*found[:_REFINED], *staged[:_REFINED_STAGED])}
    refined = [search.refined(each) if each.mesh in promising else each for each in found]
    return Plans(cluster=cluster, ranked=tuple(sorted(refined, key=step_s)), refused=tuple(refused), slower=slower)


def _fastest(search: PlanSearch, bases: Sequence[Config]) -> list[Candidate]:
    """The best candidates of the fastest meshes, and of the fastest with stages, in the order of the meshes.

    Meshes are tried in the order of their lower bounds: at first of what any config takes, then of the best that fits.
    Meshes with stages count only if some config of theirs may be faster than the fastest one that is known.
    """
    found: dict[int, Candidate] = {}
    steps_s: list[float] = []
    staged_s: list[float] = []
    queue: list[tuple[float, int, MeshConfigs | None]] = [
        (search.least_s(base), number, None) for number, base in enumerate(bases)
    ]
    heapq.heapify(queue)
    while queue:
        least_s, number, configs = heapq.heappop(queue)
        has_stages = bases[number].mesh.pipeline > 1
        limit_s = _nth(steps_s, _RANKED)
        if has_stages:
            limit_s = max(limit_s, _nth(staged_s, _REFINED_STAGED))
        if least_s > limit_s or (has_stages and configs is None and least_s > _nth(steps_s, 1)):
            continue
        if configs is None:
            configs = search.fitting(bases[number])
            heapq.heappush(queue, (configs.least_s, number, configs))
            continue
        if best := search.best_of(configs, limit_s):
            found[number] = best
            bisect.insort(steps_s, step_s(best))
            if has_stages:
                bisect.insort(staged_s, step_s(best))
    return [found[number] for number in sorted(found)]


def _nth(ascending: Sequence[float], count: int) -> float:
    return ascending[count - 1] if len(ascending) >= count else math.inf
