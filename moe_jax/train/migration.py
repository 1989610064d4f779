"""Experts of a run that change ranks: when somebody looks, what is moved or refused, and what is said of it.

M blocks with experts, E experts.
"""

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from moe_jax.config import Mesh
from moe_jax.plan.migration import Plan, Prices, load_ratio, plan
from moe_jax.plan.migration_costs import MigrationCosts, migration_costs
from moe_jax.train.meter import Meter
from moe_jax.train.metrics import RunLog, human_seconds
from moe_jax.train.mover import Moved, Mover
from moe_jax.train.setup import Run
from moe_jax.train.step import State

_MB = 1e6


class Migration:
    """Looks at the load of ranks every `migration.every` steps. All processes decide the same."""

    def __init__(self, run: Run, meter: Meter, log: RunLog):
        self._run, self._meter, self._log = run, meter, log
        migration = run.config.migration
        if not migration.enabled:
            return
        self._mover = Mover(run.config, run.trainer)
        self._costs: MigrationCosts | None = None
        if run.cluster is not None:
            sizes = Mesh(
                **{str(axis): size for axis, size in run.trainer.mesh.shape.items()},
                experts_over_context=run.config.mesh.experts_over_context,
            )
            config = dataclasses.replace(run.config, mesh=sizes)
            largest = max(map(self._mover.expert_bytes, self._mover.groups))
            self._costs = migration_costs(config, run.cluster, largest)

    def after(self, step: int, state: State) -> State:
        """The state to go on with behind a step."""
        migration = self._run.config.migration
        if not migration.enabled or step % migration.every:
            return state
        with self._meter.paused():
            return self._look(step, state)

    def _look(self, step: int, state: State) -> State:
        """Move what pays of blocks that have been above the threshold for long enough, and begin a new window."""
        start, migration = time.perf_counter(), self._run.config.migration
        seen = jax.device_get(state["placement"])
        load_ME, slot_ME = seen["load_ME"].tolist(), seen["slot_ME"].tolist()
        ratio_M = [load_ratio(load, slots, self._mover.ranks) for load, slots in zip(load_ME, slot_ME, strict=True)]
        over_M = [n + 1 if r >= migration.threshold else 0 for n, r in zip(seen["over_M"], ratio_M, strict=True)]
        due = [m for m, windows in enumerate(over_M) if windows >= migration.patience]
        plans = {m: plan(load_ME[m], slot_ME[m], self._mover.ranks, self._prices(step)) for m in due}
        moved = {m: found for m, found in plans.items() if found.pays}
        rounded_M = [round(ratio, 6) for ratio in ratio_M]
        record: dict[str, Any] = {"step": step, "rank_load": rounded_M, "rank_load_max_over_mean": max(rounded_M)}
        if moved:
            swaps_M = [moved[m].swaps if m in moved else () for m in range(len(slot_ME))]
            cost, before = self._mover.cost(swaps_M), time.perf_counter()
            # one program at a time: simulated devices can keep the threads that each other's collectives wait for
            state = jax.block_until_ready(self._mover.move(jax.block_until_ready(state), swaps_M))
            record |= self._said(step, moved, cost, time.perf_counter() - before)
        refused = {m: found for m, found in plans.items() if found.swaps and not found.pays}
        record |= self._refused(step, refused)
        for m in due:
            over_M[m] = 0  # what was refused is asked again as late
        slots = [moved[m].slot_E if m in moved else slots for m, slots in enumerate(slot_ME)]
        placement = {
            "slot_ME": np.asarray(slots, np.int32),
            "load_ME": np.zeros_like(seen["load_ME"]),
            "over_M": np.asarray(over_M, np.int32),
        }
        placement = jax.tree.map(self._mover.replicated, placement)
        self._log.write(record | {"look_s": time.perf_counter() - start})
        return state | {"placement": placement}

    def _prices(self, step: int) -> Prices | None:
        limit = self._run.config.migration.payback_steps
        if self._costs is None or limit is None:
            return None
        left = self._run.config.train.steps - step
        return Prices(swap_s=2 * self._costs.send_s, even_s=self._costs.even_s, steps=min(limit, left))

    def _said(self, step: int, moved: dict[int, Plan], cost: Moved, took_s: float) -> dict[str, Any]:
        for m, found in moved.items():
            self._log.tell(
                f"step {step}: {len(found.swaps)} pair(s) of experts of MoE block {m} changed ranks, the "
                f"busiest of which had {found.ratio_before:.2f} of the mean load, and has {found.ratio_after:.2f}"
            )
        predicted = {} if self._costs is None else {"migration_predicted_s": cost.sends * self._costs.send_s}
        saved = {} if self._costs is None else {"migration_saved_s": sum(found.saved_s for found in moved.values())}
        self._log.tell(
            f"step {step}: {cost.num_bytes / _MB:,.1f} MB left each device in {human_seconds(took_s)}"
            + (f", predicted {human_seconds(predicted['migration_predicted_s'])}" if predicted else "")
            + (f"; each step is to save {human_seconds(saved['migration_saved_s'])}" if saved else "")
        )
        return {
            "migrated_blocks": [*moved],
            "migration_swaps": [len(found.swaps) for found in moved.values()],
            "migration_load_after": [round(found.ratio_after, 6) for found in moved.values()],
            "migration_bytes": cost.num_bytes,
            "migration_s": took_s,
            **predicted,
            **saved,
        }

    def _refused(self, step: int, refused: dict[int, Plan]) -> dict[str, Any]:
        prices = self._prices(step)
        if not refused or prices is None:
            return {}
        for m, found in refused.items():
            self._log.tell(
                f"step {step}: no experts of MoE block {m} changed ranks, whose busiest has "
                f"{found.ratio_before:.2f} of the mean load: {human_seconds(found.cost_s)} to move them, and "
                f"{human_seconds(found.saved_s)} saved in each of {prices.steps} steps"
            )
        return {
            "refused_blocks": [*refused],
            "refused_cost_s": [found.cost_s for found in refused.values()],
            "refused_saved_s": [found.saved_s for found in refused.values()],
        }
