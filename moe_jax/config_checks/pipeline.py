"""Rules of a pipeline: its stages, what they run, and what they do not."""

from typing import TYPE_CHECKING

from moe_jax.config_checks.words import nearest_multiples
from moe_jax.errors import ConfigError

if TYPE_CHECKING:
    from moe_jax.config import Config

_SEVERAL_CHUNKS = ("interleaved", "coscheduled")
# Made of collective-permutes, which wait for the devices of all stages.
_PERMUTES = ("ring", "hier_1d", "halo")


def check_pipeline(config: "Config") -> None:
    """Raise ConfigError for a pipeline that cannot run, and for settings that only pipelines have."""
    stages, settings = config.mesh.pipeline, config.schedule
    name, chunks = settings.pipeline, settings.virtual_stages
    if stages == -1:
        raise ConfigError("mesh.pipeline=-1 leaves open which blocks a stage holds: use a number of stages")
    if stages == 1:
        if chunks > 1:
            raise ConfigError(
                f"schedule.virtual_stages={chunks} cuts the blocks of pipeline stages, and mesh.pipeline=1: "
                "set mesh.pipeline, or schedule.virtual_stages=1"
            )
        return
    if chunks > 1 and name not in _SEVERAL_CHUNKS:
        raise ConfigError(
            f"schedule.virtual_stages={chunks} is not for schedule.pipeline={name}, whose stages hold one group of "
            f"blocks: use schedule.pipeline={' or '.join(_SEVERAL_CHUNKS)}, or schedule.virtual_stages=1"
        )
    if name == "interleaved" and chunks == 1:
        raise ConfigError(
            "schedule.virtual_stages=1 leaves nothing to interleave with schedule.pipeline=interleaved: "
            "use schedule.virtual_stages=2 or more, or schedule.pipeline=1f1b"
        )
    parts = config.train.grad_accumulation
    if chunks > 1 and parts % stages:
        raise ConfigError(
            f"train.grad_accumulation={parts} (the pipeline's microbatches) is not divisible by mesh.pipeline="
            f"{stages}, which schedule.virtual_stages={chunks} needs: use {nearest_multiples(parts, stages)}"
        )
    _check_collectives(config)


def _check_collectives(config: "Config") -> None:
    stages, exchange, grad_reduce = config.mesh.pipeline, config.exchange, config.schedule.grad_reduce
    if exchange.algorithm in _PERMUTES:
        raise ConfigError(
            f"exchange.algorithm={exchange.algorithm} sends from rank to rank, which waits for the devices of all "
            f"mesh.pipeline={stages} stages: use exchange.algorithm=flat or hier_2d"
        )
    if exchange.reduction != "all_reduce":
        raise ConfigError(
            f"exchange.reduction={exchange.reduction} is not for mesh.pipeline={stages}, which sums gradients behind "
            "its last tick: use exchange.reduction=all_reduce"
        )
    if grad_reduce != "end":
        raise ConfigError(
            f"schedule.grad_reduce={grad_reduce} is not for mesh.pipeline={stages}, which sums gradients behind its "
            "last tick: use schedule.grad_reduce=end"
        )
