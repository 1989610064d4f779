"""The search on one mesh: of the configs that fit the fastest, then its schedule, bucket sizes and forms."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from moe_jax.config import Config
from moe_jax.config.draft import Draft
from moe_jax.plan.candidates import (
    CHUNKS_MB,
    CONTEXT_FORMS,
    HEAD_BLOCKS,
    Overrides,
    accumulations,
    choices,
    guesses,
    mesh_text,
    other_placements,
    pipelines,
    plain,
    policies,
    scheduled,
    schedules,
    stageless,
)
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.estimate import Estimate, estimate
from moe_jax.plan.fitting import ZEROS, Fitting, remats
from moe_jax.plan.forward import best_ranges
from moe_jax.plan.least_time import least_step_s, least_work_s
from moe_jax.plan.memory_parts import StepMemory
from moe_jax.plan.tensor_forms import tensor_forms

_PARTS = 4  # how many larger numbers of parts of the batch are tried with pipeline stages


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A config that fits into memory, with its estimated step."""

    estimate: Estimate
    memory: StepMemory
    saves_memory: bool  # whether it recomputes or splits the batch or state for lack of memory
    refined: bool = False  # whether all choices that its mesh allows were tried

    @property
    def config(self) -> Config:
        return self.estimate.config

    @property
    def mesh(self) -> str:
        return mesh_text(self.config.mesh.sizes, self.config.mesh.expert_axes)

    @property
    def bottleneck(self) -> str:
        """The bottleneck of the step time."""
        busy = self.estimate.busy
        where = "between nodes" if self.estimate.leaves_node else "inside nodes"
        found = {
            "idle stages": busy.idle,
            "compute": busy.compute,
            f"exchanges {where}": busy.exchange,
            "sums of gradients": busy.sums,
        }
        most = max(found, key=lambda name: found[name])
        return f"{most}, memory" if self.saves_memory else most


def step_s(candidate: Candidate) -> float:
    return candidate.estimate.step_s


@dataclass(frozen=True)
class MeshConfigs:
    """Configs of one mesh that fit into memory, with the least time of each one's step; they are not simulated."""

    configs: tuple[tuple[Config, float], ...]
    complete: bool  # whether the mesh has no others

    @property
    def least_s(self) -> float:
        """The least time of all of them; inf without any."""
        return min((least_s for _, least_s in self.configs), default=math.inf)


@dataclass(frozen=True)
class PlanSearch:
    """The open settings, the cluster, and the ratio of real to estimated memory."""

    draft: Draft
    cluster: Cluster
    memory_factor: float
    _candidates: dict[Config, Candidate] = field(default_factory=dict, init=False, compare=False)

    @functools.cached_property
    def fitting(self) -> Fitting:
        """Which configs fit into memory."""
        return Fitting(self.draft, self.cluster, self.memory_factor)

    def least_s(self, base: Config, remat: str) -> float:
        """Seconds that any config of a mesh that recomputes at least this takes at least, whatever fits."""
        possible = accumulations(base)
        # scheduled steps repeat no exchanges; "chunk" repeats what "full" does, and exchanges
        simplest = plain() if remat == "none" else scheduled(policies("batch")[0], 1)
        repeated = "full" if remat == "chunk" else remat
        saving: Overrides = {
            "schedule": {**simplest, "remat": repeated},
            "train": {"grad_accumulation": possible[0]},
        }
        config = next(choices(self.draft, base, [saving]), None)
        if config is None or config.schedule.remat != repeated:
            return 0.0
        return least_work_s(config, self.cluster, max(possible[-1], config.train.grad_accumulation))

    def mesh_configs(self, base: Config, remat: str) -> MeshConfigs:
        """Configs of a mesh that fit and recompute this, see `Fitting.on_mesh`."""
        found = dict.fromkeys(self.fitting.on_mesh(base, remat))
        complete = (base.mesh.pipeline > 1 and bool(found)) or not all(map(self.fitting.saves_memory, found))
        return MeshConfigs(tuple((each, least_step_s(each, self.cluster)) for each in found), complete)

    def best_of(self, found: MeshConfigs, limit_s: float = math.inf) -> Candidate | None:
        """The fastest config of a mesh, the first among equals. Configs that cannot be faster are not simulated.

        None if it takes longer than `limit_s` and is not known, because configs that take longer are not simulated.
        """
        best, others_s = self._fastest(found.configs, limit_s)
        return best if best and step_s(best) < others_s else None

    def _fastest(self, configs: Iterable[tuple[Config, float]], limit_s: float) -> tuple[Candidate | None, float]:
        """The fastest of these configs with lower bounds, the first among equals; and the lowest bound of the others.

        Those whose bound is above the limit, or above the time of the fastest, are not simulated.
        """
        best: tuple[float, int, Candidate] | None = None
        for number, (config, least_s) in sorted(enumerate(configs), key=lambda each: each[1][1]):
            if least_s > min(limit_s, best[0] if best else math.inf):
                return best and best[2], least_s
            candidate = self._candidate(config)
            if best is None or (step_s(candidate), number) < best[:2]:
                best = step_s(candidate), number, candidate
        return best and best[2], math.inf

    def with_other_placements(self, configs: Iterable[Config], limit_s: float = math.inf) -> list[Candidate]:
        """The best candidate of each config with each other placement of its experts, if it fits.

        Those that take longer than `limit_s` are not simulated.
        """
        others = (each for config in configs for each in other_placements(self.draft, config))
        found = (self._best_on(each, limit_s) for each in others if self.fitting.fits_at_all(each))
        return [each for each in found if each]

    def _best_on(self, base: Config, limit_s: float) -> Candidate | None:
        """The fastest candidate of a mesh, if it takes no longer than `limit_s`."""
        best = None
        for remat in remats(base):
            if self.least_s(base, remat) > limit_s:
                break
            found = self.mesh_configs(base, remat)
            if candidate := self.best_of(found, limit_s):
                best = min(filter(None, (best, candidate)), key=step_s)
                limit_s = min(limit_s, step_s(best))
            if found.complete:
                break
        return best

    def refined(self, candidate: Candidate) -> Candidate:
        """The best candidate on the same mesh.

        Choices are the placement of experts, then schedules, bucket sizes, and forms over tensor ranks.
        """
        others = self.with_other_placements([candidate.config], step_s(candidate))
        candidate = min([candidate, *others], key=step_s)
        # ranges of the forward pass may have more parts than powers of two
        ranges = (scheduled(found.policy, found.parts) for found in best_ranges(candidate.estimate).cut)
        best = self._best_of(self._best_pipeline(candidate), ({"schedule": each} for each in (*schedules(), *ranges)))
        if best.config.mesh.pipeline > 1:
            best = self._best_of(best, ({"schedule": order} for order in pipelines()))
            best = self._best_of(best, ({"schedule": {"head_blocks": count}} for count in HEAD_BLOCKS))
        if (saved := self._best_of(best, self._savings_near(best.config))) is not best:
            best = self._best_of(saved, ({"schedule": each} for each in schedules()))
        if best.config.schedule.grad_reduce == "bucketed":
            best = self._best_of(best, ({"schedule": {"bucket_cap_mb": chunk}} for chunk in CHUNKS_MB))
        if best.config.mesh.expert_tensor_ranks(best.config.mesh.sizes) > 1:
            best = self._best_of(best, ({"exchange": form} for form in tensor_forms(best.config, self.cluster)))
        if best.config.mesh.context > 1:
            best = self._best_of(best, ({"exchange": {"context_form": form}} for form in CONTEXT_FORMS))
        return replace(best, refined=True)

    def _savings_near(self, config: Config) -> Iterator[Overrides]:
        """Other ways to save memory, with the same number of parts of the batch, or the next smaller or larger one."""
        possible = accumulations(config)
        place = possible.index(config.train.grad_accumulation) if config.train.grad_accumulation in possible else 0
        for zero, remat, parts in itertools.product(ZEROS, remats(config), possible[max(place - 1, 0) : place + 2]):
            yield {
                "optimizer": {"zero": zero},
                "schedule": {"remat": remat},
                "train": {"grad_accumulation": parts},
            }

    def _best_pipeline(self, candidate: Candidate) -> Candidate:
        """The best pipeline schedule and number of parts. Without stages, schedules that overlap parts are tried."""
        config = candidate.config
        if config.mesh.pipeline == 1:
            return self._best_of(
                candidate, ({"schedule": {**each, **order}} for order in stageless() for each in guesses())
            )
        overrides = ({"schedule": {**each, **order}} for order in pipelines() for each in guesses())
        best = self._best_of(candidate, overrides)
        more = [parts for parts in accumulations(config) if parts > best.config.train.grad_accumulation]
        return self._best_of(best, ({"train": {"grad_accumulation": parts}} for parts in more[:_PARTS]))

    def _best_of(self, known: Candidate, overrides: Iterable[Overrides]) -> Candidate:
        """The known candidate, or a faster one with other settings."""
        tried = choices(self.draft, known.config, overrides)
        fitting = ((each, least_step_s(each, self.cluster)) for each in tried if self.fitting.memory.fits(each))
        best, _ = self._fastest(fitting, step_s(known))
        return best if best and step_s(best) < step_s(known) else known

    def _candidate(self, config: Config) -> Candidate:
        if config not in self._candidates:
            self._candidates[config] = Candidate(
                estimate=estimate(config, self.cluster),
                memory=self.fitting.memory.of(config),
                saves_memory=self.fitting.saves_memory(config),
            )
        return self._candidates[config]
