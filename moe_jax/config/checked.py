"""A config whose settings have been checked."""

from dataclasses import dataclass

from moe_jax.config.sections import Sections
from moe_jax.config.validate import check_config


@dataclass(frozen=True, kw_only=True)
class Config(Sections):
    """One experiment. Making it checks it: raises ConfigError with name, value and cure."""

    def __post_init__(self) -> None:
        check_config(self)
