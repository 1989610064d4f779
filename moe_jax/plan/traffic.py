"""Bytes that leave a device in a step, by the axis of the mesh that they travel along."""

from moe_jax.config import Config
from moe_jax.config.layer_layout import Stages
from moe_jax.plan.clusters import Cluster
from moe_jax.plan.gradients import held_by, parts_of
from moe_jax.plan.stage_parameters import on_stage, sums_on_stage
from moe_jax.plan.step_times import Step, gathered_widths, passed_on
from moe_jax.plan.work import ITEM_BYTES, exchange_bytes, has_ring


def traffic(config: Config, cluster: Cluster) -> dict[str, float]:
    """Of the pipeline stage that sends most. Small sums, of losses and counts, are left out.

    `expert` are rows to experts and back, forward and backward; `tensor` what tensor ranks gather and sum for
    attention, MLPs and rows; `context` keys and values, and their gradients; `pipeline` activations and their
    gradients; `gradients` the sums of those over all devices that hold the same parameters, `parameters` what these
    gather of each other's parts (`optimizer.zero`).
    """
    step, model, parts = Step(config, cluster), config.model, config.train.grad_accumulation
    item, ranks = ITEM_BYTES[config.train.compute_dtype], step.experts.ranks
    stages = Stages.of(config)
    rows = exchange_bytes(config, step.tokens, ranks)
    repeats = config.schedule.remat != "none" and config.step_facts.remat_unit == "period"
    exchanged = 3 if repeats else 2  # forward, backward, and once more where remat recomputes exchanges
    copies = step.tensor if config.exchange.tensor_form == "replicated" else 1
    passed = (step.context - 1) * step.tokens * passed_on(model, step.tensor)
    width_bytes = (step.tensor - 1) * step.tokens * item

    def crossing(kind: str) -> int:
        """Numbers of a token that tensor ranks gather and sum in a block, forward."""
        return sum(width + model.hidden_size for width in gathered_widths(model, kind))

    def of_blocks(kinds: list[str]) -> dict[str, float]:
        with_experts = kinds.count("moe")
        own_rows = 2 * exchanged * with_experts * rows
        return {
            "expert": own_rows * copies * (1 - 1 / ranks),
            "tensor": 2 * width_bytes * sum(map(crossing, kinds)) + own_rows * (step.tensor - 1),
            "context": len(kinds) * passed * (2 * item + (ITEM_BYTES["float32"] if has_ring(config) else 0)),
        }

    of_stages = [
        of_blocks([held.kind for chunk in range(stages.chunks) for held in stages.groups[stages.group(stage, chunk)]])
        for stage in range(stages.stages)
    ]
    found = max(of_stages, key=lambda sent: sum(sent.values()))
    found["pipeline"] = 2 * stages.chunks * step.tokens * model.hidden_size * item if stages.stages > 1 else 0.0
    found = {axis: parts * num_bytes for axis, num_bytes in found.items()}
    summed = parts if config.optimizer.zero == 2 else 1  # else parts of a batch are added before
    found["gradients"] = summed * sum(each.sent_bytes for each in sums_on_stage(config, step.mesh))
    held = [each for owned in on_stage(config) for each in held_by(owned, config, step.mesh).items()]
    cut = parts_of(config, step.mesh)
    found["parameters"] = sum((1 - 1 / cut[group]) * count * ITEM_BYTES["float32"] for group, count in held)
    return {axis: num_bytes for axis, num_bytes in found.items() if num_bytes > 0}
