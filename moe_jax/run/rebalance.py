"""The rebalancer of a run: periodic checks of the load of ranks, migration of experts, and its records and messages.

M is the number of blocks with experts, E the number of experts, S the number of positions.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from moe_jax.config import MeshConfig
from moe_jax.rebalance.planner import (
    MigrationCosts,
    Prices,
    RebalancePlan,
    is_due,
    load_ratio,
    migration_costs,
    num_swaps,
    plan,
)
from moe_jax.rebalance.transfer import Mover, TransferCost
from moe_jax.run.setup import Run
from moe_jax.step.context import State
from moe_jax.telemetry.meter import Meter
from moe_jax.telemetry.run_log import RunLog, human_seconds

_MB = 1e6


class Rebalancer:
    """Checks the load of ranks every `migration.every` steps, and moves experts. All processes decide the same."""

    def __init__(self, run: Run, meter: Meter, log: RunLog):
        self._run, self._meter, self._log = run, meter, log
        migration = run.config.migration
        if not migration.enabled:
            return
        self._mover = Mover(run.config, run.trainer)
        self._ranks = run.config.rank_speeds or self._mover.ranks
        self._costs: MigrationCosts | None = None
        if run.cluster is not None:
            sizes = MeshConfig(
                **{str(axis): size for axis, size in run.trainer.mesh.shape.items()},
                experts_over_context=run.config.mesh.experts_over_context,
            )
            config = dataclasses.replace(run.config, mesh=sizes)
            largest = max(map(self._mover.expert_bytes, self._mover.groups))
            self._costs = migration_costs(config, run.cluster, largest)

    def after_step(self, step: int, state: State) -> State:
        """Check the load after a step, if a check is due. Returns the state to continue with."""
        migration = self._run.config.migration
        if not migration.enabled or step % migration.every:
            return state
        with self._meter.paused():
            return self._check(step, state)

    def _check(self, step: int, state: State) -> State:
        """Move experts of blocks whose load has been above the threshold for long enough, if it pays off.

        Then begin a new window of measured load.
        """
        start, migration = time.perf_counter(), self._run.config.migration
        before = jax.device_get(state["placement"])
        blocks = list(zip(before["load_ME"].tolist(), _experts(before), strict=True))
        ratio_M = [load_ratio(load_E, expert_S, self._ranks) for load_E, expert_S in blocks]
        uneven_M = [is_due(load_E, expert_S, self._ranks, migration.threshold) for load_E, expert_S in blocks]
        over_M = [n + 1 if uneven else 0 for n, uneven in zip(before["over_M"], uneven_M, strict=True)]
        due = [m for m, windows in enumerate(over_M) if windows >= migration.patience]
        prices = self._prices(step)
        plans = {m: plan(*blocks[m], self._ranks, prices, migration.threshold) for m in due}
        moved = {m: found for m, found in plans.items() if found.pays}
        rounded_M = [round(ratio, 6) for ratio in ratio_M]
        record: dict[str, Any] = {"step": step, "rank_load": rounded_M, "rank_load_max_over_mean": max(rounded_M)}
        if moved:
            moves_M = [moved[m].moves if m in moved else () for m in range(len(blocks))]
            cost, move_start = self._mover.cost(moves_M), time.perf_counter()
            # one program at a time: simulated devices share threads, and collectives of two programs could deadlock
            state = jax.block_until_ready(self._mover.move(jax.block_until_ready(state), moves_M))
            record |= self._report_moves(step, moved, cost, time.perf_counter() - move_start)
        refused = {m: found for m, found in plans.items() if found.moves and not found.pays}
        record |= self._report_refused(step, refused)
        for m in due:
            over_M[m] = 0  # a block with a refused migration also waits for `patience` windows again
        expert_MS = [moved[m].expert_S if m in moved else expert_S for m, (_, expert_S) in enumerate(blocks)]
        placement = _placement_like(before, expert_MS) | {
            "load_ME": np.zeros_like(before["load_ME"]),
            "over_M": np.asarray(over_M, np.int32),
        }
        placement = jax.tree.map(self._mover.replicated, placement)
        self._log.write(record | {"look_s": time.perf_counter() - start})
        return state | {"placement": placement}

    def _num_replicas(self, found: RebalancePlan) -> int:
        """The number of positions with a replica, in addition to one position for each expert."""
        experts = self._run.config.model.moe.num_experts
        return sum(expert < experts for expert in found.expert_S) - experts

    def _prices(self, step: int) -> Prices | None:
        """The costs of migration for the planner; None if experts move whatever it costs."""
        limit = self._run.config.migration.payback_steps
        if self._costs is None or limit is None:
            return None
        left = self._run.config.train.steps - step
        costs = self._costs
        return Prices(2 * costs.send_s, costs.even_s, min(limit, left), costs.sum_s)

    def _report_moves(
        self, step: int, moved: dict[int, RebalancePlan], cost: TransferCost, took_s: float
    ) -> dict[str, Any]:
        """Print the migrations of a step, and return their part of the record."""
        speeds = self._run.config.rank_speeds
        others, mean = ("experts or replicas", "mean load for its speed") if speeds else ("replicas", "mean load")
        for m, found in moved.items():
            which = f"{num_swaps(found)} pair(s) of experts" if num_swaps(found) else others
            self._log.info(
                f"step {step}: {which} of MoE block {m} changed ranks, the busiest "
                f"of which had {found.ratio_before:.2f} of the {mean}, and has {found.ratio_after:.2f}"
                + (f" with {self._num_replicas(found)} replica(s)" if self._run.config.replicas else "")
            )
        predicted = {} if self._costs is None else {"migration_predicted_s": cost.sends * self._costs.send_s}
        copies = {"migration_copies": [*map(self._num_replicas, moved.values())]} if self._run.config.replicas else {}
        saved = {} if self._costs is None else {"migration_saved_s": sum(found.saved_s for found in moved.values())}
        sent = f"{cost.num_bytes / _MB:,.1f} MB left each device" if cost.num_bytes else "nothing was sent"
        self._log.info(
            f"step {step}: {sent} in {human_seconds(took_s)}"
            + (f", predicted {human_seconds(predicted['migration_predicted_s'])}" if predicted else "")
            + (f"; each step is to save {human_seconds(saved['migration_saved_s'])}" if saved else "")
        )
        return {
            "migrated_blocks": [*moved],
            "migration_swaps": [num_swaps(found) for found in moved.values()],
            "migration_load_after": [round(found.ratio_after, 6) for found in moved.values()],
            "migration_bytes": cost.num_bytes,
            "migration_s": took_s,
            **copies,
            **predicted,
            **saved,
        }

    def _report_refused(self, step: int, refused: dict[int, RebalancePlan]) -> dict[str, Any]:
        """Print the migrations that would not pay off, and return their part of the record."""
        prices = self._prices(step)
        if not refused or prices is None:
            return {}
        for m, found in refused.items():
            self._log.info(
                f"step {step}: no experts of MoE block {m} changed ranks, whose busiest has "
                f"{found.ratio_before:.2f} of the mean load: {human_seconds(found.cost_s)} to move them, and "
                f"{human_seconds(found.saved_s)} saved in each of {prices.steps} steps"
            )
        return {
            "refused_blocks": [*refused],
            "refused_cost_s": [found.cost_s for found in refused.values()],
            "refused_saved_s": [found.saved_s for found in refused.values()],
        }


def _experts(placement: Mapping[str, np.ndarray]) -> list[list[int]]:
    """The expert at each position [M, S]; E (the number of experts) marks a free position."""
    if "expert_MS" in placement:
        return placement["expert_MS"].tolist()
    return np.argsort(placement["slot_ME"], axis=1).tolist()


def _placement_like(placement: Mapping[str, np.ndarray], expert_MS: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """The inverse of `_experts`: a placement with these experts, in the same form as `placement`."""
    experts = np.asarray(expert_MS, np.int32)
    if "expert_MS" in placement:
        return {"expert_MS": experts}
    return {"slot_ME": np.argsort(experts, axis=1).astype(np.int32)}
