"""Choose how to train a model on a cluster: the mesh, rematerialisation, schedule and exchange, by simulated steps.

First every mesh is tried with one good guess of a schedule, and with each way to save memory in the fewest parts of a
batch that fit into memory. Meshes that a lower bound of the step shows to be slower than the best ones are not
simulated. Then the best few meshes are tried with every policy and degree, bucket sizes, and forms over tensor ranks.
"""

import contextlib
import dataclasses
import gc
import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moe_jax.config import Config
from moe_jax.config.draft import Draft
from moe_jax.config.registry import EXCHANGE_FACTS, OPEN_EXCHANGE
from moe_jax.config.validate import check_ranges
from moe_jax.errors import ConfigError, UserError
from moe_jax.plan.candidates import Refused, on_meshes
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.fitting import remats
from moe_jax.plan.infeasible import no_plan_message, too_large
from moe_jax.plan.rates import with_rates
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
        if not EXCHANGE_FACTS.of(algorithm).by_node or config.exchange.algorithm != OPEN_EXCHANGE:
            return config
        exchange: dict[str, Any] = {"algorithm": algorithm}
        return dataclasses.replace(config, exchange=dataclasses.replace(config.exchange, **exchange))


def plan(draft: Draft, cluster: Cluster, memory_factor: float = 1.0) -> Plans:
    """Choose the open settings for the fastest step. Raises PlanError if nothing fits, ConfigError for invalid numbers.

    `memory_factor` is the ratio of the memory that a compiler takes to the estimate of `plan/memory.py`.
    """
    check_ranges(draft)
    if draft.optimizer.zero_axes is not None and "optimizer.zero" in draft.open:
        where = " on the command line" if draft.rest_open else ""  # which overrides the file
        raise ConfigError(
            f"optimizer.zero_axes=[{', '.join(draft.optimizer.zero_axes)}] leaves a plan no choice of optimizer.zero: "
            f"set optimizer.zero=1, 2 or 3{where}, or optimizer.zero_axes=null"
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

    Meshes are tried in the order of their lower bounds: at first of what any config takes, then of the best that fits
    without recomputing, or of any that recomputes, and so on. Meshes with stages count only if some config of theirs
    may be faster than the fastest one that is known.
    """
    found: dict[int, Candidate] = {}
    limits = _Limits.of(())
    # the bound, the mesh, what is recomputed as an index in `remats`, and the configs that fit, once they are known
    queue: list[tuple[float, int, int, MeshConfigs | None]] = [
        (search.least_s(base, remats(base)[0]), number, 0, None) for number, base in enumerate(bases)
    ]
    heapq.heapify(queue)
    while queue:
        least_s, number, remat, configs = heapq.heappop(queue)
        base, known = bases[number], found.get(number)
        has_stages = base.mesh.pipeline > 1
        limit_s = max(limits.ranked_s, limits.staged_s) if has_stages else limits.ranked_s
        limit_s = min(limit_s, step_s(known)) if known else limit_s
        is_first = configs is None and remat == 0
        if least_s > limit_s or (has_stages and is_first and least_s > limits.best_s):
            continue
        if configs is None:
            configs = search.mesh_configs(base, remats(base)[remat])
            heapq.heappush(queue, (configs.least_s, number, remat, configs))
            if not configs.complete and remat + 1 < len(remats(base)):
                more = remats(base)[remat + 1]
                heapq.heappush(queue, (search.least_s(base, more), number, remat + 1, None))
        elif (best := search.best_of(configs, limit_s)) and (known is None or step_s(best) < step_s(known)):
            found[number] = best
            limits = _Limits.of(found.values())
    return [found[number] for number in sorted(found)]


class _Limits(NamedTuple):
    """Steps of the meshes that are known: of the best, and of the last ones that are ranked, or refined for stages."""

    best_s: float
    ranked_s: float
    staged_s: float

    @staticmethod
    def of(found: Collection[Candidate]) -> "_Limits":
        """The limits of these meshes; inf as long as there are too few."""
        steps_s = sorted(map(step_s, found))
        staged_s = sorted(step_s(each) for each in found if each.config.mesh.pipeline > 1)
        return _Limits(_nth(steps_s, 1), _nth(steps_s, _RANKED), _nth(staged_s, _REFINED_STAGED))


def _nth(ascending: Sequence[float], count: int) -> float:
    return ascending[count - 1] if len(ascending) >= count else math.inf
