"""Which gradients are summed over which devices, and into how many chunks they are cut."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from moe_jax.config import Config
from moe_jax.plan.collective_costs import DeviceGroup, Fabric, group_over
from moe_jax.plan.resources import Owned, owned_parameters
from moe_jax.schedule.grad_buckets import cut

ITEM_BYTES = 4


class Sum(NamedTuple):
    """One reduction: a chunk of an owner's gradients, of which each of so many `parts` goes to other devices."""

    group: DeviceGroup
    held_bytes: float
    parts: int = 1

    @property
    def sent_bytes(self) -> float:
        """That leave a device: to scatter it a share goes around once, and its own part comes back from the others."""
        back = 2 * (1 - self.parts / self.group.ranks) / self.parts
        return (1 - 1 / self.parts + back) * self.held_bytes

    def seconds(self, fabric: Fabric) -> float:
        """On a cluster's links."""
        return fabric.ring(self.sent_bytes, self.group, "all_reduce" if self.parts == 1 else "reduce_scatter")


def sums_of(config: Config, mesh: Mapping[str, int], bucket_cap_mb: float | None) -> tuple[tuple[Sum, ...], ...]:
    """Of the embedding, each block, and the head; without a limit an owner's gradients of one group are one chunk."""
    parts = parts_of(config, mesh)
    held = (held_by(owned, config, mesh) for owned in owned_parameters(config.model))
    return tuple(_of_owner(each, bucket_cap_mb, parts) for each in held)


def held_by(owned: Owned, config: Config, mesh: Mapping[str, int]) -> Counter[DeviceGroup]:
    """Parameters of one device, by the devices of its pipeline stage that hold the same ones."""
    expert, tensor = config.mesh.expert_ranks(mesh), mesh["tensor"]
    slots, experts = config.expert_slots(mesh), max(config.model.moe.num_experts, 1)
    everyone, tensor_apart, copies = (group_over(axes, mesh) for axes in _axes_of_copies(config))
    of_group: Counter[DeviceGroup] = Counter()  # where an axis has one rank, several are the same devices
    of_group[everyone] += owned.whole
    of_group[tensor_apart] += owned.heads_and_hidden // tensor
    of_group[copies] += (owned.expert // (expert * tensor) + owned.expert_whole // expert) * slots // experts
    return of_group


def parts_of(config: Config, mesh: Mapping[str, int]) -> dict[DeviceGroup, int]:
    """Parts that ZeRO cuts what a group holds into: over as many devices as divide the model's width, by whole axes.

    Nearly every array has that dimension; few have one that more devices divide.
    """
    width = config.model.hidden_size if config.optimizer.zero else 1
    held = (([mesh[axis] for axis in ("data", *axes)], group_over(axes, mesh)) for axes in _axes_of_copies(config))
    return {group: _most_dividing(width, tuple(sizes)) for sizes, group in held}


@functools.lru_cache(maxsize=1024)
def _most_dividing(width: int, sizes: tuple[int, ...]) -> int:
    ways = (math.prod(some) for count in range(len(sizes) + 1) for some in itertools.combinations(sizes, count))
    return max(ranks for ranks in ways if width % ranks == 0)


def _axes_of_copies(config: Config) -> tuple[tuple[str, ...], ...]:
    """Axes of a stage, beside data, whose ranks hold the same: of what all hold, what tensor ranks cut, and experts."""
    copies = tuple(axis for axis in ("context", "expert") if axis not in config.mesh.expert_axes)
    return ("context", "expert", "tensor"), ("context", "expert"), copies


def own_parameters(owned: Iterable[Owned], config: Config, mesh: Mapping[str, int]) -> float:
    """Parameters whose moments a device has; ZeRO cuts them over the devices that hold the same ones."""
    parts, total = parts_of(config, mesh), 0.0
    for each, owners in Counter(owned).items():  # most blocks are alike
        held = held_by(each._replace(whole=each.whole - each.biases), config, mesh).items()
        total += owners * sum(count / parts[group] for group, count in held)
    return total


def _of_owner(
    held: Counter[DeviceGroup], bucket_cap_mb: float | None, parts: Mapping[DeviceGroup, int]
) -> tuple[Sum, ...]:
    shared = {group: count for group, count in held.items() if group.ranks > 1 and count}
    groups, ranks = tuple(shared), [parts[group] for group in shared]
    sizes = [count // each for count, each in zip(shared.values(), ranks, strict=True)]
    chunks = cut(sizes, bucket_cap_mb, [ITEM_BYTES * each for each in ranks])
    return tuple(
        Sum(groups[group], (stop - start) * ranks[group] * ITEM_BYTES, ranks[group]) for group, start, stop in chunks
    )
