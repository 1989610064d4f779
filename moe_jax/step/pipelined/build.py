"""Build the plan of a pipelined step: its table of ticks, the blocks of each stage, and the order of tasks inside a
pass.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from moe_jax.config import Config
from moe_jax.config.layer_layout import GroupBlock, Stages
from moe_jax.models.transformer import ComputeConfig
from moe_jax.plan.pass_orders import Orders, orders_of
from moe_jax.plan.rates import with_rates_of
from moe_jax.schedule.pipelines.build import make_table
from moe_jax.schedule.pipelines.dependencies import check as check_table
from moe_jax.schedule.pipelines.memory import Slots, slots_of
from moe_jax.schedule.pipelines.table import Table
from moe_jax.step.pipelined.tick_table import PASS_SCOPE, TickRow, rows_of
from moe_jax.step.scheduled.build import measured_times


@dataclasses.dataclass(frozen=True)
class PipelinedPlan:
    """A table of ticks, and the task orders for each structure of model chunks and for multi-token prediction."""

    stages: Stages
    table: Table
    orders: tuple[Orders, ...]
    mtp: Orders | None = None  # of its block; None: the model has none

    @functools.cached_property
    def slots(self) -> Slots:
        """The slots of the ring buffers."""
        return slots_of(self.table)

    @property
    def has_pairs(self) -> bool:
        """Whether ticks can run a forward pass concurrently with a backward pass."""
        return any(orders.together for orders in self.orders)

    @functools.cached_property
    def rows(self) -> TickRow:
        """The table as arrays [ticks, stages]."""
        return rows_of(self.table, self.slots, self.structure_of)

    @property
    def pass_runs(self) -> dict[str, NDArray[np.int32]]:
        """For each pass, by its scope, an array [ticks, stages] with 1 where it runs."""
        return {PASS_SCOPE + name: runs for name, runs in self.runs_of(self.rows).items()}

    def runs_of(self, row: TickRow) -> dict[str, Any]:
        """Return for each pass, by name, 1 where it runs and 0 where it does not, for any ticks and stages.

        Passes over blocks are named with the number of the blocks' structure.
        """
        fwd, bwd = row.forward, row.backward
        both = fwd.runs & bwd.runs & (fwd.structure == bwd.structure) if self.has_pairs else 0 * fwd.runs
        of_blocks = {"forward": (fwd, fwd.runs - both), "backward": (bwd, bwd.runs - both)}
        if self.has_pairs:
            of_blocks |= {"take": (bwd, both), "together": (bwd, both)}
        if self.table.split_weight_grad:
            of_blocks["weight"] = row.weight, row.weight.runs
        return {
            "embed": fwd.runs & fwd.at_end,
            "head": bwd.runs & bwd.at_loss,
            "embed_back": bwd.runs & bwd.at_end,
            **{
                f"{name}_{number}": runs & (work.structure == number)
                for name, (work, runs) in of_blocks.items()
                for number in range(len(self.structures))
            },
        }

    @functools.cached_property
    def structures(self) -> tuple[tuple[GroupBlock, ...], ...]:
        """The distinct structures of groups of blocks."""
        return tuple(dict.fromkeys(self.stages.groups))

    def structure_of(self, stage: int, chunk: int) -> int:
        """Return the number of a model chunk's structure."""
        return self.structures.index(self.stages.groups[self.stages.group(stage, chunk)])

    def first_block(self, structure: int) -> int:
        """Return the lowest block of the first group with this structure; other groups have the same kinds
        and views.
        """
        return self.stages.first_block[self.stages.groups.index(self.structures[structure])]

    def moe_rows(self, structure: int) -> NDArray[np.int32]:
        """Return [stages, chunks, m]: the index, among the model's blocks with experts, of each such block of a chunk;
        0 for chunks with another structure.
        """
        kinds = self.stages.model.block_kinds
        count = sum(member.kind == "moe" for member in self.structures[structure])
        rows = np.zeros((self.table.stages, self.table.chunks, count), np.int32)
        for stage in range(self.table.stages):
            for chunk in range(self.table.chunks):
                if self.structure_of(stage, chunk) == structure:
                    below = kinds[: self.stages.first_block[self.stages.group(stage, chunk)]].count("moe")
                    rows[stage, chunk] = below + np.arange(count)
        return rows

    @property
    def mtp_rows(self) -> NDArray[np.int32]:
        """The same for the block of multi-token prediction, which is the last: [1], or [0] without experts."""
        kinds = [member.kind for member in self.stages.mtp]
        return np.arange(self.stages.model.block_kinds.count("moe"), dtype=np.int32)[-1:][: kinds.count("moe")]

    def without_weight_passes(self) -> "PipelinedPlan":
        """Return the plan for steps without a backward pass, whose stages then trace none."""
        return dataclasses.replace(self, orders=tuple(orders._replace(weight=()) for orders in self.orders))

    def forward_rows(self) -> TickRow:
        """Return the arrays of a table with forward passes only: each as early as possible, or with several chunks in
        the ticks of a step.
        """
        name = "gpipe" if self.table.chunks == 1 else self.table.name
        table = make_table(name, self.table.stages, self.table.microbatches, self.table.chunks)
        rows = rows_of(table, slots_of(table), self.structure_of)
        # alone, and not in a pair with a backward pass
        rows = rows._replace(backward=rows.backward._replace(runs=np.zeros_like(rows.backward.runs)))
        last = int(np.flatnonzero(rows.forward.runs.any(axis=1))[-1])
        return jax.tree.map(lambda x: x[: last + 1], rows)


def make_plan(config: Config, mesh: Mesh) -> PipelinedPlan:
    """Build the plan that a config selects. Raises ScheduleError or ConfigError."""
    config = with_rates_of(config, mesh.devices.flat[0].device_kind)
    settings, sizes = config.schedule, mesh.shape
    table = make_table(settings.pipeline, sizes["pipeline"], config.train.grad_accumulation, settings.virtual_stages)
    check_table(table)
    unscheduled = PipelinedPlan(Stages.of(config), table, ())
    platform, measured = ComputeConfig.of(config, mesh).platform, measured_times(config)

    def orders(blocks: Sequence[GroupBlock], has_pairs: bool) -> Orders:
        kinds = [member.kind for member in blocks]
        return orders_of(kinds, config, sizes, platform, table.split_weight_grad, has_pairs, measured)

    mtp = None
    if blocks := unscheduled.stages.mtp:
        mtp = orders(blocks, False)
        mtp = mtp._replace(shape=dataclasses.replace(mtp.shape, mtp=True))
    chunks = tuple(orders(structure, table.has_pairs) for structure in unscheduled.structures)
    return dataclasses.replace(unscheduled, orders=chunks, mtp=mtp)
