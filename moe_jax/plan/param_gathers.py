"""What devices gather from each other if parameters are sharded (`optimizer.zero=3`): bytes and seconds."""

from collections.abc import Mapping
from typing import NamedTuple

from moe_jax.config import Config
from moe_jax.plan.collective_costs import CollectiveCosts, DeviceGroup
from moe_jax.plan.gradients import params_by_group, parts_of, shard_groups
from moe_jax.plan.resources import Owned, owned_parameters
from moe_jax.plan.work import ITEM_BYTES
from moe_jax.schedule.scanned import ScannedBlocks


class Gathered(NamedTuple):
    """Parameters that a device gathers at once, from the devices that would have the same ones."""

    group: DeviceGroup  # which have all shards
    sent_bytes: float  # that leave a device: (P - 1)/P of the whole, over P ranks

    def seconds(self, collectives: CollectiveCosts) -> float:
        """Seconds on a cluster's links."""
        return collectives.ring(self.sent_bytes, self.group)


def gathered_bytes(config: Config, mesh: Mapping[str, int]) -> tuple[dict[str, float], ...]:
    """The bytes that leave a device in each gather of a step, by owner and op; () if it has none."""
    if config.param_gather == "none":
        return ()
    return tuple(
        {op: sum(each.sent_bytes for each in gathers) for op, gathers in owner.items()}
        for owner in param_gathers(config, mesh)
    )


def gathered_parameter_bytes(config: Config, mesh: Mapping[str, int]) -> float:
    """Bytes of the parameters that a device has gathered at a time: the embedding or the head, and the blocks of one
    scan iteration, or with "prefetch" of two. A plain step gathers the embedding and the head together.
    """
    if config.param_gather == "none":
        return 0.0
    model, item = config.model, ITEM_BYTES[config.train.compute_dtype]
    shards, owners = parts_of(config, mesh), owned_parameters(model)

    def gathered(owned: Owned) -> float:
        counts = params_by_group(owned, config, mesh).items()
        return sum(count for group, count in counts if shards[group] > 1)

    at_once = (2 if config.param_gather == "prefetch" else 1) * config.schedule.unroll
    counts = [(count, gathered(owned)) for owned, count in owners.blocks]
    blocks = min(at_once * max(own for _, own in counts), sum(count * own for count, own in counts))
    ends = sorted([gathered(owners[0]), gathered(owners[-1])])
    return item * blocks + 4 * (ends[-1] if config.step_facts.orders_tasks else sum(ends))


def shard_cast_bytes(config: Config, mesh: Mapping[str, int]) -> float:
    """Bytes of this device's shards of all blocks in the compute type, of a step that runs its blocks in a loop; 0 if
    there is no cast or no loop. They are what XLA:TPU casts once, before the loop.
    """
    facts, dtype, model = config.step_facts, config.train.compute_dtype, config.model
    loop = ScannedBlocks.of_config(config)
    if config.param_gather == "none" or dtype == "float32" or not facts.orders_tasks or loop is None:
        return 0.0
    shards = parts_of(config, mesh)

    def own(owned: Owned) -> float:
        if model.moe.expert_matmuls == "fp8":  # no cast of experts alone
            owned = owned._replace(expert=0, expert_whole=0)
        return sum(count / shards[group] for group, count in params_by_group(owned, config, mesh).items())

    return ITEM_BYTES[dtype] * sum(count * own(owned) for owned, count in owned_parameters(model).blocks)


def shard_transposes_bytes(config: Config, mesh: Mapping[str, int]) -> float:
    """Bytes of float32 copies of this device's shards of all experts; 0 if it has one or all experts of each block.

    XLA:GPU transposes them once, before its loop over blocks, so that what is gathered of a matrix is contiguous.
    """
    local_experts = config.model.moe.num_experts // config.mesh.expert_ranks(mesh)
    if config.param_gather == "none" or local_experts == config.model.moe.num_experts or local_experts == 1:
        return 0.0
    shards, found = parts_of(config, mesh), 0.0
    for owned, blocks in owned_parameters(config.model).blocks:
        experts = params_by_group(Owned(expert=owned.expert, expert_whole=owned.expert_whole), config, mesh)
        found += 4 * blocks * sum(count / shards[group] for group, count in experts.items() if shards[group] > 1)
    return found


def whole_gathers(owned: Owned, config: Config, mesh: Mapping[str, int]) -> Mapping[DeviceGroup, float]:
    """Bytes of an owner's parameters on a device if all are gathered at once, by the devices that have the same ones:
    updated ones in float32, and with pipeline stages and sharded parameters those of the step, as in `param_gathers`.
    """
    counts = params_by_group(owned, config, mesh)
    if config.optimizer.zero < 3:
        return {group: 4.0 * count for group, count in counts.items()}
    item, of_expert = _item_bytes(config)
    experts = params_by_group(Owned(expert=owned.expert, expert_whole=owned.expert_whole), config, mesh)
    return {group: item * count + (of_expert - item) * experts.get(group, 0) for group, count in counts.items()}


def _item_bytes(config: Config) -> tuple[float, float]:
    """Bytes of a gathered number, and of one of an expert."""
    item = ITEM_BYTES[config.train.compute_dtype]
    if config.model.moe.expert_matmuls != "fp8":
        return item, item
    return item, 1 if config.step_kind == "scheduled" else 4


def param_gathers(config: Config, mesh: Mapping[str, int]) -> tuple[dict[str, tuple[Gathered, ...]], ...]:
    """The gathers of the embedding, each block, and the head, by op.

    All are gathered in the compute type, but in float32 an embedding whose rows have a multiplier. Experts whose
    products round them to 8 bits are gathered in these by scheduled steps, and by others in float32.
    """
    parts, owners, hybrid = parts_of(config, mesh), owned_parameters(config.model), shard_groups(config, mesh)

    def gathered(owned: Owned, item: float) -> tuple[Gathered, ...]:
        counts = params_by_group(owned, config, mesh)
        return tuple(
            Gathered(hybrid[group].shards if hybrid else group, (1 - 1 / parts[group]) * count * item)
            for group, count in counts.items()
            if count
        )

    item, of_expert = _item_bytes(config)

    def block(owned: Owned) -> dict[str, tuple[Gathered, ...]]:
        experts = Owned(expert=owned.expert, expert_whole=owned.expert_whole)
        rest = owned._replace(expert=0, expert_whole=0)
        return {"attend": gathered(rest, item), "expert": gathered(experts, of_expert)}

    found = {owned: block(owned) for owned in set(owners[1:-1])}
    return (
        {"embed": gathered(owners[0], item if config.model.embedding_multiplier == 1 else 4)},
        *(found[owned] for owned in owners[1:-1]),
        {"head": gathered(owners[-1], item)},
    )
