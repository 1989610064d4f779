"""Validation of a config: the values of single settings, and combinations of them.

Each error message gives the setting, its value and the cure.
"""

import dataclasses
import functools
import itertools

from moe_jax.config.attention_kernels import check_attention_kernel
from moe_jax.config.sections import DataConfig, Sections
from moe_jax.config.validate.data import check_data, check_overrides
from moe_jax.config.validate.hot_experts import check_hot_experts
from moe_jax.config.validate.mesh import check_batch_split, check_mesh
from moe_jax.config.validate.migration import check_migration
from moe_jax.config.validate.model import check_model, check_mtp
from moe_jax.config.validate.optimizer import check_optimizer, check_qk_clip, check_sharding_axes
from moe_jax.config.validate.pipeline import check_pipeline
from moe_jax.config.validate.plugins import check_parts
from moe_jax.config.validate.ranges import check_ranges, check_section_ranges, setting
from moe_jax.config.validate.schedule import check_exchange, check_node_split, check_schedule
from moe_jax.config.validate.training import check_training, check_tune
from moe_jax.errors import ConfigError, nearest_multiples
from moe_jax.paths import SETTINGS, names_bucket, plain_path

__all__ = [
    "check_batch_split",
    "check_config",
    "check_mesh",
    "check_node_split",
    "check_overrides",
    "check_ranges",
    "nearest_multiples",
    "plain_setting",
    "setting",
]


def check_config(config: Sections) -> None:
    """Raise ConfigError for a value out of range or for settings that contradict each other."""
    for name in _NAMES:
        _check_section(name, getattr(config, name))
    check_parts(config)
    check_model(config.model)
    check_mesh(config)
    check_pipeline(config)
    check_schedule(config)
    check_exchange(config)
    check_optimizer(config.optimizer, config.train.steps)
    check_sharding_axes(config)
    check_qk_clip(config.optimizer, config.model)
    check_data(config.data)
    check_training(config)
    check_mtp(config)
    check_attention_kernel(config)
    check_tune(config)
    check_migration(config)
    check_hot_experts(config)


def plain_setting(name: str, path: str) -> str:
    """Return a setting's path with `~` and environment variables replaced. Raises ConfigError."""
    try:
        return plain_path(path, buckets=names_bucket(name))
    except ValueError as error:
        raise ConfigError(f"{name}={path} {error}") from None


_NAMES = tuple(field.name for field in dataclasses.fields(Sections))
_PATHS = {
    section: tuple(name.partition(".")[2] for name in names)
    for section, names in itertools.groupby(sorted(SETTINGS), lambda name: name.partition(".")[0])
}


@functools.lru_cache(maxsize=2**14)
def _check_section(name: str, section: object) -> None:
    """Check the paths and numbers of a section: cached because a plan makes thousands of configs with the same one.

    A config made in Python may have a path with `~` or a variable.
    """
    for key in _PATHS.get(name, ()):
        _check_path(f"{name}.{key}", getattr(section, key))
    for number, source in enumerate(section.sources if isinstance(section, DataConfig) else ()):
        _check_path(f"data.sources[{number}].path", source.path)
    check_section_ranges(name, section)


def _check_path(name: str, path: str | None) -> None:
    if path is not None and (plain := plain_setting(name, path)) != path:
        raise ConfigError(f"{name}={path} is not replaced here: write {plain}")
