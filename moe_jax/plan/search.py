"""The search on one mesh: first what fits into memory, then schedules, bucket sizes and forms for the best ones."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
    scheduled,
    schedules,
    stageless,
)
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.estimate import Estimate, estimate
from moe_jax.plan.forward import best_ranges
from moe_jax.plan.memory import StepMemory, step_memory

_MEMORY_LEFT = 0.06  # share of a device's memory for the runtime and errors of the estimate
_PARTS = 4  # how many numbers of parts of the batch are tried with pipeline stages
_REMATS = ("none", "dots", "full", "chunk")  # the last one only with stages
_ZEROS = (0, 1, 2)
_FORMS = (("o1", 1), ("o2", 2), ("o2", 4), ("o3", 2), ("o3", 4))


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
        return mesh_text(self.config.mesh.sizes, self.config.mesh.experts_over_context)

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


def best_of(candidates: Iterable[Candidate]) -> Candidate:
    return min(candidates, key=step_s)


@dataclass(frozen=True)
class PlanSearch:
    """The open settings, the cluster, and the ratio of real to estimated memory."""

    draft: Draft
    cluster: Cluster
    memory_factor: float

    def fitting(self, base: Config) -> Iterator[Candidate]:
        """Candidates with each way to save memory, in as few parts of the batch as fit.

        If a candidate fits without saving memory, there are no others.
        """
        if base.mesh.pipeline > 1:
            yield from self._fitting_stages(base)
            return
        seen = set()
        for saving in itertools.product(_ZEROS, _REMATS):
            if not self._fits_somehow(base, *saving):
                continue
            firsts: dict[bool, Config] = {}  # a scheduled step stores more, and so may need more parts of the batch
            for each in self._saving(base, *saving):
                plain = each.schedule.policy_facts.cuts is None
                if plain not in firsts and self.fits(self.memory(each)):
                    firsts[plain] = each
                if len(firsts) == 2:
                    break
            found = [self._candidate(each) for each in firsts.values() if each not in seen]
            seen |= set(firsts.values())
            yield from found
            if any(not each.saves_memory for each in found):
                return

    def with_other_placements(self, configs: Iterable[Config]) -> list[Candidate]:
        """The best candidate of each config with the other placement of its experts, if it fits."""
        others = (each for config in configs for each in other_placements(self.draft, config))
        return [best_of(self.fitting(each)) for each in others if self.fits(self.least(each))]

    def _fitting_stages(self, base: Config) -> Iterator[Candidate]:
        """Pipelined candidates with the cheapest savings that fit.

        More parts of the batch are less efficient each, but leave stages less idle.
        """
        for remat, zero in itertools.product(_REMATS, _ZEROS):
            if not self._fits_somehow(base, zero, remat):
                continue
            fitting = (each for each in self._saving(base, zero, remat) if self.fits(self.memory(each)))
            firsts = {each.train.grad_accumulation: each for each in itertools.islice(_first_guesses(fitting), _PARTS)}
            if firsts:
                yield from map(self._candidate, firsts.values())
                return

    def refined(self, candidate: Candidate) -> Candidate:
        """The best candidate on the same mesh.

        Choices are the placement of experts, then schedules, bucket sizes, and forms over tensor ranks.
        """
        candidate = best_of([candidate, *self.with_other_placements([candidate.config])])
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
        if best.config.mesh.tensor > 1:
            forms = ({"tensor_form": form, "tensor_chunks": chunks} for form, chunks in _FORMS)
            best = self._best_of(best, ({"exchange": form} for form in forms))
        if best.config.mesh.context > 1:
            best = self._best_of(best, ({"exchange": {"context_form": form}} for form in CONTEXT_FORMS))
        return dataclasses.replace(best, refined=True)

    def _savings_near(self, config: Config) -> Iterator[Overrides]:
        """Other ways to save memory, with the same number of parts of the batch, or the next smaller or larger one."""
        possible = accumulations(config)
        place = possible.index(config.train.grad_accumulation) if config.train.grad_accumulation in possible else 0
        for zero, remat, parts in itertools.product(_ZEROS, _REMATS, possible[max(place - 1, 0) : place + 2]):
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

    def _saving(self, base: Config, zero: int, remat: str) -> Iterator[Config]:
        """Configs with these savings, in ever smaller parts of the batch."""
        for parts in accumulations(base):
            yield from self._in_parts(base, zero, remat, parts)

    def _in_parts(self, base: Config, zero: int, remat: str, parts: int) -> Iterator[Config]:
        """Configs with these savings and this number of parts, for each guess of a schedule."""
        if zero == 2 and parts == 1 and "optimizer.zero" in self.draft.open:
            return  # the same as ZeRO 1
        saving: Overrides = {"optimizer": {"zero": zero}, "train": {"grad_accumulation": parts}}
        yield from choices(self.draft, base, ({**saving, "schedule": {"remat": remat, **each}} for each in guesses()))

    def _best_of(self, known: Candidate, overrides: Iterable[Overrides]) -> Candidate:
        others = choices(self.draft, known.config, overrides)
        return best_of([known, *(self._candidate(each) for each in others if self.fits(self.memory(each)))])

    def _candidate(self, config: Config) -> Candidate:
        saves = {
            "optimizer.zero": config.optimizer.zero > 0,
            "schedule.remat": config.schedule.remat != "none",
            # stages need several parts anyway
            "train.grad_accumulation": config.mesh.pipeline == 1
            and config.train.grad_accumulation > accumulations(config)[0],
        }
        saves_memory = self.cluster.device.memory_bytes is not None and any(
            value for name, value in saves.items() if name in self.draft.open
        )
        return Candidate(estimate=estimate(config, self.cluster), memory=self.memory(config), saves_memory=saves_memory)

    def memory(self, config: Config) -> StepMemory:
        return step_memory(config, self.cluster.device.platform, config.mesh.sizes)

    def fits(self, memory: StepMemory) -> bool:
        limit = self.cluster.device.memory_bytes
        return limit is None or self.memory_factor * memory.total <= limit * (1 - _MEMORY_LEFT)

    def least(self, base: Config) -> StepMemory:
        """The memory of the config with all ways to save memory."""
        configs = dict.fromkeys(
            each for zero in _ZEROS for remat in ("full", "chunk") for each in self._least(base, zero, remat)
        )
        return min(map(self.memory, configs), key=lambda memory: memory.total)

    def _fits_somehow(self, base: Config, zero: int, remat: str) -> bool:
        return any(self.fits(self.memory(each)) for each in self._least(base, zero, remat))

    def _least(self, base: Config, zero: int, remat: str) -> Iterator[Config]:
        """Configs that need least memory: more parts are smaller, but their gradients are summed in a copy."""
        parts = accumulations(base)
        by_parts = (list(self._in_parts(base, zero, remat, count)) for count in reversed(parts))
        yield from next(filter(None, by_parts), ())
        yield from self._in_parts(base, zero, remat, parts[0])


def _first_guesses(configs: Iterable[Config]) -> Iterator[Config]:
    """The first config with each number of parts."""
    for _, alike in itertools.groupby(configs, key=lambda config: config.train.grad_accumulation):
        yield next(alike)
