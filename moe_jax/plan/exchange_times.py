"""Times of a step's exchanges of rows, and of the gathers and sums of these rows over tensor ranks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from moe_jax.config import Config
from moe_jax.config.ragged_rows import sends_ragged_rows
from moe_jax.plan.caching import cached_method
from moe_jax.plan.clusters import Device
from moe_jax.plan.collective_costs import CollectiveCosts, DeviceGroup, ExchangeChoice
from moe_jax.plan.hot_experts import leaving_bytes, sent_again
from moe_jax.plan.over_tensor import LinkStages, form_seconds
from moe_jax.plan.task_times import Transfer
from moe_jax.plan.work import ITEM_BYTES
from moe_jax.schedule.build import has_tensor_tasks


@dataclass(frozen=True)
class _Bytes:
    """The duration of a transfer by the bytes of its exchange."""

    of: Callable[[float], float]

    def seconds(self, amount: float, parts: int = 1) -> float:
        return self.of(amount / parts) if amount else 0.0


class ExchangeTimes:
    """Seconds by the bytes that a device has for all expert ranks, in the config's form over tensor ranks."""

    def __init__(self, config: Config, collectives: CollectiveCosts, device: Device):
        mesh, self._config = config.mesh.sizes, config
        self._settings, self._collectives = config.exchange, collectives
        self._copied_bytes_per_s = device.copied_bytes_per_s
        self._tensor, self._shared_by = mesh["tensor"], config.mesh.expert_tensor_ranks(mesh)
        self._experts = DeviceGroup(config.mesh.expert_ranks(mesh), self._shared_by)
        ragged = sends_ragged_rows(config, device.platform, self._shared_by)
        self._algorithm = "ragged" if ragged else config.exchange.algorithm
        self.has_gather_tasks = has_tensor_tasks(config, mesh)

    def choice(self, num_bytes: float) -> ExchangeChoice:
        """The algorithm of an all-to-all: the config's, or one that sends only rows that exist if training takes it, or
        the fastest one, with stages without permutes.
        """
        permutes = self._config.mesh.pipeline == 1  # which wait for the devices of all stages
        return self._collectives.exchange(num_bytes, self._experts, self._algorithm, permutes)

    @cached_method
    def seconds(self, num_bytes: float) -> float:
        """Seconds until all rows are where they are computed, gathers over tensor ranks included."""
        if self._shared_by == 1:
            return self.choice(num_bytes).seconds
        stages = LinkStages(self._between, self._gathered, lambda copied: 2 * copied / self._copied_bytes_per_s)
        whole, settings = num_bytes * self._tensor, self._settings
        return form_seconds(
            settings.tensor_form, whole, self._tensor, self._experts.ranks, settings.tensor_chunks, stages
        )

    def task_seconds(self, num_bytes: float) -> float:
        """Seconds of the task of an exchange: without the gather, if that is a task of its own."""
        return self.seconds(num_bytes) - (self.gather_seconds(num_bytes) if self.has_gather_tasks else 0.0)

    def gather_seconds(self, num_bytes: float) -> float:
        """Seconds to gather the exchanged rows of all tensor ranks, or to sum as many over them."""
        return self._gathered(num_bytes * (self._tensor - 1))

    @cached_property
    def copies_s(self) -> tuple[float, float]:
        """Seconds to send the copies of a block's hot experts in a forward pass, and in a backward pass to sum their
        gradients, and perhaps to send them again.
        """
        item = ITEM_BYTES[self._config.train.compute_dtype]
        leaving = leaving_bytes(self._config, self._experts.ranks, item)
        copied_s, summed_s = (self._collectives.ring(each, self._experts, "all_reduce") for each in leaving)
        return copied_s, summed_s + (copied_s if sent_again(self._config) else 0.0)

    def transfers(self, num_bytes: float) -> dict[str, Transfer]:
        """The costs of the tasks of exchanges of these bytes, by op.

        All steps but plain ones send copies of hot experts beside a block's dispatches.
        """
        exchange = Transfer(link=_Bytes(self.task_seconds), num_bytes=num_bytes)
        gather = Transfer(link=_Bytes(self.gather_seconds), num_bytes=num_bytes)
        dispatch = exchange if self._config.step_kind == "plain" else replace(exchange, more_s=self.copies_s)
        return {"dispatch": dispatch, "combine": exchange, "gather": gather, "scatter": gather}

    def _between(self, leaving: float) -> float:
        """Seconds of an all-to-all between expert ranks by the bytes that leave a device."""
        ranks = self._experts.ranks
        return self.choice(leaving * ranks / (ranks - 1)).seconds if ranks > 1 else 0.0

    def _gathered(self, leaving: float) -> float:
        return self._collectives.ring(leaving, group=DeviceGroup(self._tensor, 1))
