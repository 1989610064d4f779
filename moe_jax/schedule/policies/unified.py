"""Split the whole batch, so that attention and gate of one microbatch hide the exchanges of another (FlowMoE).

The order is `protocol.breadth_first`.
"""

from moe_jax.config.facts import PolicyFacts
from moe_jax.schedule.policies.protocol import Policy, breadth_first
from moe_jax.schedule.shape import Parts

FACTS = PolicyFacts(listed=2, cuts="batch", sends_ragged=True, planned=True)


def parts(degree: int) -> Parts:
    """`degree` microbatches. The degree of the backward pass may be a divisor of the forward degree."""
    return Parts(degree, degree)


POLICY = Policy(parts, breadth_first)
