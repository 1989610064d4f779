"""The cost model of rebalancing: the time to move experts on a cluster, and the time that uneven loads cost."""

from typing import NamedTuple

from moe_jax.config import Config
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.step_times import Step


class MigrationCosts(NamedTuple):
    """Predicted times in seconds."""

    send_s: float  # to send one expert from every rank to another
    even_s: float  # per step, of one block's experts if all ranks have equal loads
    sum_s: float  # per step, to sum the gradients over the replicas of one expert


def migration_costs(config: Config, cluster: Cluster, expert_bytes: float) -> MigrationCosts:
    """Predict the costs for a config whose mesh has no open sizes.

    `expert_bytes` is the size of an expert on one device, moments included. With a capacity, experts compute padding
    where they have fewer rows, so the least loaded rank takes as long as the busiest, and imbalance costs nothing
    (`even_s` is 0). Exchanges send buffers of a fixed size in any case.
    """
    step = Step(config, cluster)
    send_s = step.collectives.send(expert_bytes, step.experts)
    moved_arrays = 1 + config.optimizer.facts.expert_moments  # of a gradient's size
    sent_bytes = 2 * (1 - 1 / step.experts.ranks) * expert_bytes / moved_arrays
    sum_s = step.collectives.ring(sent_bytes, step.experts, "all_reduce")
    if config.model.moe.capacity_factor is not None:
        return MigrationCosts(send_s, 0.0, sum_s)
    experts = step.compute()["expert"]
    passes_s = experts.of("F", 1) + experts.of("B", 1) + experts.of("W", 1)
    return MigrationCosts(send_s, config.train.grad_accumulation * passes_s, sum_s)
