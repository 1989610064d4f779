"""The memory of a step by its parts, at the moment with the highest use."""

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from moe_jax.config import Config, Sections
from moe_jax.plan.gradients import moment_bytes
from moe_jax.plan.offload import moments_at_once, offloaded_bytes
from moe_jax.plan.orthogonalizing import orthogonalizing_bytes
from moe_jax.plan.resources import Owned
from moe_jax.plan.units import size

Moment = Literal["head", "highest", "backward", "update"]
TEMPORARIES = ("activations", "gathered", "gradients", "head", "working")


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one device at the moment of a step with the highest use."""

    moment: Moment
    parameters: int
    optimizer: int  # moments
    batch: int
    activations: int  # stored for the backward pass
    gathered: int  # gathered parameters, and casts of this device's shards (`optimizer.zero=3`)
    gradients: int
    head: int  # logits and their gradient
    working: int  # workspace of a block's backward pass, its exchanges included, or of an update
    lost: int  # gaps between buffers, and memory that the compiler reserves
    # in the memory of the host, no part of the device's: moments, and activations (`optimizer.offload_moments`,
    # `schedule.offload_activations`)
    on_host: int = 0
    activations_on_host: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name."""
        return dict(zip(_PARTS, _bytes_of(self), strict=True))

    @functools.cached_property
    def total(self) -> int:
        """The bytes that XLA allocates: arguments, temporaries, and results that do not overwrite an argument."""
        return sum(_bytes_of(self))

    @property
    def host_text(self) -> str:
        """What is in the memory of the host; empty if nothing is."""
        found = {"moments": self.on_host, "activations": self.activations_on_host}
        texts = [f"{size(num_bytes)} of {name}" for name, num_bytes in found.items() if num_bytes]
        return f"{' and '.join(texts)} in host memory" if texts else ""

    @property
    def state(self) -> int:
        """Bytes in use between steps."""
        return self.parameters + self.optimizer


_PARTS = tuple(field.name for field in fields(StepMemory) if field.name != "moment" and "on_host" not in field.name)
_bytes_of = operator.attrgetter(*_PARTS)


def moments_of(owned: tuple[Owned, ...], config: Sections, mesh: Mapping[str, int], platform: str) -> dict[str, int]:
    """Bytes of the moments of one device, and of the average of parameters, by the names in `StepMemory`."""
    on_host = offloaded_bytes(owned, config, mesh, platform)
    return {"optimizer": moment_bytes(owned, config, mesh) - on_host, "on_host": on_host}


def update_bytes(config: Config, platform: str, mesh: Mapping[str, int]) -> float:
    """Bytes of the workspace of an update: of Muon's iterations, and of moments that are otherwise in host memory."""
    return orthogonalizing_bytes(config, platform, mesh) + moments_at_once(config, platform, mesh)
