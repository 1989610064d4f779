"""Memory of moments that are in the host's memory between updates (`optimizer.offload_moments`), and of activations
(`schedule.offload_activations`).

On CPUs both memories are one.
"""

from collections.abc import Mapping
from typing import NamedTuple

from moe_jax.config import Config, Sections
from moe_jax.plan.gradients import ITEM_BYTES, moment_bytes, own_parameters, parts_by_owner
from moe_jax.plan.resources import Owned, count_parameters
from moe_jax.schedule.scanned import ScannedBlocks

BYTES_AT_ONCE = 2**27  # of a float32 moment that are on the device: of as many blocks as fit, but at least one


def offloaded_bytes(owned: tuple[Owned, ...], config: Sections, mesh: Mapping[str, int], platform: str) -> int:
    """Bytes of one device's moments in the host's memory: also those of vectors, which are few and stay."""
    if not config.optimizer.offload_moments or platform == "cpu":
        return 0
    average = 0.0 if config.optimizer.ema_decay is None else ITEM_BYTES * own_parameters(owned, config, mesh)
    return moment_bytes(owned, config, mesh) - int(average)


def moments_at_once(config: Config, platform: str, mesh: Mapping[str, int]) -> float:
    """Bytes of the offloaded moments that an update has on the device at a time, at most."""
    model, settings = config.model, config.optimizer
    if not settings.offload_moments or platform == "cpu":
        return 0.0
    shards = parts_by_owner(config, mesh)
    ranks = config.mesh.expert_ranks(mesh) * config.mesh.expert_tensor_ranks(mesh) * shards["expert"]
    matrix = count_parameters(model).expert / (ranks * (3 if model.is_gated else 2))  # of all blocks
    of_block = matrix / max(model.block_kinds.count("moe"), 1)
    ends = model.vocab_size * model.hidden_size / shards["whole"]
    most = max(ends, min(matrix, max(of_block, BYTES_AT_ONCE / ITEM_BYTES)))
    return settings.facts.moments * settings.moment_bytes * most


class StoredActivations(NamedTuple):
    """Bytes that blocks store for the backward pass, in the memory of a device and of the host."""

    on_device: float
    on_host: float


def stored_activations(config: Config, platform: str, total: float) -> StoredActivations:
    """Where a step has the `total` bytes of its blocks: a device has all, or those of two iterations of the loop and
    of blocks outside of it, while the host has those of all but the highest.
    """
    loop = ScannedBlocks.of_config(config)
    if not config.schedule.offload_activations or platform == "cpu" or loop is None:
        return StoredActivations(total, 0.0)
    of_iteration = total * loop.size / config.model.num_blocks
    return StoredActivations(total - (loop.count - 2) * of_iteration, (loop.count - 1) * of_iteration)
