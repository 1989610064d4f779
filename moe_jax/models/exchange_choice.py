"""The all-to-all algorithm of a step, where `exchange.algorithm` leaves it open, and whether devices support it."""

from moe_jax.config import Config, ExchangeConfig
from moe_jax.config.ragged_rows import sends_ragged_rows
from moe_jax.config.registry import EXCHANGE_FACTS, OPEN_EXCHANGE, REDUCTION_FACTS
from moe_jax.errors import ConfigError


def exchange_of(config: Config, platform: str, tensor_ranks: int) -> str:
    """Return the algorithm that `exchange.algorithm` stands for, also with `auto`. Raises ConfigError.

    `tensor_ranks` share each expert.
    """
    for name, table in (("algorithm", EXCHANGE_FACTS), ("reduction", REDUCTION_FACTS)):
        value = getattr(config.exchange, name)
        if table.of(value).in_background and platform != "cpu":
            raise ConfigError(
                f"exchange.{name}={value} is for CPUs, and these devices are {platform}, whose collectives run "
                f"concurrently with computations anyway: use exchange.{name}={getattr(ExchangeConfig(), name)}"
            )
    if config.exchange.algorithm != OPEN_EXCHANGE:
        return config.exchange.algorithm
    return "ragged" if sends_ragged_rows(config, platform, tensor_ranks) else "flat"
