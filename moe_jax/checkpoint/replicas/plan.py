"""The plan of a run's safety copies: their folders, and which pieces this process stores."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from moe_jax.checkpoint.checksums import names_of
from moe_jax.checkpoint.replicas.layout import Index, ReplicaLayout, ShardedArray, StoredPiece, layout_of
from moe_jax.config import Config
from moe_jax.distributed.hosts import nodes
from moe_jax.errors import ConfigError
from moe_jax.paths import is_bucket_url
from moe_jax.plan.units import size


@dataclass(frozen=True)
class SafetyPlan:
    """The safety copies of this process."""

    folder: Path  # of the run's safety copies, on this node
    node: int
    place: int  # number of this process among those of the node
    layout: ReplicaLayout

    @property
    def own_folder(self) -> Path:
        """The folder of this node's copies, which are lost with the node."""
        return self.folder / f"node-{self.node}"

    @property
    def own(self) -> tuple[StoredPiece, ...]:
        """Pieces of this process's devices that it stores."""
        return self.layout.own[jax.process_index()]

    @property
    def received(self) -> list[StoredPiece]:
        """Pieces of another node that this process stores."""
        return self.layout.received(jax.process_index())

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each piece that this process stores, by name."""
        return {stored.piece.name: stored.piece.num_bytes for stored in (*self.own, *self.received)}


def safety_plan(config: Config, shapes: Any) -> SafetyPlan | None:
    """Plan the safety copies of a state of these shapes; None if the config asks for none.

    All processes call it. Raises ConfigError if they cannot be made.
    """
    settings = config.checkpoint
    if not settings.safety_copies_every:
        return None
    home = Path(settings.safety_copies_dir)
    if not home.is_dir():
        raise ConfigError(
            f"checkpoint.safety_copies_dir={home} is no folder: name one in memory, or use "
            "checkpoint.safety_copies_every=0"
        )
    node_P = nodes()
    try:
        layout = layout_of(_sharded_arrays(shapes), _processes(shapes), node_P)
    except ValueError:
        raise ConfigError(
            f"checkpoint.safety_copies_every={settings.safety_copies_every} needs as many processes and devices on "
            "each host: start them so, or use checkpoint.safety_copies_every=0"
        ) from None
    run = hashlib.sha256(_place(config.log.dir).encode()).hexdigest()[:12]
    process = jax.process_index()
    place = node_P[:process].count(node_P[process])
    return SafetyPlan(home / f"moe_jax-{run}", node_P[process], place, layout)


def _place(log_dir: str) -> str:
    return log_dir if is_bucket_url(log_dir) else str(Path(log_dir).absolute())


def safety_text(config: Config, plan: SafetyPlan) -> str:
    """Describe the safety copies for the table that a run prints at its start."""
    every, received = config.checkpoint.safety_copies_every, sum(each.piece.num_bytes for each in plan.received)
    often = "every step" if every == 1 else f"every {every} steps"
    origin = "there is no other node" if len(plan.layout.own) == 1 else f"{size(received)} of it from another node"
    return f"{often} to {plan.folder}: twice {size(sum(plan.sizes.values()))} for this process ({origin})"


def index_of(slices: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """Return the start and stop of each slice."""
    return tuple(each.indices(extent)[:2] for each, extent in zip(slices, shape, strict=True))


def _sharded_arrays(shapes: Any) -> list[ShardedArray]:
    found = []
    for name, leaf in zip(names_of(shapes), jax.tree.leaves(shapes), strict=True):
        slices = leaf.sharding.devices_indices_map(leaf.shape)
        index_D = [index_of(slices[device], leaf.shape) for device in leaf.sharding.mesh.devices.flat]
        found.append(ShardedArray(name, leaf.dtype.itemsize, index_D))
    return found


def _processes(shapes: Any) -> list[int]:
    """Return the process of each device of the mesh."""
    mesh = jax.tree.leaves(shapes)[0].sharding.mesh
    return [device.process_index for device in mesh.devices.flat]
