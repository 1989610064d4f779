"""Bytes that leave a device in a step, by mesh axis."""

from collections.abc import Mapping

from moe_jax.config import Config
from moe_jax.config.layer_layout import Stages
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.gradients import parts_of
from moe_jax.plan.hot_experts import leaving_bytes
from moe_jax.plan.param_gathers import gathered_bytes, whole_gathers
from moe_jax.plan.stage_parameters import stage_parameters_of, stage_sums
from moe_jax.plan.step_times import Step
from moe_jax.plan.work import ITEM_BYTES, context_hops, context_width, gathered_widths, has_ring


def traffic(config: Config, cluster: Cluster) -> dict[str, float]:
    """Bytes sent by a device of the pipeline stage that sends most. Small sums, of losses and counts, are left out.

    `expert` counts rows to experts and back, forward and backward, and copies of hot experts; `tensor` what tensor
    ranks gather and sum for attention, MLPs and rows; `context` keys and values, and their gradients; `pipeline`
    activations and their gradients; `gradients` sums over all devices with the same parameters; `parameters` the shards
    that these devices gather from each other (`optimizer.zero`), with stage 3 in every forward and backward pass.
    """
    step, model, parts = Step(config, cluster), config.model, config.train.grad_accumulation
    item, ranks = ITEM_BYTES[config.train.compute_dtype], step.experts.ranks
    stages = Stages.of(config)
    remat = config.schedule.remat
    repeats = remat == "chunk" or (remat != "none" and config.step_facts.remat_unit == "period")
    exchanged = 3 if repeats else 2  # forward, backward, and once more where remat recomputes exchanges
    copies = step.expert_tensor if config.exchange.tensor_form == "replicated" else 1
    copied_bytes, summed_bytes = leaving_bytes(config, ranks, item)
    of_copies = (1 if remat == "none" else 2) * copied_bytes + summed_bytes
    passed = context_hops(config) * step.tokens * context_width(model, step.tensor)
    width_bytes = (step.tensor - 1) * step.tokens * item

    def crossing(kind: str) -> int:
        """The numbers per token that tensor ranks gather and sum in a block's forward pass."""
        return sum(width + model.hidden_size for width in gathered_widths(model, kind))

    def of_blocks(kinds: list[str]) -> dict[str, float]:
        with_experts = kinds.count("moe")
        own_rows = 2 * exchanged * with_experts * step.exchanged_bytes
        return {
            "expert": own_rows * copies * (1 - 1 / ranks) + with_experts * of_copies,
            "tensor": 2 * width_bytes * sum(map(crossing, kinds)) + own_rows * (step.expert_tensor - 1),
            "context": len(kinds) * passed * (2 * item + (ITEM_BYTES["float32"] if has_ring(config) else 0)),
        }

    kinds_of = [list[str]() for _ in range(stages.stages)]
    for group, blocks in enumerate(stages.groups):
        kinds_of[group % stages.stages] += [block.kind for block in blocks]
    kinds_of[-1] += [block.kind for block in stages.mtp]
    of_stages = list(map(of_blocks, kinds_of))
    found = max(of_stages, key=lambda sent: sum(sent.values()))
    found["pipeline"] = 2 * stages.chunks * step.tokens * model.hidden_size * item if stages.stages > 1 else 0.0
    found = {axis: parts * num_bytes for axis, num_bytes in found.items()}
    summed = parts if config.optimizer.zero >= 2 else 1  # else gradients of the parts are added first
    found["gradients"] = summed * sum(each.sent_bytes for each in stage_sums(config, step.mesh))
    if config.param_gather != "none":
        found["parameters"] = parts * _gathered_for_passes(config, step.mesh)
    else:
        shards = parts_of(config, step.mesh)
        found["parameters"] = sum(
            (1 - 1 / shards[group]) * num_bytes
            for owned in stage_parameters_of(config)
            for group, num_bytes in whole_gathers(owned, config, step.mesh).items()
        )
    return {axis: num_bytes for axis, num_bytes in found.items() if num_bytes > 0}


def _gathered_for_passes(config: Config, mesh: Mapping[str, int]) -> float:
    """Bytes of gathers in the passes of one part of the batch.

    Blocks are gathered in both directions, but the highest one of a scheduled step, which keeps its parameters.
    """
    *below, head = gathered_bytes(config, mesh)
    kept = below[-1] if config.step_facts.orders_tasks else {}
    blocks = 2 * sum(sum(owner.values()) for owner in below[1:]) - sum(kept.values())
    return blocks + sum(below[0].values()) + sum(head.values())
