"""Where a run's safety copies lie, and which this process makes."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from moe_jax.checkpoint.checksums import names_of
from moe_jax.checkpoint.replicas.layout import Index, Kept, ReplicaLayout, ShardedArray, layout_of
from moe_jax.config import Config
from moe_jax.distributed.processes import nodes
from moe_jax.errors import ConfigError
from moe_jax.plan.plan_text import size


@dataclass(frozen=True)
class SafetyPlan:
    """Of this process."""

    folder: Path  # of the run, on this node
    node: int
    place: int  # among the processes of the node
    layout: ReplicaLayout

    @property
    def own_folder(self) -> Path:
        """Which is lost with this node."""
        return self.folder / f"node-{self.node}"

    @property
    def own(self) -> tuple[Kept, ...]:
        return self.layout.own[jax.process_index()]

    @property
    def received(self) -> list[Kept]:
        return self.layout.received(jax.process_index())

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each piece that this process keeps."""
        return {kept.piece.name: kept.piece.num_bytes for kept in (*self.own, *self.received)}


def safety_plan(config: Config, shapes: Any) -> SafetyPlan | None:
    """For a state of these shapes; None: no copies are made. All processes call it. Raises ConfigError."""
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
        layout = layout_of(_cuts(shapes), _processes(shapes), node_P)
    except ValueError:
        raise ConfigError(
            f"checkpoint.safety_copies_every={settings.safety_copies_every} needs as many processes and devices on "
            "each host: start them so, or use checkpoint.safety_copies_every=0"
        ) from None
    run = hashlib.sha256(str(Path(config.log.dir).absolute()).encode()).hexdigest()[:12]
    process = jax.process_index()
    place = node_P[:process].count(node_P[process])
    return SafetyPlan(home / f"moe_jax-{run}", node_P[process], place, layout)


def safety_text(config: Config, plan: SafetyPlan) -> str:
    """For who starts the run."""
    every, received = config.checkpoint.safety_copies_every, sum(kept.piece.num_bytes for kept in plan.received)
    often = "every step" if every == 1 else f"every {every} steps"
    told = "there is no other node" if len(plan.layout.own) == 1 else f"{size(received)} of it from another node"
    return f"{often} to {plan.folder}: twice {size(sum(plan.sizes.values()))} for this process ({told})"


def index_of(slices: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """As plain numbers."""
    return tuple(each.indices(extent)[:2] for each, extent in zip(slices, shape, strict=True))


def _cuts(shapes: Any) -> list[ShardedArray]:
    found = []
    for name, leaf in zip(names_of(shapes), jax.tree.leaves(shapes), strict=True):
        slices = leaf.sharding.devices_indices_map(leaf.shape)
        index_D = [index_of(slices[device], leaf.shape) for device in leaf.sharding.mesh.devices.flat]
        found.append(ShardedArray(name, leaf.dtype.itemsize, index_D))
    return found


def _processes(shapes: Any) -> list[int]:
    """Of each device of the mesh."""
    mesh = jax.tree.leaves(shapes)[0].sharding.mesh
    return [device.process_index for device in mesh.devices.flat]
