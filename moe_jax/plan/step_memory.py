"""What a training step takes of a device's memory, by what it is for."""

from dataclasses import dataclass, fields
from typing import Literal

Moment = Literal["head", "backward", "update"]
TEMPORARIES = ("activations", "gradients", "head", "working")


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one device at the moment of a step that needs most."""

    moment: Moment
    parameters: int
    optimizer: int  # both moments
    batch: int
    activations: int  # kept for the backward pass
    gradients: int
    head: int  # logits and what is made of them
    working: int  # of the block that goes backward, its exchanges included
    lost: int  # gaps between buffers, and what the compiler reserves

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "moment"}

    @property
    def total(self) -> int:
        """What XLA allocates: arguments, temporaries, and results that take no argument's place."""
        return sum(self.parts.values())

    @property
    def state(self) -> int:
        """What is there between steps."""
        return self.parameters + self.optimizer
