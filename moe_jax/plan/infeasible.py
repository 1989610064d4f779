"""Error messages for models that do not fit and invalid meshes: one line with the nearest change that would help."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence

from moe_jax.config import Config
from moe_jax.config.draft import Draft
from moe_jax.config.validate import setting
from moe_jax.errors import UserError
from moe_jax.plan.candidates import Reason, Refused, mesh_text, meshes, on_meshes
from moe_jax.plan.clusters import Cluster, find_cluster
from moe_jax.plan.config_memory import LEFT_FREE
from moe_jax.plan.memory import parameter_bytes
from moe_jax.plan.rank_capacity import with_smaller_buffers
from moe_jax.plan.resources import count_parameters
from moe_jax.plan.search import PlanSearch

_LARGER = tuple(2**n for n in range(1, 13))  # factors for the number of devices
_NODE = 8  # devices of most nodes
_ITEM_BYTES = 4  # of a parameter, and of its gradient
_SAVING = ("train.grad_accumulation", "schedule.remat", "optimizer.zero")
_ALWAYS_SHOWN = ("data", "expert", "tensor")
_SHORTER = (2, 4, 8)  # divisors for the sequence length


def too_large(search: PlanSearch, base: Config) -> Refused | None:
    """The memory that a mesh needs, and its largest item, if the model does not fit on it in any way; else None."""
    limit, mesh = search.cluster.device.memory_bytes, mesh_text(base.mesh.sizes, base.mesh.expert_axes)
    if limit is None:
        return None
    # if that is open, and allowed
    least = base if base.replicas else search.draft.unchecked(base, optimizer={"zero": 3})
    if (parameters := search.memory_factor * parameter_bytes(least)) > limit:
        text = f"needs {parameters / 1e9:.1f} of {limit / 1e9:.1f} GB at least, for parameters alone"
        return Refused(mesh, lambda: Reason(text, parameters, parameters_alone=True))
    return None if search.fitting.fits_at_all(base) else Refused(mesh, lambda: _largest(search, base, limit))


def _largest(search: PlanSearch, base: Config, limit: float) -> Reason:
    """The memory that the mesh needs at least, with its largest item."""
    memory = search.fitting.least(base)
    largest = max(memory.parts, key=lambda name: memory.parts[name])
    needed = search.memory_factor * memory.total
    text = (
        f"needs {needed / 1e9:.1f} of {limit / 1e9:.1f} GB at least, "
        f"{memory.parts[largest] / 1e9:.1f} of them {largest}"
    )
    free = "" if needed > limit else f", and plans leave {LEFT_FREE:.0%} free"
    return Reason(text + free, needed)


def no_plan_message(search: PlanSearch, refused: list[Refused]) -> str:
    """The error message when no plan is feasible: the reason, and the nearest change that would help."""
    too_large = [each for each in refused if each.why.needed_bytes is not None]
    if not too_large:
        first = _first_to_mend(search, refused) if refused else None
        reason = f"{first.mesh}: {first.reason}" if first else _no_mesh(search.draft, search.cluster)
        return f"nothing trains on {search.cluster.name} ({reason})"
    nearest = min(too_large, key=lambda each: (each.why.parameters_alone, each.why.needed_bytes or 0.0))
    return f"nothing trains on {search.cluster.name} ({nearest.mesh}: {nearest.reason}): {_cure(search)}"


def _first_to_mend(search: PlanSearch, refused: Sequence[Refused]) -> Refused:
    """The refusal to report if no mesh is valid.

    That is the batch only if another batch makes a mesh valid. Otherwise it is a reason that names no open axis of the
    mesh, so it holds on meshes that are refused for reasons of their own, too.
    """
    by_mesh = {each.mesh: each for each in refused}
    with_other_batch: list[Refused] = []
    for each in on_meshes(_with_large_batch(search.draft, search.cluster), search.cluster):
        if isinstance(each, Refused):
            with_other_batch.append(each)
        elif own := by_mesh.get(mesh_text(each.mesh.sizes)):
            return own
    axes = [name for name in search.draft.open if name.startswith("mesh.")]
    general = (each for each in with_other_batch if not any(f"{axis}=" in each.reason for axis in axes))
    return next(general, (with_other_batch or refused)[0])


def _with_large_batch(draft: Draft, cluster: Cluster) -> Draft:
    """The draft with a batch that every mesh, every number of stages and the given numbers of parts divide."""
    schedule, parts = draft.schedule, draft.train.grad_accumulation
    given = {
        "train.grad_accumulation": parts,
        "schedule.microbatches": schedule.microbatches,
        "schedule.backward_microbatches": schedule.backward_microbatches or 1,
    }
    times = math.prod(number for name, number in given.items() if name not in draft.open)
    return dataclasses.replace(draft, train=dataclasses.replace(draft.train, batch_size=times * cluster.devices))


def _cure(search: PlanSearch) -> str:
    """What would make the model fit: settings that are closed, a larger cluster, shorter sequences, smaller buffers."""
    draft = search.draft
    closed = [name for name in _SAVING if name not in draft.open]
    if draft.optimizer.zero_axes is not None and "optimizer.zero" in closed:  # which then has to be given
        closed.remove("optimizer.zero")
    more_open = dataclasses.replace(draft, open=draft.open | set(closed))
    if closed and _fits_at_all(dataclasses.replace(search, draft=more_open)):
        return _opening(draft, closed)
    cure = _larger_or_shorter(search)
    for less in with_smaller_buffers(search.draft):
        if _fits_at_all(dataclasses.replace(search, draft=less)):
            factor = less.exchange.rank_capacity_factor
            return f"{cure}; or use exchange.rank_capacity_factor={factor}, and drop the rows beyond it"
    return cure


def _opening(draft: Draft, closed: Sequence[str]) -> str:
    """How to let the plan choose these settings, too: one that is `auto` would close all that are not."""
    if draft.rest_open:
        given = " ".join(f"{name}={setting(draft, name)}" for name in closed)
        return f"leave out {given}, so that the plan chooses {'it' if len(closed) == 1 else 'them'}"
    return f"use {' '.join(f'{name}=auto' for name in closed)}"


def _larger_or_shorter(search: PlanSearch) -> str:
    """The next larger cluster of the same kind that has enough memory, or shorter sequences."""
    train, device = search.draft.train, search.cluster.device
    optimizer = search.draft.optimizer
    moments = 0 if optimizer.offload_moments else optimizer.facts.least_moments
    each_bytes = 2 * _ITEM_BYTES + optimizer.moment_bytes * moments
    state_bytes = each_bytes * count_parameters(search.draft.model).total
    for larger in _larger(search.cluster):
        if device.memory_bytes is not None and state_bytes > larger.devices * device.memory_bytes:
            continue
        batch = dataclasses.replace(train, batch_size=-(-train.batch_size // larger.devices) * larger.devices)
        grown = dataclasses.replace(search.draft, train=batch)
        if _fits_at_all(dataclasses.replace(search, draft=grown, cluster=larger)):
            same = batch.batch_size == train.batch_size
            return f"{larger.name} has enough memory" + ("" if same else f", with train.batch_size={batch.batch_size}")
    data = search.draft.data
    for shorter in (data.seq_len // times for times in _SHORTER if data.seq_len % times == 0):
        cut = dataclasses.replace(search.draft, data=dataclasses.replace(data, seq_len=shorter))
        if _fits_at_all(dataclasses.replace(search, draft=cut)):
            return f"use data.seq_len={shorter}, or a smaller model"
    return "use a smaller model, or devices with more memory: neither more of these nor shorter sequences are enough"


def _larger(cluster: Cluster) -> Iterator[Cluster]:
    """Clusters of the same kind, each with about twice as many devices as the last."""
    count = str(cluster.devices)
    for factor in _LARGER if cluster.name.endswith(count) else ():
        size = factor * cluster.devices
        for possible in (size, -(-size // _NODE) * _NODE):
            with contextlib.suppress(UserError):
                yield find_cluster(f"{cluster.name.removesuffix(count)}{possible}")
                break


def _fits_at_all(search: PlanSearch) -> bool:
    """Whether there is a mesh on which the model fits."""
    tried = (each for each in on_meshes(search.draft, search.cluster) if isinstance(each, Config))
    return any(too_large(search, each) is None or search.with_other_placements([each]) for each in tried)


def _no_mesh(draft: Draft, cluster: Cluster) -> str:
    """The requested mesh, and the nearest valid size of one of its axes."""
    fixed = {name: size for name, size in draft.mesh.sizes.items() if f"mesh.{name}" not in draft.open}
    text = " × ".join(f"mesh.{name}={size}" for name, size in fixed.items() if size != 1 or name in _ALWAYS_SHOWN)
    for name, size in sorted(fixed.items(), key=lambda axis: -axis[1]):
        others = dataclasses.replace(draft, open=draft.open | {f"mesh.{name}"})
        if possible := [sizes[name] for sizes in meshes(others, cluster)]:
            cure = f"use mesh.{name}={min(possible, key=lambda each: abs(each - size))}"
            break
    else:
        cure = "leave them out" if draft.rest_open else "use auto for all of them"
    return f"{text} is no mesh of {cluster.devices} devices: {cure}"
