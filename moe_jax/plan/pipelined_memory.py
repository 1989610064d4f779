"""How much memory of each device a step takes that runs a table of ticks: all stages run one program, on equal buffers.

While it runs there are buffers of what forward passes keep, as many slots as the table needs, each with room for any
model chunk; sums of all gradients; and what one pass works on: what it keeps before that lies in its slot, a block at
work, and gradients of a block before they are added. Held against what XLA allocated on H100 and v5p (docs/plan.md).
"""

import dataclasses
from collections.abc import Callable, Mapping

from moe_jax.config import Config
from moe_jax.config.layer_layout import Stages
from moe_jax.config.registry import PIPELINE_FACTS
from moe_jax.plan.activation_memory import held_bytes, kept_bytes, mode_of, sizes_of
from moe_jax.plan.compilers import COMPILERS
from moe_jax.plan.gradients import held_by, own_parameters
from moe_jax.plan.stage_parameters import on_stage
from moe_jax.plan.step_memory import TEMPORARIES, Moment, StepMemory
from moe_jax.plan.workspace_memory import head_bytes, working_bytes
from moe_jax.schedule.pipelines.outline import outline_of


def pipelined_memory(config: Config, platform: str, mesh: Mapping[str, int]) -> StepMemory:
    """For devices of tpu, gpu or cpu along each axis of `mesh`. Raises ConfigError if stages have too few blocks."""
    model, settings, parts = config.model, config.schedule, config.train.grad_accumulation
    sizes, mode, compiler = sizes_of(config, platform, mesh), mode_of(config, platform), COMPILERS[platform]
    held, stages = on_stage(config), Stages.of(config)
    count = held.on_device(config, mesh)
    outline = outline_of(settings.pipeline, stages.stages, parts, stages.chunks)
    stream = sizes.item * sizes.own_tokens * model.hidden_size
    no_mlp = dataclasses.replace(model, intermediate_size=0)
    slot = stream + _largest(
        stages,
        kept_bytes(sizes, no_mlp, "dense", mode, "task"),
        lambda kind: kept_bytes(sizes, model, kind, mode, "task"),
    )
    activations = outline.saved * slot + (outline.activations + outline.gradients + 4) * stream
    if outline.has_pairs and platform == "cpu":
        activations += slot  # taken from its slot for a pass that also fills one
    split = PIPELINE_FACTS[settings.pipeline].split_weight_grad
    if split:
        left = _largest(
            stages, held_bytes(sizes, no_mlp, "dense", mode), lambda kind: held_bytes(sizes, model, kind, mode)
        )
        activations += outline.weight * left
    blocks = max(map(len, stages.groups))
    new = 4 * sum(held_by(held.blocks, config, mesh).values()) / (stages.chunks * blocks)
    new *= 1 if stages.chunks == 1 else 2  # and the sums of that chunk, which are looked up
    at_work = compiler.slots_at_work_of_pairs if outline.has_pairs else compiler.slots_at_work
    working = new + at_work * slot
    # sums of gradients and buffers are there all the time, and so without gaps
    working += working_bytes(config, sizes, compiler, mode, mesh, blocks)
    moments: dict[Moment, dict[str, float]] = {
        "head": {
            "activations": activations,
            "gradients": 4 * count,
            "head": head_bytes(config, sizes, compiler, mode) + 4 * model.vocab_size * model.hidden_size,
        },
        "backward": {"activations": activations, "gradients": 4 * count, "working": working},
    }
    moment: Moment = max(moments, key=lambda name: sum(moments[name].values()))
    found = {name: int(moments[moment].get(name, 0)) for name in TEMPORARIES}
    return StepMemory(
        moment=moment,
        parameters=4 * count,
        optimizer=int(8 * own_parameters(held, config, mesh)),
        batch=int(4 * sizes.sequences * parts * (config.data.seq_len + 1)),
        **found,
        lost=compiler.reserved_bytes,
    )


def _largest(stages: Stages, common: float, of_kind: Callable[[str], float]) -> float:
    """Room for any chunk: what all blocks have, `common`, and what those of a kind have beside."""
    groups = [[held.kind for held in group] for group in stages.groups]
    most = {kind: max(group.count(kind) for group in groups) for kind in ("dense", "moe")}
    beside = sum(count * (of_kind(kind) - common) for kind, count in most.items() if count)
    return max(map(len, groups)) * common + beside
