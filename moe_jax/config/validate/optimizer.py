"""Rules for the optimizer and for the settings that only some optimizers read."""

import dataclasses
import functools

from moe_jax.config.registry import OPTIMIZER_FACTS
from moe_jax.config.sections import OptimizerConfig
from moe_jax.config.validate.messages import all_of
from moe_jax.errors import ConfigError


@functools.lru_cache(maxsize=256)
def check_optimizer(settings: OptimizerConfig) -> None:
    """Raise ConfigError for a setting that the optimizer does not read. Cached: a plan makes thousands of configs."""
    for field in dataclasses.fields(settings):
        name, value, unset = field.name, getattr(settings, field.name), field.default
        readers = tuple(part for part, facts in OPTIMIZER_FACTS.items() if name in facts.settings)
        if readers and value != unset and settings.name not in readers:
            raise ConfigError(
                f"optimizer.{name}={value} is of optimizer {all_of(readers)}, and optimizer.name={settings.name}: "
                f"set optimizer.name={readers[0]}, or optimizer.{name}={unset}"
            )
