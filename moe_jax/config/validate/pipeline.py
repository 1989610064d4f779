"""Rules for pipelines: stages, model chunks, and the settings that stages do not support."""

from moe_jax.config.registry import PIPELINE_FACTS
from moe_jax.config.sections import Sections
from moe_jax.errors import ConfigError, nearest_multiples

_MOST_PASSES = 2**16  # passes in a table of ticks: 64 stages with 1,024 parts of a batch


def check_pipeline(config: Sections) -> None:
    """Raise ConfigError for a pipeline that cannot run, and for settings that need a pipeline if there is none."""
    stages, settings = config.mesh.pipeline, config.schedule
    name, chunks, facts = settings.pipeline, settings.virtual_stages, settings.pipeline_facts
    if stages == -1:
        raise ConfigError("mesh.pipeline=-1 leaves open which blocks a stage holds: use a number of stages")
    if chunks > 1 and stages == 1:
        raise ConfigError(
            f"schedule.virtual_stages={chunks} cuts the blocks of pipeline stages, and mesh.pipeline=1: "
            "set mesh.pipeline, or schedule.virtual_stages=1"
        )
    if settings.head_blocks and stages == 1:
        raise ConfigError(
            f"schedule.head_blocks={settings.head_blocks} takes blocks from the last pipeline stage, and "
            "mesh.pipeline=1: set mesh.pipeline, or schedule.head_blocks=0"
        )
    if facts.needs_stages and name != type(settings).pipeline and stages == 1:
        raise ConfigError(
            f"schedule.pipeline={name} orders what pipeline stages do, and mesh.pipeline=1: set mesh.pipeline, or "
            "schedule.pipeline=1f1b"
        )
    if config.step_facts.has_ticks and stages == 1 and config.train.grad_accumulation == 1:
        raise ConfigError(
            f"schedule.pipeline={name} without stages runs parts of a batch concurrently, and "
            "train.grad_accumulation=1: use train.grad_accumulation=2 or more, or schedule.pipeline=1f1b"
        )
    if facts.most_chunks is not None and chunks > facts.most_chunks:
        several = [other for other, declared in PIPELINE_FACTS.items() if declared.most_chunks is None]
        raise ConfigError(
            f"schedule.virtual_stages={chunks} is not for schedule.pipeline={name}, whose stages hold one group of "
            f"blocks: use schedule.pipeline={' or '.join(several)}, or schedule.virtual_stages=1"
        )
    if chunks < facts.least_chunks:
        raise ConfigError(
            f"schedule.virtual_stages={chunks} leaves nothing to interleave with schedule.pipeline={name}: "
            f"use schedule.virtual_stages={facts.least_chunks} or more, or schedule.pipeline=1f1b"
        )
    if settings.remat == "chunk" and (facts.split_weight_grad or not config.step_facts.has_ticks):
        problem = (
            f"and the weight gradients of schedule.pipeline={name} are passes after it"
            if facts.split_weight_grad
            else "which stages run, and mesh.pipeline=1"
        )
        raise ConfigError(
            f"schedule.remat=chunk repeats a model chunk's forward pass in its backward pass, {problem}: "
            f"use schedule.remat=full{', or schedule.pipeline=1f1b' if facts.split_weight_grad else ''}"
        )
    parts = config.train.grad_accumulation
    if chunks > 1 and parts % stages:
        raise ConfigError(
            f"train.grad_accumulation={parts} (the pipeline's microbatches) is not divisible by mesh.pipeline="
            f"{stages}, which schedule.virtual_stages={chunks} needs: use {nearest_multiples(parts, stages)}"
        )
    if config.step_facts.has_ticks and stages * parts * chunks > _MOST_PASSES:
        raise ConfigError(
            f"mesh.pipeline={stages} × train.grad_accumulation={parts} × schedule.virtual_stages={chunks} are "
            f"{stages * parts * chunks} passes, more than {_MOST_PASSES}: use train.grad_accumulation="
            f"{max(_MOST_PASSES // stages // chunks, 1)} or fewer"
        )
    if config.step_facts.has_ticks:
        _check_collectives(config)


def _check_collectives(config: Sections) -> None:
    stages, exchange, grad_reduce = config.mesh.pipeline, config.exchange, config.schedule.grad_reduce
    if (exchange.facts.permutes or exchange.is_elsewhere) and stages > 1:
        sends = "may send" if exchange.is_elsewhere else "sends"
        raise ConfigError(
            f"exchange.algorithm={exchange.algorithm} {sends} from rank to rank, which waits for the devices of all "
            f"mesh.pipeline={stages} stages: use exchange.algorithm=flat or hier_2d"
        )
    if config.mesh.context != 1 and exchange.context_form == "ring" and stages > 1:
        raise ConfigError(
            f"exchange.context_form=ring sends from rank to rank, which waits for the devices of all mesh.pipeline="
            f"{stages} stages: use exchange.context_form=all_gather, or mesh.context=1"
        )
    if config.model.moe.load_balancing_type == "pooled":
        raise ConfigError(
            f"model.moe.load_balancing_type=pooled needs the loads of all blocks, and schedule.pipeline="
            f"{config.schedule.pipeline} keeps a stage's own: use model.moe.load_balancing_type=batch or sequence"
        )
    ticks = f"the ticks of schedule.pipeline={config.schedule.pipeline}, after which gradients are summed"
    if exchange.reduction != "all_reduce":
        raise ConfigError(
            f"exchange.reduction={exchange.reduction} is not for {ticks}: use exchange.reduction=all_reduce"
        )
    if config.optimizer.zero == 2:
        raise ConfigError(f"optimizer.zero=2 sums each part of a batch, which is not for {ticks}: use optimizer.zero=1")
    if grad_reduce != "end":
        raise ConfigError(f"schedule.grad_reduce={grad_reduce} is not for {ticks}: use schedule.grad_reduce=end")
