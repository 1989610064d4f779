"""Split exchanges and experts by capacity, inside each MoE layer (Tutel, PipeMoE). Attention is not split.

The order is `protocol.breadth_first`.
"""

from moe_jax.config.facts import PolicyFacts
from moe_jax.schedule.policies.protocol import Policy, breadth_first
from moe_jax.schedule.shape import Parts

FACTS = PolicyFacts(listed=1, cuts="capacity", planned=True, is_baseline=True)


def parts(degree: int) -> Parts:
    """`degree` chunks of the slots. Forward and backward degrees may differ (FSMoE)."""
    return Parts(1, degree)


POLICY = Policy(parts, breadth_first)
