"""The memory of a training step on one device, by purpose."""

from dataclasses import dataclass, fields
from typing import Literal

Moment = Literal["head", "backward", "update"]
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

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "moment"}

    @property
    def total(self) -> int:
        """The bytes that XLA allocates: arguments, temporaries, and results that do not overwrite an argument."""
        return sum(self.parts.values())

    @property
    def state(self) -> int:
        """Bytes in use between steps."""
        return self.parameters + self.optimizer
