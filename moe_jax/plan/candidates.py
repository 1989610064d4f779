"""The meshes and settings that a plan chooses from: every mesh that the sizes allow, and the choices on each mesh.

Only settings that a draft leaves open are chosen; the others are as the draft has them. Context ranks, which shard
sequences, are placed relative to expert ranks as MoNTA does ("Cluster Expansion").
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from moe_jax.config import Config, ScheduleConfig, Sections
from moe_jax.config.draft import Draft, sections_of
from moe_jax.config.layer_layout import Stages, check_blocks
from moe_jax.config.registry import PIPELINE_FACTS, POLICY_FACTS
from moe_jax.config.validate import check_batch_split, check_mesh
from moe_jax.errors import ConfigError
from moe_jax.plan.clusters import Cluster


class Placement(NamedTuple):
    """The axes of a mesh, the one with the nearest neighbours first, and the reason."""

    axes: tuple[str, ...]
    shared: bool  # whether the same ranks shard sequences and experts
    reason: str


def place(context: int, expert: int, tensor: int, fast_devices: int) -> Placement:
    """The placement for these numbers of ranks, with fast links between `fast_devices` neighbours.

    Context and expert ranks have axes of their own if there are fewer context ranks and fast links span both, or if
    neither number divides the other; else they share one axis of the larger number.
    """
    spanned = tensor * expert * context
    smaller, larger = sorted((context, expert))
    own = ("tensor", "expert", "context", "pipeline", "data")
    if context < expert and spanned <= fast_devices:
        reason = f"context={context} is less than expert={expert}, and fast links join {fast_devices} devices"
        return Placement(own, False, reason)
    if larger % smaller:
        return Placement(own, False, f"context={context} and expert={expert} do not divide each other")
    if context >= expert:
        reason = f"context={context} is at least expert={expert}: the ranks of a sequence hold all experts"
    else:
        reason = f"fast links join {fast_devices} devices, not tensor × expert × context = {spanned}"
    return Placement(("tensor", "expert+context", "pipeline", "data"), True, reason)


CHUNKS_MB = (8.0, 32.0, 128.0)
HEAD_BLOCKS = (0, 1, 2, 4)  # the head counts as this many periods of blocks
MOST_MICROBATCHES = 8
_PIECE = 512  # tokens of an attention tile; a context rank has at least two tiles of each sequence
_CUT = ("context", "tensor", "expert", "pipeline")
CONTEXT_FORMS = ("ring", "all_gather")

Settings = Mapping[str, object]  # settings of one section
Overrides = Mapping[str, Settings]  # settings that override those of several sections


class Reason(NamedTuple):
    """Why a mesh cannot be used."""

    text: str
    needed_bytes: float | None = None  # per device, if its memory is too small
    parameters_alone: bool = False  # whether these are the bytes of parameters alone, which are too large already


@dataclass(frozen=True)
class Refused:
    """A mesh that cannot be used, with the reason. Few of the reasons are read, so they are found when they are."""

    mesh: str
    find_reason: Callable[[], Reason]

    @functools.cached_property
    def why(self) -> Reason:
        """The reason, with what it needs."""
        return self.find_reason()

    @property
    def reason(self) -> str:
        """The reason as text."""
        return self.why.text


def on_meshes(draft: Draft, cluster: Cluster) -> Iterator[Config | Refused]:
    """The draft on every mesh of the cluster's devices that shards experts and tokens; expert ranks are neighbours.

    Tensor ranks stay inside a node, because they wait for each other in every block. Experts are sharded over context
    ranks, too, if the placement rule suggests it and the numbers allow it; over tensor ranks, too, if hot ones are
    copied, which only whole ones are.
    """
    for sizes in meshes(draft, cluster):
        try:
            least_parts = _least_parts(draft, sizes)
            copies = draft.exchange.hot_experts > 0 and sizes["tensor"] > 1
            mesh = {**sizes, "experts_over_context": _rule(draft, cluster, sizes), "experts_over_tensor": copies}
            check_mesh(draft.unchecked(draft, mesh=mesh))  # no setting helps a mesh that is invalid itself
            tried = _on_mesh(mesh, least_parts)
            yield next(choices(draft, draft, tried), None) or _chosen(draft, draft, next(_on_mesh(mesh, least_parts)))
        except ConfigError as error:
            yield Refused(mesh_text(sizes), functools.partial(Reason, str(error)))


def _on_mesh(mesh: Mapping[str, Any], least_parts: Iterable[int]) -> Iterator[Overrides]:
    """Settings to try on a mesh, until one is valid."""
    staged = mesh["pipeline"] > 1
    for parts in least_parts:
        for pipeline in pipelines() if staged else ({},):
            for each in guesses() if staged else schedules():
                yield {
                    "mesh": mesh,
                    "train": {"grad_accumulation": parts},
                    "schedule": {**each, **pipeline},
                    "exchange": {"context_form": "all_gather" if staged else CONTEXT_FORMS[0]},
                }


def meshes(draft: Draft, cluster: Cluster) -> Iterator[dict[str, int]]:
    """The possible numbers of devices along the axes; axes that are not open are as in the draft."""
    sizes = divisors(cluster.devices)
    experts = max(draft.model.moe.num_experts, 1)
    allowed = {
        "context": [size for size in sizes if size == 1 or draft.data.seq_len % (2 * size * _PIECE) == 0],
        "tensor": [size for size in sizes if size <= cluster.node_devices],
        "expert": [size for size in sizes if experts % size == 0],
        "pipeline": [size for size in sizes if size <= max(draft.model.num_layers, 1)],
        "data": sizes,
    }
    for axis, size in draft.mesh.sizes.items():
        if f"mesh.{axis}" not in draft.open:
            allowed[axis] = [size] if size in sizes else []
    for context, tensor, expert, pipeline in itertools.product(*(allowed[axis] for axis in _CUT)):
        data, rest = divmod(cluster.devices, context * tensor * expert * pipeline)
        if rest == 0 and data in allowed["data"]:
            yield {"data": data, "expert": expert, "pipeline": pipeline, "tensor": tensor, "context": context}


def _rule(draft: Draft, cluster: Cluster, sizes: Mapping[str, int]) -> bool:
    context, expert = sizes["context"], sizes["expert"]
    local_experts = draft.model.moe.num_experts / (context * expert)
    if context == 1 or local_experts < 1 or local_experts % 1:
        return False
    return place(context, expert, sizes["tensor"], cluster.node_devices).shared


def other_placements(draft: Draft, base: Config) -> Iterator[Config]:
    """The config with other placements of experts, as far as they are possible.

    Experts are sharded over expert ranks only, or over context ranks or tensor ranks, too.
    """
    axes = [axis for axis in ("context", "tensor") if base.mesh.sizes[axis] > 1]
    others: list[Overrides] = []
    for over in itertools.product((False, True), repeat=len(axes)):
        mesh = {f"experts_over_{axis}": is_over for axis, is_over in zip(axes, over, strict=True)}
        # tensor ranks that hold whole experts have one form
        form = {"exchange": {"tensor_form": "sharded"}} if mesh.get("experts_over_tensor") else {}
        others.append({"mesh": mesh, **form})
    yield from (each for each in choices(draft, base, others) if each != base)


def _least_parts(draft: Draft, sizes: Mapping[str, int]) -> list[int]:
    """The fewest parts of the batch that keep all pipeline stages busy. Raises ConfigError."""
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


def choices(
    draft: Draft, base: Sections, overrides: Iterable[Overrides], is_left_out: Callable[[Sections], bool] | None = None
) -> Iterator[Config]:
    """Each valid config once: `base` with each of the overrides, if it is not left out."""
    seen = set()
    for each in overrides:
        try:
            sections = _sections(draft, base, each)
            _check_batch(sections)  # first, since it fails most often and takes the least time
            if is_left_out and is_left_out(sections):
                continue
            found = _checked(sections)
        except ConfigError:
            continue
        if found not in seen:
            seen.add(found)
            yield found


class Kept:
    """Configs that are made when they are asked for, and kept."""

    def __init__(self, more: Iterator[Config]):
        self._more, self._made = more, list[Config]()

    def __iter__(self) -> Iterator[Config]:
        for place in itertools.count():
            if place == len(self._made):
                self._made.extend(itertools.islice(self._more, 1))
            if place == len(self._made):
                return
            yield self._made[place]


def _chosen(draft: Draft, base: Sections, overrides: Overrides) -> Config:
    """The config with these overrides. Raises ConfigError."""
    found = _checked(_sections(draft, base, overrides))
    _check_batch(found)
    return found


def _sections(draft: Draft, base: Sections, overrides: Overrides) -> Sections:
    """The settings with these overrides, not validated. Raises ConfigError for a policy that cuts missing experts."""
    schedule = dict(overrides.get("schedule", {}))
    if draft.model.moe.num_experts == 0 and POLICY_FACTS.of(str(schedule.get("policy"))).cuts == "capacity":
        raise ConfigError(f"schedule.policy={schedule['policy']} cuts slots of experts, and the model has none")
    stages = overrides.get("mesh", {}).get("pipeline", base.mesh.pipeline)
    order = PIPELINE_FACTS.of(str(schedule.get("pipeline", base.schedule.pipeline)))
    if stages != 1 or not order.needs_stages:  # gradients are summed after the last tick
        schedule |= {"grad_reduce": "end", "bucket_cap_mb": None}
    if "schedule.grad_reduce" not in draft.open and draft.schedule.grad_reduce != "bucketed":
        schedule["bucket_cap_mb"] = None
    return draft.unchecked(base, **{**overrides, "schedule": schedule})


def _check_batch(sections: Sections) -> None:
    check_batch_split(sections, sections.mesh.data * sections.mesh.expert)


def _checked(sections: Sections) -> Config:
    """The settings as a config. Raises ConfigError."""
    found = Config(**sections_of(sections))
    Stages.of(found)
    return found


def schedules() -> Iterator[Settings]:
    """Every policy and degree, with forward and backward degrees varied separately, and buckets of one size."""
    yield plain()
    for degree in divisors(MOST_MICROBATCHES):
        yield from (scheduled(policy, degree) for policy in policies("capacity"))
        for backward in divisors(degree):
            yield from (scheduled(policy, degree, backward) for policy in policies("batch"))
    for degree in divisors(MOST_MICROBATCHES):
        for chunks in divisors(MOST_MICROBATCHES // degree)[1:]:
            yield from (scheduled(policy, degree, chunks=chunks) for policy in policies("batch"))


def policies(cuts: Literal["batch", "capacity"]) -> list[str]:
    """The policies that a plan tries, among those that split the batch or the capacity slots."""
    return [name for name, facts in POLICY_FACTS.items() if facts.planned and facts.cuts == cuts]


@functools.cache
def guesses() -> tuple[Settings, ...]:
    """Good first guesses: scheduled steps, which store exchanged rows, and a plain step, which repeats exchanges."""
    batch = [scheduled(policy, degree) for policy in policies("batch") for degree in (2, 1)]
    return *batch, *(scheduled(policy, 2) for policy in policies("capacity")), plain()


def plain() -> Settings:
    """The settings of a step without a schedule, which are the defaults."""
    names = ("policy", "microbatches", "backward_microbatches", "expert_chunks", "weight_grad", "grad_reduce")
    return {name: getattr(ScheduleConfig(), name) for name in (*names, "bucket_cap_mb")}


def scheduled(policy: str, degree: int, backward: int | None = None, chunks: int = 1) -> Settings:
    """The settings of a scheduled step with everything that hides communication."""
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
    """The pipeline schedules, and how many model chunks each stage has."""
    for name, facts in sorted(PIPELINE_FACTS.items(), key=lambda part: part[1].tried):
        yield from ({"pipeline": name, "virtual_stages": chunks} for chunks in facts.planned)


def stageless() -> list[Settings]:
    """The pipeline schedules that overlap parts of a batch within one stage."""
    return [{"pipeline": name} for name, facts in PIPELINE_FACTS.items() if not facts.needs_stages]


def accumulations(config: Config) -> list[int]:
    """Possible numbers of parts of the batch, up to one sequence per device, at least as many as pipeline stages."""
    sequences = config.train.batch_size // (config.mesh.data * config.mesh.expert)
    return _parts(sequences, config.mesh.pipeline) or divisors(sequences)


def _parts(sequences: int, stages: int) -> list[int]:
    """Multiples of the number of stages, if there are any, because model chunks need them."""
    enough = [parts for parts in divisors(sequences) if parts >= stages]
    return [parts for parts in enough if parts % stages == 0] or enough


def mesh_text(sizes: Mapping[str, int], expert_axes: Collection[str] = ()) -> str:
    """The axes that have several ranks, e.g. `data=4 expert=8`, and those that shard experts, too."""
    axes = [f"{name}={size}" for name, size in sizes.items() if size > 1] or ["one device"]
    return " ".join([*axes, *(f"experts_over_{axis}" for axis in expert_axes if axis != "expert")])


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]
