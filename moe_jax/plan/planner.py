"""How to train a model on a cluster: the mesh, what is recomputed, the schedule and the exchange, by simulated steps.

First every mesh with one good guess of a schedule, and with each way to recompute in the fewest parts of a batch that
fit into memory. Then the best few of these with every policy and degree, sizes of chunks, and forms over tensor ranks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from moe_jax.config import Config
from moe_jax.errors import UserError
from moe_jax.plan.candidates import (
    CHUNKS_MB,
    Refused,
    accumulations,
    first_schedule,
    mesh_text,
    on_meshes,
    plain,
    schedules,
    with_settings,
)
from moe_jax.plan.clusters import Cluster, find_cluster
from moe_jax.plan.estimate import Estimate, estimate
from moe_jax.plan.memory import StepMemory, step_memory

_MEMORY_LEFT = 0.06  # of a device's, for the runtime and what estimates miss
_REFINED = 4  # meshes
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
        return mesh_text(self.config.mesh.sizes)

    @property
    def binds(self) -> str:
        """What would have to be more for a faster step."""
        busy = self.estimate.busy
        where = "between nodes" if self.estimate.leaves_node else "inside nodes"
        found = {"compute": busy.compute, f"exchanges {where}": busy.exchange, "sums of gradients": busy.sums}
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


def plan(config: Config, cluster: Cluster) -> Plans:
    """Find the fastest step. Raises PlanError if there is none."""
    found: list[Candidate] = []
    refused: list[Refused] = []
    for each in on_meshes(config, cluster):
        if isinstance(each, Refused):
            refused.append(each)
        elif fitting := list(_fitting(each, cluster)):
            found.append(min(fitting, key=_step_s))
        else:
            refused.append(Refused(mesh_text(each.mesh.sizes), _too_large(_least(each, cluster), cluster)))
    if not found:
        raise PlanError(_nothing(config, cluster, refused))
    found.sort(key=_step_s)
    ranked = sorted([*(_refined(each, cluster) for each in found[:_REFINED]), *found[_REFINED:]], key=_step_s)
    return Plans(cluster=cluster, ranked=tuple(ranked), refused=tuple(refused))


def _step_s(candidate: Candidate) -> float:
    return candidate.estimate.step_s


def _fitting(config: Config, cluster: Cluster) -> Iterator[Candidate]:
    """With each way to save memory, the batch in as few parts as fit; only without, if that fits."""
    for sharded in (False, True):
        for remat in _REMATS:
            settings = with_settings(config, optimizer={"sharded": sharded}, schedule={"remat": remat})
            for parts in accumulations(settings):
                fitting = [each for each in _guesses(parts) if _fits(_memory(each, cluster), cluster)]
                squeezed = sharded or remat != "none" or parts.train.grad_accumulation > 1
                for each in fitting[:1]:
                    memory = _memory(each, cluster)
                    yield Candidate(estimate=estimate(each, cluster), memory=memory, squeezed=squeezed)
                    if not squeezed:
                        return
                if fitting:
                    break


def _guesses(config: Config) -> tuple[Config, Config]:
    """Scheduled, which keeps what was exchanged, and plain, which exchanges again what it does not keep."""
    return first_schedule(config), plain(config)


def _least(config: Config, cluster: Cluster) -> StepMemory:
    """With all ways to save memory."""
    settings = with_settings(config, optimizer={"sharded": True}, schedule={"remat": "full"})
    smallest = (_memory(each, cluster) for parts in accumulations(settings) for each in _guesses(parts))
    return min(smallest, key=lambda memory: memory.total)


def _refined(candidate: Candidate, cluster: Cluster) -> Candidate:
    """The best of its mesh: schedules, then sizes of chunks, then forms over tensor ranks."""
    best = _best([candidate, *_all_fitting(schedules(candidate.config), cluster, candidate)])
    if best.config.schedule.grad_reduce == "chunked":
        others = (with_settings(best.config, schedule={"chunk_mb": chunk}) for chunk in CHUNKS_MB)
        best = _best([best, *_all_fitting(others, cluster, best)])
    if best.config.mesh.tensor > 1:
        forms = (
            with_settings(best.config, exchange={"tensor_form": form, "tensor_chunks": chunks})
            for form, chunks in _FORMS
        )
        best = _best([best, *_all_fitting(forms, cluster, best)])
    return best


def _best(candidates: Iterable[Candidate]) -> Candidate:
    return min(candidates, key=_step_s)


def _all_fitting(configs: Iterable[Config], cluster: Cluster, like: Candidate) -> Iterator[Candidate]:
    for config in configs:
        memory = _memory(config, cluster)
        if _fits(memory, cluster):
            yield Candidate(estimate=estimate(config, cluster), memory=memory, squeezed=like.squeezed)


def _memory(config: Config, cluster: Cluster) -> StepMemory:
    return step_memory(config, cluster.device.platform, config.mesh.sizes)


def _fits(memory: StepMemory, cluster: Cluster) -> bool:
    limit = cluster.device.memory_bytes
    return limit is None or memory.total <= limit * (1 - _MEMORY_LEFT)


def _too_large(memory: StepMemory, cluster: Cluster) -> str:
    assert cluster.device.memory_bytes is not None
    largest = max(memory.parts, key=lambda name: memory.parts[name])
    return (
        f"needs {memory.total / 1e9:.1f} of {cluster.device.memory_bytes / 1e9:.1f} GB at least, "
        f"{memory.parts[largest] / 1e9:.1f} of them {largest}"
    )


def _nothing(config: Config, cluster: Cluster, refused: list[Refused]) -> str:
    """One line: why, and the nearest change that would help."""
    too_large = [each for each in refused if _needed(each)]
    if not too_large:
        reason = f"{refused[0].mesh}: {refused[0].reason}" if refused else "no mesh divides its experts"
        return f"nothing trains on {cluster.name} ({reason})"
    nearest = min(too_large, key=_needed)
    return f"nothing trains on {cluster.name} ({nearest.mesh}: {nearest.reason}): {_cure(config, cluster)}"


def _cure(config: Config, cluster: Cluster) -> str:
    """The next larger cluster of its kind that has enough memory, with a batch that feeds it."""
    count = str(cluster.devices)
    for factor in _LARGER if cluster.name.endswith(count) else ():
        try:
            larger = find_cluster(f"{cluster.name.removesuffix(count)}{factor * cluster.devices}")
            grown = with_settings(config, train={"batch_size": factor * config.train.batch_size})
        except UserError:
            return _SMALLER
        meshes = (each for each in on_meshes(grown, larger) if isinstance(each, Config))
        if any(_fits(_least(each, larger), larger) for each in meshes):
            return f"{larger.name} has enough memory, with train.batch_size={grown.train.batch_size}"
    return _SMALLER


_LARGER = (2, 4, 8, 16, 32, 64)
_SMALLER = "use a smaller model, or shorter sequences (data.seq_len)"


def _needed(refused: Refused) -> float:
    words = refused.reason.split()
    return float(words[1]) if words[0] == "needs" else 0.0
