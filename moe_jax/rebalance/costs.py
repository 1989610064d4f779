"""What moving experts takes on a cluster, and what a step loses where ranks are loaded unevenly."""

from typing import NamedTuple

from moe_jax.config import Config
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.step_times import Step

_MOVED = 3  # arrays like a gradient: weights, both moments


class MigrationCosts(NamedTuple):
    """Seconds."""

    send_s: float  # in which every rank sends one expert to another
    even_s: float  # in a step, of the experts of one block where all ranks are loaded alike
    sum_s: float  # in a step, of the sum of the gradients of one expert's copies


def migration_costs(config: Config, cluster: Cluster, expert_bytes: float) -> MigrationCosts:
    """For a config whose mesh has no open sizes, and experts of so many bytes on each device, moments included.

    With a capacity, experts compute padding where they lack rows: whoever is loaded least takes as long, and nothing
    is lost. Exchanges send buffers of a fixed size anyway.
    """
    step = Step(config, cluster)
    send_s = step.collectives.send(expert_bytes, step.experts)
    sent_bytes = 2 * (1 - 1 / step.experts.ranks) * expert_bytes / _MOVED
    sum_s = step.collectives.ring(sent_bytes, step.experts, "all_reduce")
    if config.model.moe.capacity_factor is not None:
        return MigrationCosts(send_s, 0.0, sum_s)
    experts = step.compute()["expert"]
    passes_s = experts.forward + experts.backward + experts.weight
    return MigrationCosts(send_s, config.train.grad_accumulation * passes_s, sum_s)
