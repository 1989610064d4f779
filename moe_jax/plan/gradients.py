"""Which gradients are summed over which devices, and into how many chunks they are cut."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from moe_jax.config import Config
from moe_jax.plan.fabric import Group, group_over
from moe_jax.plan.resources import Owned, owned_parameters
from moe_jax.schedule.grad_chunks import cut

_ITEM_BYTES = 4


class Sum(NamedTuple):
    """One reduction: a chunk of an owner's gradients."""

    group: Group
    held_bytes: int

    @property
    def sent_bytes(self) -> float:
        """That leave a device: twice its share, as each sum goes around once and comes back."""
        return 2 * (1 - 1 / self.group.ranks) * self.held_bytes


def sums_of(config: Config, mesh: Mapping[str, int], chunk_mb: float | None) -> tuple[tuple[Sum, ...], ...]:
    """Of the embedding, each block, and the head; without a limit an owner's gradients of one group are one chunk."""
    return tuple(_of_owner(held_by(owned, config, mesh), chunk_mb) for owned in owned_parameters(config.model))


def held_by(owned: Owned, config: Config, mesh: Mapping[str, int]) -> Counter[Group]:
    """Parameters of one device, by the devices of its pipeline stage that hold the same ones."""
    expert, tensor = config.mesh.expert_ranks(mesh), mesh["tensor"]
    copies = [axis for axis in ("context", "expert") if axis not in config.mesh.expert_axes]
    of_group: Counter[Group] = Counter()  # where an axis has one rank, several are the same devices
    of_group[group_over(("context", "expert", "tensor"), mesh)] += owned.whole
    of_group[group_over(("context", "expert"), mesh)] += owned.heads_and_hidden // tensor
    of_group[group_over(copies, mesh)] += owned.expert // (expert * tensor) + owned.expert_whole // expert
    return of_group


def with_moments(owned: Iterable[Owned], config: Config, mesh: Mapping[str, int]) -> float:
    """Parameters whose moments a device has; cut over devices that hold the same ones, if they are sharded."""
    sharded, total = config.optimizer.sharded, 0.0
    for each, owners in Counter(owned).items():  # most blocks are alike
        held = held_by(each, config, mesh).items()
        total += owners * sum(count / (group.ranks if sharded else 1) for group, count in held)
    return total


def _of_owner(held: Counter[Group], chunk_mb: float | None) -> tuple[Sum, ...]:
    shared = {group: count for group, count in held.items() if group.ranks > 1 and count}
    chunks = cut(tuple(shared.values()), chunk_mb)
    groups = tuple(shared)
    return tuple(Sum(groups[chunk.group], (chunk.stop - chunk.start) * _ITEM_BYTES) for chunk in chunks)
