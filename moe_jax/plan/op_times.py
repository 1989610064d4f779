"""The duration of one op of a block on a device: its matrix products, kernels, memory traffic and waits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from moe_jax.plan.clusters.hardware import Device
from moe_jax.plan.products import Direction, Product, products_seconds
from moe_jax.plan.task_times import task_seconds
from moe_jax.schedule.actions import Action
from moe_jax.schedule.shape import StepShape


@dataclass(frozen=True, kw_only=True)
class OpTimes:
    """The durations of the tasks of one op.

    A part of the batch has fewer rows, so its products may be less efficient than those of the whole batch.
    """

    device: Device
    products: tuple[Product, ...]
    weights_s: float  # to read the weights, for each part
    whole_s: Mapping[Direction, float]  # of the whole batch, shared by its parts
    kernels: Mapping[Direction, int]  # of each part
    recomputes: bool = False  # the backward pass repeats the forward products
    at_once: bool = False  # gradients are computed in the forward pass

    def of(self, direction: Direction, parts: float) -> float:
        """Seconds of one of equal parts of the batch, without start-up times of tasks."""
        if self.at_once:
            directions: tuple[Direction, ...] = ("F", "B", "W") if direction == "F" else ()
        else:
            directions = ("F", "B") if direction == "B" and self.recomputes else (direction,)
        each_part_s = sum(
            products_seconds(self.device, self.products, each, parts) + self.kernels.get(each, 0) * self.device.kernel_s
            for each in directions
        )
        shared: tuple[Direction, ...] = directions if self.at_once else (direction,)
        return each_part_s + sum(self.whole_s.get(each, 0.0) for each in shared) / parts

    def seconds(self, action: Action, shape: StepShape) -> float:
        """Seconds of one task."""
        return task_seconds(action, shape, self._of_task)

    def _of_task(self, direction: str, parts: int) -> float:
        if direction == "W" and not self.products:
            return 0.0
        return self.weights_s + self.of(cast(Direction, direction), parts)
