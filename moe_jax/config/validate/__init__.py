"""Validation of a config: the values of single settings, and combinations of them.

Each error message gives the setting, its value and the cure.
"""

from moe_jax.config.attention_kernels import check_attention_kernel
from moe_jax.config.sections import Sections
from moe_jax.config.validate.data import check_data, check_overrides
from moe_jax.config.validate.mesh import (
    check_batch_split,
    check_context_split,
    check_expert_split,
    check_mesh,
    check_tensor_split,
)
from moe_jax.config.validate.migration import check_migration
from moe_jax.config.validate.model import check_model, check_mtp
from moe_jax.config.validate.optimizer import check_optimizer, check_sharding_axes
from moe_jax.config.validate.paths import check_paths, plain_setting
from moe_jax.config.validate.pipeline import check_pipeline
from moe_jax.config.validate.plugins import check_parts
from moe_jax.config.validate.ranges import check_ranges, setting
from moe_jax.config.validate.schedule import check_exchange, check_node_split, check_schedule
from moe_jax.config.validate.training import check_training, check_tune
from moe_jax.errors import nearest_multiples

__all__ = [
    "check_batch_split",
    "check_config",
    "check_context_split",
    "check_expert_split",
    "check_mesh",
    "check_node_split",
    "check_overrides",
    "check_ranges",
    "check_sharding_axes",
    "check_tensor_split",
    "nearest_multiples",
    "plain_setting",
    "setting",
]


def check_config(config: Sections) -> None:
    """Raise ConfigError for a value out of range or for settings that contradict each other."""
    check_paths(config)
    check_ranges(config)
    check_parts(config)
    check_model(config.model)
    check_mesh(config)
    check_pipeline(config)
    check_schedule(config)
    check_exchange(config)
    check_optimizer(config.optimizer, config.train.steps)
    check_sharding_axes(config.optimizer, config.mesh.sizes)
    check_data(config.data)
    check_training(config)
    check_mtp(config)
    check_attention_kernel(config)
    check_tune(config)
    check_migration(config)
