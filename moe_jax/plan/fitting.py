"""Which configs of a mesh fit into memory, and how they save it: ZeRO, recomputing, parts of the batch."""

import bisect
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from moe_jax.config import Config
from moe_jax.config.draft import Draft
from moe_jax.plan.candidates import Kept, Overrides, accumulations, choices, guesses
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.config_memory import ConfigMemory, memory_key
from moe_jax.plan.memory import least_bytes
from moe_jax.plan.memory_parts import StepMemory

_PARTS = 4  # how many numbers of parts of the batch are tried with pipeline stages
_REMATS = ("none", "dots", "full")
_STAGED_REMATS = (*_REMATS, "chunk")
ZEROS = (0, 1, 2, 3)
_total = operator.attrgetter("total")


@dataclass(frozen=True)
class Fitting:
    """What fits, by the open settings, the cluster, and the ratio of real to estimated memory."""

    draft: Draft
    cluster: Cluster
    memory_factor: float
    # configs by base, ZeRO stage, remat and parts
    _known: dict[tuple[Config, int, str, int], Kept] = field(default_factory=dict, init=False, compare=False)
    # bytes of state and gradients by base and ZeRO stage, and whether anything fits by these and remat
    _states: dict[tuple[Config, int], float] = field(default_factory=dict, init=False, compare=False)
    _fits: dict[tuple[Config, int, str], bool] = field(default_factory=dict, init=False, compare=False)

    @functools.cached_property
    def memory(self) -> ConfigMemory:
        """The memory of configs."""
        return ConfigMemory(self.cluster, self.memory_factor)

    def on_mesh(self, base: Config, remat: str) -> Iterator[Config]:
        """Configs of a mesh that recompute this, with each other way to save memory, in as few parts of the batch as
        fit. If one fits without saving memory, or if there are stages, none that save more.
        """
        return self._with_stages(base, remat) if base.mesh.pipeline > 1 else self._without_stages(base, remat)

    def _without_stages(self, base: Config, remat: str) -> Iterator[Config]:
        for zero in ZEROS:
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
            if any(not self.saves_memory(each) for each in firsts.values()):
                return

    def _with_stages(self, base: Config, remat: str) -> Iterator[Config]:
        """Pipelined configs with the cheapest savings that fit.

        More parts of the batch are less efficient each, but leave stages less idle.
        """
        for zero in ZEROS:
            if not self._fits_somehow(base, zero, remat):
                continue
            first_guesses = itertools.islice(self._first_guesses(base, zero, remat), _PARTS)
            if firsts := {each.train.grad_accumulation: each for each in first_guesses}:
                yield from firsts.values()
                return

    def fits_at_all(self, base: Config) -> bool:
        """Whether the config fits with all ways to save memory."""
        # what saves most is likeliest to fit
        savings = itertools.product(reversed(ZEROS), reversed(remats(base)[2:]))
        return any(self._fits_somehow(base, *saving) for saving in savings)

    def least(self, base: Config) -> StepMemory:
        """The memory of the config with all ways to save memory."""
        found: dict[int, StepMemory] = {}
        for zero in reversed(ZEROS):
            least = min((memory.total for memory in found.values()), default=math.inf)
            if self._state_bytes(base, zero) > least:
                continue
            configs = (each for remat in remats(base)[2:] for each in self._least(base, zero, remat))
            if memories := list(map(self.memory.of, dict.fromkeys(configs))):
                found[zero] = min(memories, key=_total)
        return min((found[zero] for zero in sorted(found)), key=_total)

    def saves_memory(self, config: Config) -> bool:
        """Whether an open setting is not the fastest one, for lack of memory."""
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
