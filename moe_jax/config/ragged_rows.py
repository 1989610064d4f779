"""Whether microbatches send only rows that exist: what a step runs, and plans of its time and memory, decide alike."""

from moe_jax.config.registry import OPEN_EXCHANGE
from moe_jax.config.sections import Sections


def sends_ragged_rows(config: Sections, platform: str, tensor_ranks: int) -> bool:
    """Whether microbatches of experts with a capacity send only the slots that they fill; otherwise all that they may.

    `tensor_ranks` share each expert. A microbatch may fill any slots of an expert, so padding is avoided only where the
    hardware sends ragged rows.
    """
    exchange, schedule, moe = config.exchange, config.schedule, config.model.moe
    if not moe.sends_capacity_rows:
        return False
    if exchange.algorithm != OPEN_EXCHANGE:
        return exchange.facts.ragged
    cuts = schedule.policy_facts.sends_ragged and schedule.microbatches > 1 and schedule.expert_chunks == 1
    # lanes of ragged rows do not support several tensor ranks
    return cuts and platform != "cpu" and tensor_ranks == 1 and not moe.has_hooks
