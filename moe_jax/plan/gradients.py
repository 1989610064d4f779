"""Which gradients are summed over which devices, and into how many chunks they are cut."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from moe_jax.config import Config
from moe_jax.plan.fabric import Fabric, Group, group_over
from moe_jax.plan.resources import Owned, owned_parameters
from moe_jax.schedule.grad_chunks import cut

ITEM_BYTES = 4


class Sum(NamedTuple):
    """One reduction: a chunk of an owner's gradients. Scattered, each device gets the sum of its own part only."""

    group: Group
    held_bytes: float
    scattered: bool

    @property
    def sent_bytes(self) -> float:
        """That leave a device: its share goes around once, and comes back unless it is scattered."""
        return (1 if self.scattered else 2) * (1 - 1 / self.group.ranks) * self.held_bytes

    def seconds(self, fabric: Fabric) -> float:
        """On a cluster's links."""
        return fabric.ring(self.sent_bytes, self.group, "reduce_scatter" if self.scattered else "all_reduce")


def sums_of(config: Config, mesh: Mapping[str, int], chunk_mb: float | None) -> tuple[tuple[Sum, ...], ...]:
    """Of the embedding, each block, and the head; without a limit an owner's gradients of one group are one chunk."""
    scattered = config.optimizer.zero > 0
    held = (held_by(owned, config, mesh) for owned in owned_parameters(config.model))
    return tuple(_of_owner(each, chunk_mb, scattered) for each in held)


def held_by(owned: Owned, config: Config, mesh: Mapping[str, int]) -> Counter[Group]:
    """Parameters of one device, by the devices of its pipeline stage that hold the same ones."""
    expert, tensor = config.mesh.expert_ranks(mesh), mesh["tensor"]
    copies = [axis for axis in ("context", "expert") if axis not in config.mesh.expert_axes]
    of_group: Counter[Group] = Counter()  # where an axis has one rank, several are the same devices
    of_group[group_over(("context", "expert", "tensor"), mesh)] += owned.whole
    of_group[group_over(("context", "expert"), mesh)] += owned.heads_and_hidden // tensor
    of_group[group_over(copies, mesh)] += owned.expert // (expert * tensor) + owned.expert_whole // expert
    return of_group


def own_parameters(owned: Iterable[Owned], config: Config, mesh: Mapping[str, int]) -> float:
    """Parameters whose moments a device has; ZeRO cuts them over the devices that hold the same ones."""
    cut, total = config.optimizer.zero > 0, 0.0
    for each, owners in Counter(owned).items():  # most blocks are alike
        held = held_by(each, config, mesh).items()
        total += owners * sum(count / (group.ranks if cut else 1) for group, count in held)
    return total


def _of_owner(held: Counter[Group], chunk_mb: float | None, scattered: bool) -> tuple[Sum, ...]:
    shared = {group: count for group, count in held.items() if group.ranks > 1 and count}
    groups, ranks = tuple(shared), [group.ranks if scattered else 1 for group in shared]
    parts = [count // each for count, each in zip(shared.values(), ranks, strict=True)]
    chunks = cut(parts, chunk_mb, [ITEM_BYTES * each for each in ranks])
    return tuple(
        Sum(groups[group], (stop - start) * ranks[group] * ITEM_BYTES, scattered) for group, start, stop in chunks
    )
