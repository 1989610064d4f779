"""Split nothing: every exchange waits for compute, and compute for every exchange.

The order is `protocol.breadth_first`, which has one part of each stage.
"""

from moe_jax.config.facts import PolicyFacts
from moe_jax.schedule.actions import ScheduleError
from moe_jax.schedule.policies.protocol import Policy, breadth_first
from moe_jax.schedule.shape import Parts

FACTS = PolicyFacts(listed=0, cuts=None, is_baseline=True)


def parts(degree: int) -> Parts:
    """One part; raises ScheduleError for more."""
    if degree != 1:
        raise ScheduleError(f"microbatches={degree} needs a policy that pipelines: policy=vanilla cuts nothing, set 1")
    return Parts(1, 1)


POLICY = Policy(parts, breadth_first)
