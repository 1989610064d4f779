"""The search on one mesh: first what fits into memory, then schedules, bucket sizes and forms for the best ones."""

import bisect
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from moe_jax.config import Config
from moe_jax.config.draft import Draft
from moe_jax.plan.candidates import (
    CHUNKS_MB,
    CONTEXT_FORMS,
    HEAD_BLOCKS,
    Kept,
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
from moe_jax.plan.config_memory import ConfigMemory, memory_key
from moe_jax.plan.estimate import Estimate, estimate
from moe_jax.plan.forward import best_ranges
from moe_jax.plan.least_time import least_step_s, least_work_s
from moe_jax.plan.memory import least_bytes
from moe_jax.plan.memory_parts import StepMemory
from moe_jax.plan.tensor_forms import tensor_forms

_PARTS = 4  # how many numbers of parts of the batch are tried with pipeline stages
_REMATS = ("none", "dots", "full")
_STAGED_REMATS = (*_REMATS, "chunk")
_ZEROS = (0, 1, 2, 3)


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


_total = operator.attrgetter("total")


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
    # configs by base, ZeRO stage, remat and parts
    _known: dict[tuple[Config, int, str, int], Kept] = field(default_factory=dict, init=False, compare=False)
    # bytes of state and gradients by base and ZeRO stage, and whether anything fits by these and remat
    _states: dict[tuple[Config, int], float] = field(default_factory=dict, init=False, compare=False)
    _fits: dict[tuple[Config, int, str], bool] = field(default_factory=dict, init=False, compare=False)
    _candidates: dict[Config, Candidate] = field(default_factory=dict, init=False, compare=False)

    @functools.cached_property
    def memory(self) -> ConfigMemory:
        """The memory of configs."""
        return ConfigMemory(self.cluster, self.memory_factor)

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

    def fitting(self, base: Config, remat: str) -> MeshConfigs:
        """Configs that recompute this, with each other way to save memory, in as few parts of the batch as fit.

        If a config fits without saving memory, there are no others; with stages also if any config fits.
        """
        fitting = self._fitting_stages if base.mesh.pipeline > 1 else self._fitting
        found = dict.fromkeys(fitting(base, remat))
        complete = (base.mesh.pipeline > 1 and bool(found)) or not all(map(self._saves_memory, found))
        return MeshConfigs(tuple((each, least_step_s(each, self.cluster)) for each in found), complete)

    def _fitting(self, base: Config, remat: str) -> Iterator[Config]:
        for zero in _ZEROS:
            if not self._fits_somehow(base, zero, remat):
                continue
            firsts: dict[bool, Config] = {}  # a scheduled step stores more, and so may need more parts of the batch
            for each in itertools.chain.from_iterable(self._saving(base, zero, remat)):
                plain = each.schedule.policy_facts.cuts is None
                if plain not in firsts and self.memory.fits(each):
                    firsts[plain] = each
                if len(firsts) == 2:
                    break
            yield from firsts.values()
            if any(not self._saves_memory(each) for each in firsts.values()):
                return

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
        found = (self._best_on(each, limit_s) for each in others if self.fits_at_all(each))
        return [each for each in found if each]

    def _best_on(self, base: Config, limit_s: float) -> Candidate | None:
        """The fastest candidate of a mesh, if it takes no longer than `limit_s`."""
        best = None
        for remat in remats(base):
            if self.least_s(base, remat) > limit_s:
                break
            found = self.fitting(base, remat)
            if candidate := self.best_of(found, limit_s):
                best = min(filter(None, (best, candidate)), key=step_s)
                limit_s = min(limit_s, step_s(best))
            if found.complete:
                break
        return best

    def _fitting_stages(self, base: Config, remat: str) -> Iterator[Config]:
        """Pipelined configs with the cheapest savings that fit.

        More parts of the batch are less efficient each, but leave stages less idle.
        """
        for zero in _ZEROS:
            if not self._fits_somehow(base, zero, remat):
                continue
            first_guesses = itertools.islice(self._first_guesses(base, zero, remat), _PARTS)
            if firsts := {each.train.grad_accumulation: each for each in first_guesses}:
                yield from firsts.values()
                return

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
        for zero, remat, parts in itertools.product(_ZEROS, remats(config), possible[max(place - 1, 0) : place + 2]):
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

    def _first_guesses(self, base: Config, zero: int, remat: str) -> Iterator[Config]:
        """The first config that fits with each number of parts."""
        for alike in self._saving(base, zero, remat):
            yield from itertools.islice((each for each in alike if self.memory.fits(each)), 1)

    def _saving(self, base: Config, zero: int, remat: str) -> Iterator[Kept]:
        """Configs with these savings, the largest parts of the batch that fit first, then smaller ones."""
        possible = accumulations(base)
        for parts in possible[self._first_fitting(base, zero, remat, possible) :]:
            yield self._in_parts(base, zero, remat, parts)

    def _first_fitting(self, base: Config, zero: int, remat: str, possible: Sequence[int]) -> int:
        """The index of the fewest parts that fit.

        Smaller parts need less memory, except that one part needs no second copy of gradients.
        """

        def fits(index: int) -> bool:
            return any(self.memory.fits(each) for each in self._in_parts(base, zero, remat, possible[index]))

        if fits(0):
            return 0
        most = next(
            index for index in reversed(range(len(possible))) if any(self._in_parts(base, zero, remat, possible[index]))
        )
        return bisect.bisect_left(range(most), True, lo=min(1, most), key=fits)

    def _in_parts(self, base: Config, zero: int, remat: str, parts: int) -> Kept:
        """Configs with these savings and this number of parts, for each guess of a schedule."""
        if zero == 2 and (parts == 1 or base.mesh.pipeline > 1) and "optimizer.zero" in self.draft.open:
            return Kept(iter(()))  # the same as ZeRO 1, or refused
        key = base, zero, remat, parts
        if key not in self._known:
            saving: Overrides = {"optimizer": {"zero": zero}, "train": {"grad_accumulation": parts}}
            overrides = ({**saving, "schedule": {"remat": remat, **each}} for each in guesses())
            self._known[key] = Kept(self._unlike_too_large(base, overrides))
        return self._known[key]

    def _unlike_too_large(self, base: Config, overrides: Iterable[Overrides]) -> Iterator[Config]:
        """The valid configs with these overrides, without those that need as much memory as one that does not fit.

        To validate a config takes longer than to find that out.
        """
        too_large = set[object]()
        for each in choices(self.draft, base, overrides, lambda sections: memory_key(sections) in too_large):
            yield each
            if not self.memory.fits(each):
                too_large.add(memory_key(each))

    def _best_of(self, known: Candidate, overrides: Iterable[Overrides]) -> Candidate:
        """The known candidate, or a faster one with other settings."""
        tried = choices(self.draft, known.config, overrides)
        fitting = ((each, least_step_s(each, self.cluster)) for each in tried if self.memory.fits(each))
        best, _ = self._fastest(fitting, step_s(known))
        return best if best and step_s(best) < step_s(known) else known

    def _candidate(self, config: Config) -> Candidate:
        if config not in self._candidates:
            self._candidates[config] = Candidate(
                estimate=estimate(config, self.cluster),
                memory=self.memory.of(config),
                saves_memory=self._saves_memory(config),
            )
        return self._candidates[config]

    def _saves_memory(self, config: Config) -> bool:
        saves = {
            "optimizer.zero": config.optimizer.zero > 0,
            "schedule.remat": config.schedule.remat != "none",
            # stages need several parts anyway
            "train.grad_accumulation": config.mesh.pipeline == 1
            and config.train.grad_accumulation > accumulations(config)[0],
        }
        return self.cluster.device.memory_bytes is not None and any(
            value for name, value in saves.items() if name in self.draft.open
        )

    def fits_at_all(self, base: Config) -> bool:
        """Whether the config fits with all ways to save memory."""
        # what saves most is likeliest to fit
        savings = itertools.product(reversed(_ZEROS), reversed(remats(base)[2:]))
        return any(self._fits_somehow(base, *saving) for saving in savings)

    def least(self, base: Config) -> StepMemory:
        """The memory of the config with all ways to save memory."""
        found: dict[int, StepMemory] = {}
        for zero in reversed(_ZEROS):
            least = min((memory.total for memory in found.values()), default=math.inf)
            if self._state_bytes(base, zero) > least:
                continue
            configs = (each for remat in remats(base)[2:] for each in self._least(base, zero, remat))
            if memories := list(map(self.memory.of, dict.fromkeys(configs))):
                found[zero] = min(memories, key=_total)
        return min((found[zero] for zero in sorted(found)), key=_total)

    def _fits_somehow(self, base: Config, zero: int, remat: str) -> bool:
        key = base, zero, remat
        if key not in self._fits:
            self._fits[key] = self._may_fit(base, zero, remat) and any(
                self.memory.fits(each) for each in self._least(base, zero, remat)
            )
        return self._fits[key]

    def _may_fit(self, base: Config, zero: int, remat: str) -> bool:
        """Whether bounds of its memory fit: state and gradients, and with stages the same step with sharded moments."""
        if not self.memory.has_room(self._state_bytes(base, zero)):
            return False
        if zero > 0 or base.mesh.pipeline == 1 or "optimizer.zero" not in self.draft.open:
            return True
        return self._fits_somehow(base, 1, remat) or not any(self._least(base, 1, remat))

    def _state_bytes(self, base: Config, zero: int) -> float:
        """Bytes of state and gradients with this stage of ZeRO, which bound the memory of all its configs."""
        if (base, zero) not in self._states:
            unchecked = self.draft.unchecked(base, optimizer={"zero": zero})
            self._states[base, zero] = least_bytes(unchecked, self.cluster.device.platform)
        return self._states[base, zero]

    def _least(self, base: Config, zero: int, remat: str) -> Iterator[Config]:
        """Configs that need least memory: more parts are smaller, but their gradients are summed in a copy, which
        stages have anyway.
        """
        parts = accumulations(base)
        by_parts = (self._in_parts(base, zero, remat, count) for count in reversed(parts))
        yield from next(filter(any, by_parts), ())
        if base.mesh.pipeline == 1:
            yield from self._in_parts(base, zero, remat, parts[0])


def remats(config: Config) -> tuple[str, ...]:
    """What may be recomputed on a mesh, from the least to the most."""
    return _STAGED_REMATS if config.mesh.pipeline > 1 else _REMATS
