"""How to train a model on a cluster: the mesh, what is recomputed, the schedule and the exchange, by simulated steps.

First every mesh with one good guess of a schedule, and with each way to recompute in the fewest parts of a batch that
fit into memory. Then the best few of these with every policy and degree, sizes of chunks, and forms over tensor ranks.
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
from moe_jax.plan.infeasible import nothing, too_large
from moe_jax.plan.search import Candidate, PlanSearch, best_of, step_s

_REFINED = 4  # meshes
_REFINED_STAGED = 4  # with pipeline stages, which gain more from it


class PlanError(UserError):
    """A model that no way is known to train on a cluster."""


@dataclass(frozen=True, kw_only=True)
class Plans:
    """What was found: the fastest way on each mesh, the best first, and meshes without one."""

    cluster: Cluster
    ranked: tuple[Candidate, ...]
    refused: tuple[Refused, ...]

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    @property
    def config(self) -> Config:
        """The best plan: an exchange by way of nodes is written down, others are left to the program."""
        config, algorithm = self.best.config, self.best.estimate.algorithm
        if algorithm == "flat" or config.exchange.algorithm != OPEN_EXCHANGE:
            return config
        exchange: dict[str, Any] = {"algorithm": algorithm}
        return dataclasses.replace(config, exchange=dataclasses.replace(config.exchange, **exchange))


def plan(draft: Draft, cluster: Cluster, memory_factor: float = 1.0) -> Plans:
    """Choose what is open for the fastest step. Raises PlanError if there is none, ConfigError for impossible numbers.

    `memory_factor` is what a compiler takes over what `plan/memory.py` says.
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
        found = search.elsewhere(large)
    if not found:
        raise PlanError(nothing(search, refused))
    found.sort(key=step_s)
    staged = [each for each in found if each.config.mesh.pipeline > 1]
    promising = {each.mesh for each in (*found[:_REFINED], *staged[:_REFINED_STAGED])}
    refined = [search.refined(each) if each.mesh in promising else each for each in found]
    return Plans(cluster=cluster, ranked=tuple(sorted(refined, key=step_s)), refused=tuple(refused))
