"""Memory of each device that a pipelined step takes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

from moe_jax.config import Config, ModelConfig
from moe_jax.config.attention_kernels import HOPPER, Capability
from moe_jax.config.layer_layout import Stages
from moe_jax.config.registry import PIPELINE_FACTS
from moe_jax.plan.activation_memory import deferred_bytes, mode_of, mtp_bytes, stored_bytes
from moe_jax.plan.compilers import COMPILERS
from moe_jax.plan.device_sizes import sizes_of
from moe_jax.plan.gradients import own_parameters, params_by_group
from moe_jax.plan.hot_experts import copies_bytes, stored_copies_bytes
from moe_jax.plan.memory_parts import TEMPORARIES, Moment, StepMemory, moments_of, update_bytes
from moe_jax.plan.resources import owned_by_block, with_mtp_input
from moe_jax.plan.stage_parameters import stage_parameters_of
from moe_jax.plan.workspace_memory import head_bytes, iteration_bytes, working_bytes
from moe_jax.schedule.pipelines.outline import outline_of


def pipelined_memory(
    config: Config, platform: str, mesh: Mapping[str, int], capability: Capability | None = HOPPER
) -> StepMemory:
    """The memory of a step that runs a table of ticks. All stages run one program, on equal buffers.

    The step has buffers for the activations of forward passes, as many slots as the table needs, each large enough for
    any model chunk; sums of all gradients; and the workspace of one pass: its activations before they are in their
    slot, the workspace of a block, and a block's gradients before they are added. With `schedule.remat=chunk` slots
    have a chunk's input and output, and all activations are in the workspace of a backward pass. The block of
    multi-token prediction runs in the head's pass, and its activations need no slot. In the update only the sums of
    gradients are left of all this. Compared with XLA's allocations on H100 and v5p in docs/plan.md.

    Raises ConfigError if stages have too few blocks.
    """
    model, settings, parts = config.model, config.schedule, config.train.grad_accumulation
    sizes = sizes_of(config, platform, mesh, capability)
    mode, compiler = mode_of(config, platform), COMPILERS[platform]
    params, stages = stage_parameters_of(config), Stages.of(config)
    count = params.on_device(config, mesh)
    outline = outline_of(settings.pipeline, stages.stages, parts, stages.chunks)
    stream = sizes.item * sizes.local_tokens * model.hidden_size
    no_mlp = _without_mlp(model)
    slot = stream + _largest(
        stages,
        stored_bytes(sizes, no_mlp, "dense", mode, "task"),
        lambda kind: (
            stored_bytes(sizes, model, kind, mode, "task")
            + (stored_copies_bytes(config, sizes.item) if kind == "moe" else 0)
        ),
    )
    repeats = settings.remat == "chunk"
    residuals, slot = slot, 2 * stream if repeats else slot  # a chunk's input and output
    activations = outline.saved * slot + (outline.activations + outline.gradients + 2) * stream
    if outline.has_pairs and platform == "cpu":
        activations += slot  # copied out of its slot for a pass that also fills one
    split = PIPELINE_FACTS[settings.pipeline].split_weight_grad
    if split:
        deferred = _largest(
            stages, deferred_bytes(sizes, no_mlp, "dense", mode), lambda kind: deferred_bytes(sizes, model, kind, mode)
        )
        activations += outline.weight * deferred
    blocks = max(map(len, stages.groups))
    new = 4 * sum(params_by_group(params.blocks, config, mesh).values()) / (stages.chunks * blocks)
    new *= 1 if stages.chunks == 1 else 2  # and a copy of that chunk's sums
    at_work = compiler.extra_slots_of_pairs if outline.has_pairs else compiler.extra_slots
    working = new + at_work * slot + (residuals if repeats else 0.0) + copies_bytes(config, sizes.item)
    # sums of gradients and buffers are allocated all the time, and so without gaps
    of_iteration = iteration_bytes(config, sizes, compiler, mesh)
    working += of_iteration + working_bytes(config, sizes, compiler, mode, mesh, blocks)
    ends = sum(params_by_group(params.ends, config, mesh).values())
    held = {"gradients": 4.0 * count}
    if config.optimizer.zero == 3:
        held["gathered"] = 4 * ends + sizes.item * (count - ends)
    of_head = head_bytes(config, sizes, compiler, mode) + 4 * model.vocab_size * model.hidden_size
    of_mtp = mtp_bytes(config, sizes) + sum(stored_bytes(sizes, model, each.kind, mode, "task") for each in stages.mtp)
    moments: list[tuple[Moment, dict[str, float]]] = [
        ("head", held | {"activations": activations + of_mtp, "head": of_head}),
        ("backward", held | {"activations": activations, "working": working}),
        ("update", held | {"working": update_bytes(config, platform, mesh)}),
    ]
    for each in stages.mtp:
        block = with_mtp_input(owned_by_block(model, each.kind, each.view), model)
        gradients = 4 * sum(params_by_group(block, config, mesh).values())
        in_block = gradients + of_iteration + working_bytes(config, sizes, compiler, mode, mesh, 1)
        moments.append(("head", held | {"activations": activations + of_mtp, "working": in_block}))
    moment, largest = max(moments, key=lambda each: sum(each[1].values()))
    found = {name: int(largest.get(name, 0)) for name in TEMPORARIES}
    return StepMemory(
        moment=moment,
        parameters=4 * (int(own_parameters(params, config, mesh)) if config.optimizer.zero == 3 else count),
        **moments_of(params, config, mesh, platform),
        batch=int(4 * sizes.sequences * parts * (config.data.seq_len + 1)),
        **found,
        lost=compiler.pipelined_bytes,
    )


@functools.lru_cache(maxsize=64)
def _without_mlp(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(model, intermediate_size=0)


def _largest(stages: Stages, common: float, of_kind: Callable[[str], float]) -> float:
    """Bytes for the largest chunk, with `common` bytes for each block, or more for blocks of each kind."""
    extra = sum(count * (of_kind(kind) - common) for kind, count in stages.most_of_kind.items() if count)
    return max(map(len, stages.groups)) * common + extra
