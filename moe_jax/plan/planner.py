"""How to train a model on a cluster: the mesh, what is recomputed, the schedule and the exchange, by simulated steps.

First every mesh with one good guess of a schedule, and with each way to recompute in the fewest parts of a batch that
fit into memory. Then the best few of these with every policy and degree, sizes of chunks, and forms over tensor ranks.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from moe_jax.config import Config
from moe_jax.draft import Draft
from moe_jax.errors import UserError
from moe_jax.plan.candidates import (
    CHUNKS_MB,
    CONTEXT_FORMS,
    Refused,
    Way,
    accumulations,
    choices,
    elsewhere,
    guesses,
    mesh_text,
    meshes,
    on_meshes,
    pipelines,
    scheduled,
    schedules,
    with_rates,
)
from moe_jax.plan.clusters import Cluster, find_cluster
from moe_jax.plan.estimate import Estimate, estimate
from moe_jax.plan.forward import best_ranges
from moe_jax.plan.memory import StepMemory, step_memory

_MEMORY_LEFT = 0.06  # of a device's, for the runtime and what estimates miss
_REFINED = 4  # meshes
_PARTS = 4  # numbers of parts of the batch that pipeline stages are tried with
_REMATS: tuple[Literal["none", "dots", "full"], ...] = ("none", "dots", "full")
_FORMS = (("o1", 1), ("o2", 2), ("o2", 4), ("o3", 2), ("o3", 4))


class PlanError(UserError):
    """A model that no way is known to train on a cluster."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way that fits into memory."""

    estimate: Estimate
    memory: StepMemory
    squeezed: bool  # whether it recomputes or cuts the batch, which it would not if memory were larger

    @property
    def config(self) -> Config:
        return self.estimate.config

    @property
    def mesh(self) -> str:
        return mesh_text(self.config.mesh.sizes, self.config.mesh.experts_over_context)

    @property
    def binds(self) -> str:
        """What would have to be more for a faster step."""
        busy = self.estimate.busy
        where = "between nodes" if self.estimate.leaves_node else "inside nodes"
        found = {
            "idle stages": busy.idle,
            "compute": busy.compute,
            f"exchanges {where}": busy.exchange,
            "sums of gradients": busy.sums,
        }
        most = max(found, key=lambda name: found[name])
        return f"{most}, memory" if self.squeezed else most


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
        if algorithm == "flat" or config.exchange.algorithm != "auto":
            return config
        exchange: dict[str, Any] = {"algorithm": algorithm}
        return dataclasses.replace(config, exchange=dataclasses.replace(config.exchange, **exchange))


def plan(draft: Draft, cluster: Cluster, memory_factor: float = 1.0) -> Plans:
    """Choose what is open for the fastest step. Raises PlanError if there is none.

    `memory_factor` is what a compiler takes over what `plan/memory.py` says.
    """
    free = {f"mesh.{name}" for name, size in draft.mesh.sizes.items() if size == -1}
    schedule = with_rates(draft.schedule, cluster)
    search = _Search(dataclasses.replace(draft, schedule=schedule, open=draft.open | free), cluster, memory_factor)
    found: list[Candidate] = []
    refused: list[Refused] = []
    large: list[Config] = []
    for each in on_meshes(search.draft, cluster):
        if isinstance(each, Refused):
            refused.append(each)
        elif too_large := search.too_large(each):
            refused.append(too_large)
            large.append(each)
        else:
            found.append(_best(search.fitting(each)))
    if not found:
        found = search.elsewhere(large)
    if not found:
        raise PlanError(search.nothing(refused))
    found.sort(key=_step_s)
    ranked = sorted([*map(search.refined, found[:_REFINED]), *found[_REFINED:]], key=_step_s)
    return Plans(cluster=cluster, ranked=tuple(ranked), refused=tuple(refused))


def _step_s(candidate: Candidate) -> float:
    return candidate.estimate.step_s


def _best(candidates: Iterable[Candidate]) -> Candidate:
    return min(candidates, key=_step_s)


@dataclass(frozen=True)
class _Search:
    """What is open, and where it has to fit."""

    draft: Draft
    cluster: Cluster
    memory_factor: float

    def fitting(self, base: Config) -> Iterator[Candidate]:
        """With each way to save memory, the batch in as few parts as fit; only without, if that fits."""
        if base.mesh.pipeline > 1:
            yield from self._fitting_stages(base)
            return
        seen = set()
        for saving in itertools.product((False, True), _REMATS):
            first = next((each for each in self._saving(base, *saving) if self._fits(self._memory(each))), None)
            if first is not None and first not in seen:
                seen.add(first)
                found = self._candidate(first)
                yield found
                if not found.squeezed:
                    return

    def elsewhere(self, configs: Iterable[Config]) -> list[Candidate]:
        """The best of each with its experts elsewhere, as far as that fits."""
        others = (each for config in configs for each in elsewhere(self.draft, config))
        return [_best(self.fitting(each)) for each in others if self.too_large(each) is None]

    def _fitting_stages(self, base: Config) -> Iterator[Candidate]:
        """With what costs least of what fits; more parts take longer each, and leave stages less idle."""
        for remat, sharded in itertools.product(_REMATS, (False, True)):
            fitting = (each for each in self._saving(base, sharded, remat) if self._fits(self._memory(each)))
            firsts = {each.train.grad_accumulation: each for each in itertools.islice(_first_guesses(fitting), _PARTS)}
            if firsts:
                yield from map(self._candidate, firsts.values())
                return

    def refined(self, candidate: Candidate) -> Candidate:
        """The best of its mesh: where experts are, then schedules, sizes of chunks, and forms over tensor ranks."""
        candidate = _best([candidate, *self.elsewhere([candidate.config])])
        # ranges of the forward pass may have more parts than powers of two
        ranges = (scheduled(found.policy, found.parts) for found in best_ranges(candidate.estimate).cut)
        best = self._best_of(self._best_pipeline(candidate), ({"schedule": each} for each in (*schedules(), *ranges)))
        if best.config.mesh.pipeline > 1:
            best = self._best_of(best, ({"schedule": order} for order in pipelines()))
        if best.config.schedule.grad_reduce == "chunked":
            best = self._best_of(best, ({"schedule": {"chunk_mb": chunk}} for chunk in CHUNKS_MB))
        if best.config.mesh.tensor > 1:
            forms = ({"tensor_form": form, "tensor_chunks": chunks} for form, chunks in _FORMS)
            best = self._best_of(best, ({"exchange": form} for form in forms))
        if best.config.mesh.context > 1:
            best = self._best_of(best, ({"exchange": {"context_form": form}} for form in CONTEXT_FORMS))
        return best

    def _best_pipeline(self, candidate: Candidate) -> Candidate:
        """The best order in which stages work through parts, and so many of these; parts beside each other."""
        config = candidate.config
        if config.mesh.pipeline == 1:
            return self._best_of(candidate, ({"schedule": {**each, "pipeline": "coscheduled"}} for each in guesses()))
        ways = ({"schedule": {**each, **order}} for order in pipelines() for each in guesses())
        best = self._best_of(candidate, ways)
        more = [parts for parts in accumulations(config) if parts > best.config.train.grad_accumulation]
        return self._best_of(best, ({"train": {"grad_accumulation": parts}} for parts in more[:_PARTS]))

    def _saving(self, base: Config, sharded: bool, remat: str) -> Iterator[Config]:
        """Ever smaller parts of the batch."""
        for parts in accumulations(base):
            yield from self._in_parts(base, sharded, remat, parts)

    def _in_parts(self, base: Config, sharded: bool, remat: str, parts: int) -> Iterator[Config]:
        """With each guess."""
        saving: Way = {"optimizer": {"sharded": sharded}, "train": {"grad_accumulation": parts}}
        yield from choices(self.draft, base, ({**saving, "schedule": {"remat": remat, **each}} for each in guesses()))

    def _best_of(self, known: Candidate, ways: Iterable[Way]) -> Candidate:
        others = choices(self.draft, known.config, ways)
        return _best([known, *(self._candidate(each) for each in others if self._fits(self._memory(each)))])

    def _candidate(self, config: Config) -> Candidate:
        saves = {
            "optimizer.sharded": config.optimizer.sharded,
            "schedule.remat": config.schedule.remat != "none",
            "train.grad_accumulation": config.train.grad_accumulation > accumulations(config)[0],
        }
        squeezed = any(value for name, value in saves.items() if name in self.draft.open)
        return Candidate(estimate=estimate(config, self.cluster), memory=self._memory(config), squeezed=squeezed)

    def _memory(self, config: Config) -> StepMemory:
        return step_memory(config, self.cluster.device.platform, config.mesh.sizes)

    def _fits(self, memory: StepMemory) -> bool:
        limit = self.cluster.device.memory_bytes
        return limit is None or self.memory_factor * memory.total <= limit * (1 - _MEMORY_LEFT)

    def _least(self, base: Config) -> StepMemory:
        """With all ways to save memory; more parts are smaller, but their gradients add up in a copy."""
        parts = accumulations(base)
        by_parts = (list(self._in_parts(base, True, "full", count)) for count in reversed(parts))
        smallest = next(filter(None, by_parts))
        tried = itertools.chain(smallest, self._in_parts(base, True, "full", parts[0]))
        return min(map(self._memory, tried), key=lambda memory: memory.total)

    def too_large(self, base: Config) -> Refused | None:
        """What it needs, and for what most, if no way makes it fit."""
        memory, limit = self._least(base), self.cluster.device.memory_bytes
        if limit is None or self._fits(memory):
            return None
        largest = max(memory.parts, key=lambda name: memory.parts[name])
        needed = self.memory_factor * memory.total
        reason = (
            f"needs {needed / 1e9:.1f} of {limit / 1e9:.1f} GB at least, "
            f"{memory.parts[largest] / 1e9:.1f} of them {largest}"
        )
        return Refused(mesh_text(base.mesh.sizes, base.mesh.experts_over_context), reason, needed)

    def nothing(self, refused: list[Refused]) -> str:
        """One line: why, and the nearest change that would help."""
        too_large = [each for each in refused if each.needed_bytes is not None]
        if not too_large:
            reason = f"{refused[0].mesh}: {refused[0].reason}" if refused else _no_mesh(self.draft, self.cluster)
            return f"nothing trains on {self.cluster.name} ({reason})"
        nearest = min(too_large, key=lambda each: each.needed_bytes or 0.0)
        return f"nothing trains on {self.cluster.name} ({nearest.mesh}: {nearest.reason}): {self._cure()}"

    def _cure(self) -> str:
        """The next larger cluster of its kind that has enough memory, with a batch that feeds it."""
        cluster, train = self.cluster, self.draft.train
        count = str(cluster.devices)
        for factor in _LARGER if cluster.name.endswith(count) else ():
            try:
                larger = find_cluster(f"{cluster.name.removesuffix(count)}{factor * cluster.devices}")
            except UserError:
                return _SMALLER
            batch = dataclasses.replace(train, batch_size=factor * train.batch_size)
            grown = _Search(dataclasses.replace(self.draft, train=batch), larger, self.memory_factor)
            tried = (each for each in on_meshes(grown.draft, larger) if isinstance(each, Config))
            if any(grown.too_large(each) is None or grown.elsewhere([each]) for each in tried):
                return f"{larger.name} has enough memory, with train.batch_size={batch.batch_size}"
        return _SMALLER


def _first_guesses(configs: Iterable[Config]) -> Iterator[Config]:
    """The first with each number of parts."""
    for _, alike in itertools.groupby(configs, key=lambda config: config.train.grad_accumulation):
        yield next(alike)


def _no_mesh(draft: Draft, cluster: Cluster) -> str:
    """What was asked for, and the nearest size of one axis that would do."""
    given = {name: size for name, size in draft.mesh.sizes.items() if f"mesh.{name}" not in draft.open}
    text = " × ".join(f"mesh.{name}={size}" for name, size in given.items() if size != 1 or name in _ALWAYS_TOLD)
    for name, size in sorted(given.items(), key=lambda axis: -axis[1]):
        others = dataclasses.replace(draft, open=draft.open | {f"mesh.{name}"})
        if possible := [sizes[name] for sizes in meshes(others, cluster)]:
            cure = f"mesh.{name}={min(possible, key=lambda each: abs(each - size))}"
            break
    else:
        cure = "auto for all of them"
    return f"{text} is no mesh of {cluster.devices} devices: use {cure}"


_LARGER = (2, 4, 8, 16, 32, 64)
_ALWAYS_TOLD = ("data", "expert", "tensor")
_SMALLER = "use a smaller model, or shorter sequences (data.seq_len)"
