"""Ways to train a model on a cluster: every mesh that its sizes allow, and what can be chosen on one.

Only what a draft leaves open is chosen; the rest is as it says.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moe_jax.config import Config, ScheduleConfig, Sections
from moe_jax.config.draft import Draft
from moe_jax.config.layer_layout import Stages, check_blocks
from moe_jax.config.registry import PIPELINE_FACTS, POLICY_FACTS
from moe_jax.config.validate import check_batch_split
from moe_jax.errors import ConfigError
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.placement import place

CHUNKS_MB = (8.0, 32.0, 128.0)
HEAD_BLOCKS = (0, 1, 2, 4)  # periods of blocks that the head counts as
MOST_MICROBATCHES = 8
_PIECE = 512  # tokens of a sequence that a context rank has at least two of: a tile of its attention
_CUT = ("context", "tensor", "expert", "pipeline")
CONTEXT_FORMS = ("ring", "all_gather")

Settings = Mapping[str, object]  # of a section
Way = Mapping[str, Settings]  # settings of several sections


@dataclass(frozen=True)
class Refused:
    """A mesh that cannot work."""

    mesh: str
    reason: str
    needed_bytes: float | None = None  # of a device's memory, where it has too little


def with_rates(schedule: ScheduleConfig, cluster: Cluster) -> ScheduleConfig:
    """Those that training orders tasks by: the cluster's, where none are given."""
    device, near, far = cluster.device, cluster.levels[0], cluster.levels[-1]
    rates = {
        "device_tflops": device.matrix_flops_per_s * device.matrix_efficiency / 1e12,
        "link_gb_per_s": 1e-9 / near.line.beta_s,
        "network_gb_per_s": 1e-9 / far.line.beta_s,
    }
    known: dict[str, Any] = {name: float(f"{rate:.4g}") for name, rate in rates.items()}
    return dataclasses.replace(
        schedule, **{name: rate for name, rate in known.items() if getattr(schedule, name) is None}
    )


def on_meshes(draft: Draft, cluster: Cluster) -> Iterator[Config | Refused]:
    """The draft on every mesh of the cluster's devices that cuts experts and tokens; expert ranks are neighbours.

    Tensor ranks stay inside a node: they wait for each other in every block. Experts are cut over context ranks, too,
    where a rule says so, and the numbers allow it.
    """
    for sizes in meshes(draft, cluster):
        try:
            ways: list[Way] = [
                {
                    "mesh": {**sizes, "experts_over_context": _rule(draft, cluster, sizes)},
                    "train": {"grad_accumulation": parts},
                    "schedule": {**each, **pipeline},
                    "exchange": {"context_form": CONTEXT_FORMS[0] if sizes["pipeline"] == 1 else "all_gather"},
                }
                for parts in _least_parts(draft, sizes)
                for pipeline in (pipelines() if sizes["pipeline"] > 1 else ({},))
                for each in (guesses() if sizes["pipeline"] > 1 else schedules())
            ]
            yield next(choices(draft, draft, ways), None) or _chosen(draft, draft, ways[0])
        except ConfigError as error:
            yield Refused(mesh_text(sizes), str(error))


def meshes(draft: Draft, cluster: Cluster) -> Iterator[dict[str, int]]:
    """Devices along the axes; those that are not open are as the draft says."""
    ways = divisors(cluster.devices)
    experts = max(draft.model.moe.num_experts, 1)
    allowed = {
        "context": [size for size in ways if size == 1 or draft.data.seq_len % (2 * size * _PIECE) == 0],
        "tensor": [size for size in ways if size <= cluster.node_devices],
        "expert": [size for size in ways if experts % size == 0],
        "pipeline": [size for size in ways if size <= max(draft.model.num_layers, 1)],
        "data": ways,
    }
    for axis, size in draft.mesh.sizes.items():
        if f"mesh.{axis}" not in draft.open:
            allowed[axis] = [size] if size in ways else []
    for context, tensor, expert, pipeline in itertools.product(*(allowed[axis] for axis in _CUT)):
        data, rest = divmod(cluster.devices, context * tensor * expert * pipeline)
        if rest == 0 and data in allowed["data"]:
            yield {"data": data, "expert": expert, "pipeline": pipeline, "tensor": tensor, "context": context}


def _rule(draft: Draft, cluster: Cluster, sizes: Mapping[str, int]) -> bool:
    context, expert = sizes["context"], sizes["expert"]
    held = draft.model.moe.num_experts / (context * expert)
    if context == 1 or held < 1 or held % 1:
        return False
    return place(context, expert, sizes["tensor"], cluster.node_devices).shared


def elsewhere(draft: Draft, base: Config) -> Iterator[Config]:
    """A config with its experts over context ranks, too, or over expert ranks alone, if that is possible."""
    if base.mesh.context > 1:
        other: Way = {"mesh": {"experts_over_context": not base.mesh.experts_over_context}}
        yield from (each for each in choices(draft, base, [other]) if each != base)


def _least_parts(draft: Draft, sizes: Mapping[str, int]) -> list[int]:
    """Parts of the batch that keep all pipeline stages busy, as few as can be. Raises ConfigError."""
    stages, batch = sizes["pipeline"], draft.train.batch_size
    check_blocks(draft.model, stages)
    shards = sizes["data"] * sizes["expert"]
    if "train.grad_accumulation" not in draft.open or batch % shards:
        return [1]
    if found := _parts(batch // shards, stages):
        return found[:2]
    raise ConfigError(
        f"train.batch_size={batch} has {batch // shards} sequences for each of data × expert = {shards}, fewer than "
        f"mesh.pipeline={stages} stages: use train.batch_size={stages * shards} or more"
    )


def choices(draft: Draft, base: Sections, ways: Iterable[Way]) -> Iterator[Config]:
    """Each config that is possible, once."""
    seen = set()
    for way in ways:
        try:
            found = _chosen(draft, base, way)
        except ConfigError:
            continue
        if found not in seen:
            seen.add(found)
            yield found


def _chosen(draft: Draft, base: Sections, way: Way) -> Config:
    """Raises ConfigError."""
    schedule = dict(way.get("schedule", {}))
    stages = way.get("mesh", {}).get("pipeline", base.mesh.pipeline)
    order = PIPELINE_FACTS.of(str(schedule.get("pipeline", base.schedule.pipeline)))
    if stages != 1 or not order.needs_stages:  # sums behind the last tick
        schedule |= {"grad_reduce": "end", "bucket_cap_mb": None}
    if "schedule.grad_reduce" not in draft.open and draft.schedule.grad_reduce != "bucketed":
        schedule["bucket_cap_mb"] = None
    found = draft.choose(base, **{**way, "schedule": schedule})
    check_batch_split(found, found.mesh.data * found.mesh.expert)
    Stages.of(found)
    return found


def schedules() -> Iterator[Settings]:
    """Every policy and degree, forward and backward apart; with chunks of one size."""
    yield plain()
    for degree in divisors(MOST_MICROBATCHES):
        yield from (scheduled(policy, degree) for policy in policies("capacity"))
        for backward in divisors(degree):
            yield from (scheduled(policy, degree, backward) for policy in policies("batch"))
    for degree in divisors(MOST_MICROBATCHES):
        for chunks in divisors(MOST_MICROBATCHES // degree)[1:]:
            yield from (scheduled(policy, degree, chunks=chunks) for policy in policies("batch"))


def policies(cuts: Literal["batch", "capacity"]) -> list[str]:
    """Those that a plan tries, of those that cut the batch, or slots."""
    return [name for name, facts in POLICY_FACTS.items() if facts.planned and facts.cuts == cuts]


def guesses() -> tuple[Settings, ...]:
    """Good ones: scheduled, which keeps what was exchanged, and plain, which exchanges again what it does not keep."""
    batch = [scheduled(policy, degree) for policy in policies("batch") for degree in (2, 1)]
    return *batch, *(scheduled(policy, 2) for policy in policies("capacity")), plain()


def plain() -> Settings:
    """Nothing scheduled: as settings are by themselves."""
    names = ("policy", "microbatches", "backward_microbatches", "expert_chunks", "weight_grad", "grad_reduce")
    return {name: getattr(ScheduleConfig(), name) for name in (*names, "bucket_cap_mb")}


def scheduled(policy: str, degree: int, backward: int | None = None, chunks: int = 1) -> Settings:
    """With all that hides communication."""
    degrees = {
        "microbatches": degree,
        "backward_microbatches": None if backward == degree else backward,
        "expert_chunks": chunks,
    }
    return {
        "policy": policy,
        **degrees,
        "weight_grad": "greedy",
        "grad_reduce": "bucketed",
        "bucket_cap_mb": CHUNKS_MB[1],
    }


def pipelines() -> Iterator[Settings]:
    """Schedules of pipeline stages, and how many model chunks each stage holds."""
    for name, facts in sorted(PIPELINE_FACTS.items(), key=lambda part: part[1].tried):
        yield from ({"pipeline": name, "virtual_stages": chunks} for chunks in facts.planned)


def stageless() -> list[Settings]:
    """Schedules by which one stage runs parts of a batch beside each other."""
    return [{"pipeline": name} for name, facts in PIPELINE_FACTS.items() if not facts.needs_stages]


def accumulations(config: Config) -> list[int]:
    """Parts of the batch, down to one sequence of each device; at least as many as pipeline stages."""
    sequences = config.train.batch_size // (config.mesh.data * config.mesh.expert)
    return _parts(sequences, config.mesh.pipeline) or divisors(sequences)


def _parts(sequences: int, stages: int) -> list[int]:
    """Multiples of the number of stages, if there are any: model chunks need them."""
    enough = [parts for parts in divisors(sequences) if parts >= stages]
    return [parts for parts in enough if parts % stages == 0] or enough


def mesh_text(sizes: Mapping[str, int], experts_over_context: bool = False) -> str:
    """Axes that are cut, e.g. `data=4 expert=8`."""
    text = " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one device"
    return f"{text} experts_over_context" if experts_over_context else text


def divisors(number: int) -> list[int]:
    """From 1 up."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]
