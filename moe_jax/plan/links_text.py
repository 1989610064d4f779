"""What a plan says of unequal links: which ones are slow, and what they cost."""

from moe_jax.config import Config
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.clusters.hardware import Level
from moe_jax.plan.estimate import estimate
from moe_jax.plan.units import seconds


def links_text(config: Config, cluster: Cluster) -> str | None:
    """What slow links cost; None if the links of each level are alike.

    It says nothing of shares of experts to try, because they change no exchange: dropless layers send a buffer of one
    size to each rank, and with a capacity all ranks hold equally many experts.
    """
    slow = [text for level in cluster.levels if (text := _slow(level))]
    if not slow:
        return None
    equal_s = estimate(config, cluster.with_equal_links()).step_s
    experts = " Uneven shares of experts would change no exchange." if config.model.moe.num_experts else ""
    return (
        f"{'; '.join(slow)}; collectives over these links wait for the slowest. "
        f"With equal links this plan would take {seconds(equal_s)}.{experts}"
    )


def _slow(level: Level) -> str:
    """The devices whose links are slower than the level's published rate."""
    parts = [
        f"{count} device{'s send' if count > 1 else ' sends'} at {send:g} × and receive{'s' * (count == 1)} at "
        f"{receive:g} × the rate"
        for count, send, receive in level.rates
        if min(send, receive) < 1
    ]
    return f"{level.name}: {', '.join(parts)}" if parts else ""
