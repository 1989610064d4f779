"""Compute the gradients of a scheduled step: issue the tasks of a plan one after another.

B sequences of this device, in A parts of b sequences for gradient accumulation; N tokens of each and N1 = N + 1; M
blocks with experts, E experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.config import ModelConfig
from moe_jax.config.layer_layout import segments
from moe_jax.models.dispatchers.ragged import Stored
from moe_jax.parallel.gathered_params import ParamGather
from moe_jax.parallel.ordering import depend_on_all
from moe_jax.parallel.trees import OF_HEAD, Grads, Params, Tree
from moe_jax.schedule.actions import NO_BLOCK
from moe_jax.step.context import StepContext, StepInputs
from moe_jax.step.losses import ObjectiveParts, parts_of, with_max_logits
from moe_jax.step.plain import accumulate
from moe_jax.step.scheduled.build import ScheduledPlan, owned, places, scanned_blocks
from moe_jax.step.scheduled.executor import Tasks
from moe_jax.step.scheduled.grad_reduce import GradientReducer
from moe_jax.step.scheduled.layer_loop import LayerScan, Stacked, run
from moe_jax.step.scheduled.param_gathering import ParamGathering, only_experts
from moe_jax.step.scheduled.scan_residuals import BlockConsts
from moe_jax.step.scheduled.step_dims import StepDims


def scheduled_gradients(
    params: Params, inputs: StepInputs, context: StepContext, plan: ScheduledPlan
) -> tuple[Grads, ObjectiveParts]:
    """Compute the same values as `plain.gradients`, up to rounding.

    The parts of a batch run one after another. The schedule of the last part sums the gradients of all parts over
    devices; with `optimizer.zero` above 1 each part's schedule sums its own gradients.
    """
    count, platform = context.config.train.grad_accumulation, context.compute.platform

    def of_part(
        plan: ScheduledPlan, token_bN1: jax.Array, number: jax.Array | int, earlier: Grads | None = None
    ) -> tuple[Grads, ObjectiveParts]:
        return _gradients_of_part(params, inputs.part(token_bN1, number, count), context, plan, earlier)

    part_AbN1 = inputs.in_parts(count)
    if count == 1:
        return of_part(plan, part_AbN1[0], 0)
    if context.config.optimizer.zero >= 2:
        return accumulate(partial(of_part, plan), part_AbN1)
    earlier, parts_before = accumulate(partial(of_part, plan.without_reductions()), part_AbN1[:-1])
    last_bN1 = part_AbN1[-1]
    if platform == "cpu":  # else collectives could run concurrently with those of the loop: see measure/races.py
        last_bN1 = depend_on_all(last_bN1, jax.tree.leaves(earlier), platform)
    grads, parts = of_part(plan, last_bN1, count - 1, earlier)
    return grads, jax.tree.map(jnp.add, parts_before, parts)


def _gradients_of_part(
    params: Params, inputs: StepInputs, context: StepContext, plan: ScheduledPlan, earlier: Grads | None
) -> tuple[Grads, ObjectiveParts]:
    """Return the gradients of one part of a batch, reduced by the plan's schedule, and this device's share of the
    objective.

    `earlier` are this device's gradients of earlier parts, added before the sums. If `plan.shard_specs` shards an
    array, each device gets the sum of its own shard.
    """
    model, scanned, slot_ME = context.config.model, plan.scanned, inputs.slot_ME
    tokens, document_BN = inputs.local_tokens(), inputs.document_BN(context)
    dims = StepDims(
        context.config,
        context.compute,
        plan.schedule.shape,
        inputs.routed_tokens(context),
        inputs.loss_divisor(context),
        tokens.input_Bn.size,
    )
    issued = plan.schedule.actions if scanned is None else (*scanned.prologue, *scanned.middle, *scanned.epilogue)
    outside = {action.block for action in issued} - {NO_BLOCK}
    blocks: dict[int, Tree] = {}  # whole weights
    gathering = _gathering(params, context, blocks, tokens.input_Bn) if context.is_fully_sharded else None
    has_experts = gathering is None or dims.shape.local_experts  # before anything is gathered
    if has_experts:
        own = {block: owned(params, model, block + 1, _slice) for block in outside}
        blocks |= own if gathering is None else {b: only_experts(w) for b, w in own.items() if "moe" in w}
    router_inputs = inputs.router_inputs(context)
    moe = [block for block, kind in enumerate(model.block_kinds) if kind == "moe"]
    placements = {} if slot_ME is None else {block: slot_ME[m] for m, block in enumerate(moe) if block in outside}
    consts = BlockConsts(blocks, router_inputs, placements, document_BN)
    tasks = Tasks(
        *(dims, None if gathering else params, consts, tokens),
        stored=partial(_stored, params, model) if has_experts else None,
        gathering=gathering,
        regathers=gathering is not None,
        mtp=inputs.mtp(context),
    )
    sums = GradientReducer(
        plan.reductions, tasks, None if earlier is None else lambda owner: owned(earlier, model, owner, _slice)
    )
    if scanned is None:
        run(issued, tasks, sums)
        return _gathered(sums.total, model, {}), _parts(sums, inputs, context)
    number, _ = scanned_blocks(context.config)
    stacked = Stacked(
        params["segments"][number],
        jax.tree.map(ParamGather.unstacked, context.gathers["segments"][number]),
        plan.shard_specs["segments"][number],
        None if earlier is None else earlier["segments"][number],
        router_inputs,
        slot_ME,
        document_BN,
    )
    loops = LayerScan(scanned, segments(model)[number], sums, stacked)
    run(scanned.prologue, tasks, sums)
    loops.forward()
    run(scanned.middle, tasks, sums)
    loops.backward()
    run(scanned.epilogue, tasks, sums)
    loops.reduce()
    run(scanned.last_reductions, tasks, sums)
    for block in range(scanned.blocks.last, model.num_blocks):
        if places(model)[block][0] == number:
            loops.gradients.put_sum(0, block, sums.total(block + 1))
    return _gathered(sums.total, model, {number: loops.gradients.tree()}), _parts(sums, inputs, context)


def _gathering(params: Params, context: StepContext, whole: dict[Any, Tree], token_Bn: jax.Array) -> ParamGathering:
    """Return what gathers the weights of blocks outside of scans, and of the embedding and the head, for tokens."""
    model, names = context.config.model, {"embed": ("embedding",), "head": OF_HEAD}
    if model.has_mtp:  # whose block computes with the decoder's last norm before the head does
        names = {"embed": ("embedding", "norm"), "head": ("mtp_norm", "head", "head_bias")}

    def ends(tree: Tree) -> dict[Any, Tree]:
        return {op: {name: tree[name] for name in own if name in tree} for op, own in names.items()}

    blocks = range(model.num_blocks)
    gathers = {block: owned(context.gathers, model, block + 1, lambda own, _: own.unstacked()) for block in blocks}
    shards = {block: owned(params, model, block + 1, _slice) for block in blocks}
    first = token_Bn if context.config.train.grad_accumulation > 1 else None
    return ParamGathering(ends(context.gathers) | gathers, ends(params) | shards, whole, context.config, first)


def _stored(params: Params, model: ModelConfig, block: int) -> Stored:
    """Return the weights of a block's experts as a stacked array and an index, without slicing."""
    number, period, place = places(model)[block]
    return Stored(params["segments"][number][place]["moe"]["experts"], period)


def _slice(leaf: jax.Array, period: int) -> jax.Array:
    return leaf[period]


def _gathered(total: Callable[[int], Tree], model: ModelConfig, stacked: dict[int, Tree]) -> Grads:
    """Return the gradients in the layout of the parameters, from those of all owners and of the segments that are
    already stacked.
    """
    trees: dict[int, Tree] = dict(stacked)
    for number, segment in enumerate(segments(model)):
        if number not in stacked:
            owners = [owner for owner, place in enumerate(places(model), start=1) if place[0] == number]
            period = len(segment.kinds)
            trees[number] = {
                place: jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(total, owners[place::period]))
                for place in range(period)
            }
    return {"embedding": total(0), "segments": trees, **total(model.num_blocks + 1)}


def _parts(sums: GradientReducer, inputs: StepInputs, context: StepContext) -> ObjectiveParts:
    tasks = sums.tasks
    parts = parts_of(
        tasks.heads.losses, sums.stats(), sums.count_ME, tasks.dims.routed_tokens, context.config.model.moe
    )
    return with_max_logits(parts, tasks.max_logit_LH(), inputs.batch_part.part, inputs.batch_part.parts)
