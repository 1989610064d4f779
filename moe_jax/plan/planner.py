"""Choose how to train a model on a cluster: the mesh, rematerialisation, schedule and exchange, by simulated steps.

First every mesh is tried with one good guess of a schedule, and with each way to save memory in the fewest parts of a
batch that fit into memory. Then the best few meshes are tried with every policy and degree, bucket sizes, and forms
over tensor ranks.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from moe_jax.config import Config
from moe_jax.config.draft import Draft
from moe_jax.config.registry import OPEN_EXCHANGE
from moe_jax.config.validate import check_ranges
from moe_jax.errors import UserError
from moe_jax.plan.candidates import Refused, on_meshes, with_rates
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.infeasible import no_plan_message, too_large
from moe_jax.plan.search import Candidate, PlanSearch, best_of, step_s

_REFINED = 4  # meshes
_REFINED_STAGED = 4  # meshes with pipeline stages, which gain more from it


class PlanError(UserError):
    """No feasible plan was found for a model on a cluster."""


@dataclass(frozen=True, kw_only=True)
class Plans:
    """The fastest candidate on each mesh, the best first, and the meshes without one."""

    cluster: Cluster
    ranked: tuple[Candidate, ...]
    refused: tuple[Refused, ...]

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    @property
    def config(self) -> Config:
        """The config of the best plan.

        It names the algorithm of a hierarchical exchange. Others are left open for the program to choose.
        """
        config, algorithm = self.best.config, self.best.estimate.algorithm
        if algorithm == "flat" or config.exchange.algorithm != OPEN_EXCHANGE:
            return config
        exchange: dict[str, Any] = {"algorithm": algorithm}
        return dataclasses.replace(config, exchange=dataclasses.replace(config.exchange, **exchange))


def plan(draft: Draft, cluster: Cluster, memory_factor: float = 1.0) -> Plans:
    """Choose the open settings for the fastest step. Raises PlanError if nothing fits, ConfigError for invalid numbers.

    `memory_factor` is the ratio of the memory that a compiler takes to the estimate of `plan/memory.py`.
    """
    check_ranges(draft)
    free = {f"mesh.{name}" for name, size in draft.mesh.sizes.items() if size == -1}
    schedule = with_rates(draft.schedule, cluster)
    search = PlanSearch(dataclasses.replace(draft, schedule=schedule, open=draft.open | free), cluster, memory_factor)
    found: list[Candidate] = []
    refused: list[Refused] = []
    large: list[Config] = []
    for each in on_meshes(search.draft, cluster):
        if isinstance(each, Refused):
            refused.append(each)
        elif misfit := too_large(search, each):
            refused.append(misfit)
            large.append(each)
        else:
            found.append(best_of(search.fitting(each)))
    if not found:
        found = search.with_other_placements(large)
    if not found:
        raise PlanError(no_plan_message(search, refused))
    found.sort(key=step_s)
    staged = [each for each in found if each.config.mesh.pipeline > 1]
    promising = {each.mesh for each in (*found[:_REFINED], *staged[:_REFINED_STAGED])}
    refined = [search.refined(each) if each.mesh in promising else each for each in found]
    return Plans(cluster=cluster, ranked=tuple(sorted(refined, key=step_s)), refused=tuple(refused))
