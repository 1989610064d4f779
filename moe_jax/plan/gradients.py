"""Which gradients are summed over which devices, and the buckets that they are split into."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from moe_jax.config import Config, MeshConfig, OptimizerConfig, Sections
from moe_jax.config.sections import HashedOnce
from moe_jax.plan.collective_costs import CollectiveCosts, DeviceGroup, group_over
from moe_jax.plan.resources import Owned, owned_parameters
from moe_jax.schedule.grad_buckets import split_into_buckets

ITEM_BYTES = 4


class ShardGroups(NamedTuple):
    """The devices of hybrid sharding among those that would have the same parameters."""

    shards: DeviceGroup  # which have all shards together
    same: DeviceGroup  # which have the same shard


class Sum(NamedTuple):
    """One reduction: a bucket of an owner's gradients. With ZeRO it is scattered into `parts` shards."""

    group: DeviceGroup
    num_bytes: float
    parts: int = 1
    hybrid: ShardGroups | None = None  # if `optimizer.zero_axes` names the axes over which it is scattered

    @property
    def sent_bytes(self) -> float:
        """Bytes that leave a device.

        They are all shards but its own for the scatter, and then a ring all-reduce of its own shard.
        """
        back = 2 * (1 - self.parts / self.group.ranks) / self.parts
        return (1 - 1 / self.parts + back) * self.num_bytes

    def seconds(self, collectives: CollectiveCosts) -> float:
        """Seconds on a cluster's links."""
        if self.hybrid and self.parts > 1:
            shards, same = self.hybrid
            scattered_bytes, own_bytes = (1 - 1 / self.parts) * self.num_bytes, self.num_bytes / self.parts
            scattered_s = collectives.ring(scattered_bytes, shards, "reduce_scatter")
            return scattered_s + collectives.ring(2 * (1 - 1 / same.ranks) * own_bytes, same, "all_reduce")
        return collectives.ring(self.sent_bytes, self.group, "all_reduce" if self.parts == 1 else "reduce_scatter")


def sums_of(config: Config, mesh: Mapping[str, int], bucket_cap_mb: float | None) -> tuple[tuple[Sum, ...], ...]:
    """The reductions of the embedding, each block, and the head.

    Without a limit (`bucket_cap_mb=None`) an owner's gradients of one group are one bucket.
    """
    settings = bucket_cap_mb, _sharded_width(config), _Layout.of(config, mesh), config.optimizer.zero_axes is not None
    return tuple(_sums_of_owner(owned, *settings) for owned in owned_parameters(config.model))


_OWNERS = ("whole", "heads_and_hidden", "expert")  # in the order of `axes_of_copies`


@dataclass(frozen=True)
class _Layout(HashedOnce):
    """What decides which devices have the same parameters."""

    __hash__ = HashedOnce.__hash__

    expert_axes: tuple[str, ...]
    expert_ranks: int
    expert_tensor: int  # tensor ranks that share each expert
    num_experts: int
    slots: int  # of all ranks, for the experts of a block and their copies
    sizes: tuple[tuple[str, int], ...]  # of the mesh's axes
    sharding_axes: tuple[str, ...]  # over which ZeRO may shard

    @staticmethod
    def of(config: Sections, mesh: Mapping[str, int]) -> "_Layout":
        """The layout of a config on a mesh of these sizes."""
        settings = config.mesh, config.model.moe.num_experts, config.replicas, config.optimizer.sharding_axes
        return _layout(*settings, tuple(mesh.items()))

    @property
    def axes_of_copies(self) -> tuple[tuple[str, ...], ...]:
        """The axes of a stage, apart from data, with the same values on all ranks.

        Three cases: parameters that every device has, those that tensor ranks shard, and experts.
        """
        copies = tuple(axis for axis in ("context", "expert") if axis not in self.expert_axes)
        return ("context", "expert", "tensor"), ("context", "expert"), copies


@functools.lru_cache(maxsize=1024)
def _layout(
    axes: MeshConfig, num_experts: int, replicas: int, sharding: tuple[str, ...], sizes: tuple[tuple[str, int], ...]
) -> _Layout:
    mesh = dict(sizes)
    ranks = axes.expert_ranks(mesh)
    return _Layout(
        expert_axes=axes.expert_axes,
        expert_ranks=ranks,
        expert_tensor=axes.expert_tensor_ranks(mesh),
        num_experts=num_experts,
        slots=num_experts + replicas * ranks,
        sizes=sizes,
        sharding_axes=sharding,
    )


def params_by_group(owned: Owned, config: Sections, mesh: Mapping[str, int]) -> Mapping[DeviceGroup, int]:
    """Parameters of one device, by the group of devices of its pipeline stage that have the same ones."""
    return _params_by_group(owned, _Layout.of(config, mesh))


@functools.lru_cache(maxsize=2**14)
def _params_by_group(owned: Owned, layout: _Layout) -> Counter[DeviceGroup]:
    mesh = dict(layout.sizes)
    expert, tensor, experts = layout.expert_ranks, mesh["tensor"], max(layout.num_experts, 1)
    everyone, tensor_apart, copies = (group_over(axes, mesh) for axes in layout.axes_of_copies)
    of_group: Counter[DeviceGroup] = Counter()  # if an axis has one rank, several groups are equal
    of_group[everyone] += owned.whole
    of_group[tensor_apart] += owned.heads_and_hidden // tensor
    of_rank = owned.expert // (expert * layout.expert_tensor) + owned.expert_whole // expert
    of_group[copies] += of_rank * layout.slots // experts
    return of_group


def parts_of(config: Config, mesh: Mapping[str, int]) -> dict[DeviceGroup, int]:
    """The number of shards that ZeRO splits each group's state into: whole axes of ranks that divide the model width.

    Nearly every array has that dimension; few have one that more devices divide.
    """
    return _parts_of(_sharded_width(config), _Layout.of(config, mesh))


def shard_groups(config: Config, mesh: Mapping[str, int]) -> dict[DeviceGroup, ShardGroups]:
    """The devices of hybrid sharding by the group that they are of; {} unless `optimizer.zero_axes` names axes."""
    return {} if config.optimizer.zero_axes is None else _shard_groups(_Layout.of(config, mesh))


def _shard_groups(layout: _Layout) -> dict[DeviceGroup, ShardGroups]:
    sharding, mesh = layout.sharding_axes, dict(layout.sizes)

    def groups(axes: tuple[str, ...]) -> ShardGroups:
        inside, across = ([axis for axis in axes if (axis in sharding) is wanted] for wanted in (True, False))
        over_data = "data" in sharding
        return ShardGroups(
            group_over(inside, mesh, with_data=over_data), group_over(across, mesh, with_data=not over_data)
        )

    return {group_over(axes, mesh): groups(axes) for axes in layout.axes_of_copies}


def groups_by_owner(config: Config, mesh: Mapping[str, int]) -> dict[str, DeviceGroup]:
    """The devices that share the state of each owner's parameters with ZeRO, by the owner's name in `Owned`."""
    hybrid = shard_groups(config, mesh)
    groups = [group_over(axes, mesh) for axes in _Layout.of(config, mesh).axes_of_copies]
    return dict(zip(_OWNERS, [hybrid[each].shards if hybrid else each for each in groups], strict=True))


def parts_by_owner(config: Config, mesh: Mapping[str, int]) -> dict[str, int]:
    """The same by the axes that shard parameters, named as in `Owned`."""
    parts, axes = parts_of(config, mesh), _Layout.of(config, mesh).axes_of_copies
    return {owner: parts[group_over(each, mesh)] for owner, each in zip(_OWNERS, axes, strict=True)}


def _sharded_width(config: Sections) -> int:
    return config.model.hidden_size if config.optimizer.zero else 1


@functools.lru_cache(maxsize=2**12)
def _parts_of(width: int, layout: _Layout) -> dict[DeviceGroup, int]:
    mesh = dict(layout.sizes)
    sized_groups = (
        ([mesh[axis] for axis in ("data", *axes) if axis in layout.sharding_axes], group_over(axes, mesh))
        for axes in layout.axes_of_copies
    )
    return {group: _most_dividing(width, tuple(sizes)) for sizes, group in sized_groups}


@functools.lru_cache(maxsize=1024)
def _most_dividing(width: int, sizes: tuple[int, ...]) -> int:
    products = (math.prod(some) for count in range(len(sizes) + 1) for some in itertools.combinations(sizes, count))
    return max(ranks for ranks in products if width % ranks == 0)


def own_parameters(owned: tuple[Owned, ...], config: Sections, mesh: Mapping[str, int]) -> float:
    """Parameters with optimizer moments on one device. ZeRO shards them over devices that have the same parameters."""
    return _own_parameters(owned, _sharded_width(config), _Layout.of(config, mesh))


def moment_bytes(owned: tuple[Owned, ...], config: Sections, mesh: Mapping[str, int]) -> int:
    """Bytes of the optimizer's moments of one device, in its memory or the host's, and of the average of parameters.

    Adafactor's, of rows and columns, are not counted, and neither is the average of score biases.
    """
    return _moment_bytes(owned, config.optimizer, _sharded_width(config), _Layout.of(config, mesh))


@functools.lru_cache(maxsize=2**12)
def _moment_bytes(owned: tuple[Owned, ...], optimizer: OptimizerConfig, width: int, layout: _Layout) -> int:
    facts, own = optimizer.facts, _own_parameters(owned, width, layout)
    count = facts.moments * own
    if facts.hidden_matrix_moments is not None:
        hidden = _own_parameters(tuple(each.hidden_matrices for each in owned), width, layout)
        count -= (facts.moments - facts.hidden_matrix_moments) * hidden
    if facts.end_matrix_moments is not None:
        ends = _own_parameters(tuple(Owned(each.end_matrices) for each in owned), width, layout)
        count -= (facts.moments - facts.end_matrix_moments) * ends
    average = 0 if optimizer.ema_decay is None else ITEM_BYTES * own
    return int(optimizer.moment_bytes * count + average)


@functools.lru_cache(maxsize=2**14)
def _own_parameters(owned: tuple[Owned, ...], width: int, layout: _Layout) -> float:
    parts, total = _parts_of(width, layout), 0.0
    for each, owners in Counter(owned).items():  # most blocks are alike
        counts = _params_by_group(each._replace(whole=each.whole - each.biases), layout).items()
        total += owners * sum(count / parts[group] for group, count in counts)
    return total


@functools.lru_cache(maxsize=256)
def _sums_of_owner(
    owned: Owned, bucket_cap_mb: float | None, width: int, layout: _Layout, is_hybrid: bool
) -> tuple[Sum, ...]:
    """The reductions of one owner: cached because most blocks are alike, also those of models of another depth."""
    parts, hybrid = _parts_of(width, layout), _shard_groups(layout) if is_hybrid else {}
    counts = _params_by_group(owned, layout)
    shared = {group: count for group, count in counts.items() if group.ranks > 1 and count}
    groups, ranks = tuple(shared), [parts[group] for group in shared]
    sizes = [count // each for count, each in zip(shared.values(), ranks, strict=True)]
    chunks = split_into_buckets(sizes, bucket_cap_mb, [ITEM_BYTES * each for each in ranks])
    return tuple(
        Sum(groups[group], (stop - start) * ranks[group] * ITEM_BYTES, ranks[group], hybrid.get(groups[group]))
        for group, start, stop in chunks
    )
