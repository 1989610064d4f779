"""The gradients of a training step, its tasks issued one by one in the order of a schedule.

B sequences of this device, N tokens of each and N1 = N + 1, M blocks with experts, E experts.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moe_jax.config import Config, Model
from moe_jax.config.layer_layout import segments
from moe_jax.distributed.processes import read_alike
from moe_jax.models.dispatchers.ragged import Stored
from moe_jax.models.gates.seen import EVALUATION, When
from moe_jax.models.parameters import param_dims, param_shapes
from moe_jax.models.placement import slot_shapes
from moe_jax.models.transformer import Computation
from moe_jax.parallel.mesh import expert_axis
from moe_jax.parallel.own_tokens import own_tokens
from moe_jax.parallel.sharding import partitions
from moe_jax.parallel.zero import no_cuts
from moe_jax.plan.costs import order_times
from moe_jax.plan.measured import read_times
from moe_jax.plan.step_shape import step_shape
from moe_jax.plan.task_times import Stage
from moe_jax.schedule.actions import NO_BLOCK, is_reduction, two_streams
from moe_jax.schedule.build import make_schedule
from moe_jax.schedule.dependencies import check
from moe_jax.schedule.schedule import Schedule
from moe_jax.schedule.turns import Looped, Turns, make_looped
from moe_jax.step.losses import Parts, parts_of
from moe_jax.step.optimizer import state_cuts
from moe_jax.step.scheduled.executor import Tasks
from moe_jax.step.scheduled.grad_buckets import Reduction
from moe_jax.step.scheduled.grad_reduce import Sums
from moe_jax.step.scheduled.layer_loop import Loops, run
from moe_jax.step.scheduled.step_dims import Facts

Tree = Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule and how the gradients of its owners are summed."""

    schedule: Schedule
    reductions: tuple[Reduction, ...]  # of each owner: embed, the blocks, head
    cuts: Tree  # of gradients: what the reductions leave of them is cut over devices
    looped: Looped | None  # the same tasks, where turns of blocks run in loops

    def without_reductions(self) -> "Plan":
        """The same with gradients left as they are on each device."""
        actions = tuple(action for action in self.schedule.actions if not is_reduction(action))
        nothing = dataclasses.replace(self.reductions[0], vectors=(), chunks=())
        return Plan(
            dataclasses.replace(self.schedule, actions=actions),
            (nothing,) * len(self.reductions),
            no_cuts(self.cuts),
            self.looped and self.looped.without_reductions(),
        )


def make_plan(config: Config, mesh: Mesh) -> Plan:
    """The schedule that a config asks for, with the chunks of its reductions. Raises ScheduleError or ConfigError."""
    settings = config.schedule
    reductions = reductions_of(config, mesh, settings.bucket_cap_mb if settings.grad_reduce == "bucketed" else None)
    shape = step_shape(config, mesh.shape, [len(reduction.chunks) for reduction in reductions])
    platform = Computation.of(config, mesh).platform
    sent = [reduction.sent_bytes(mesh.shape) for reduction in reductions]
    times = order_times(config, mesh.shape, platform, sent, measured_times(config))
    looped = None
    if turns := _turns(config)[1]:
        schedule, looped = make_looped(settings.policy, shape, turns, times.of(shape), two_streams)
    else:
        schedule = make_schedule(settings.policy, shape, times.of(shape), two_streams)
    check(schedule)
    return Plan(schedule, reductions, state_cuts(config, mesh), looped)


def reductions_of(config: Config, mesh: Mesh, bucket_cap_mb: float | None) -> tuple[Reduction, ...]:
    """How the gradients of each owner are summed: embed, the blocks, head."""
    model = config.model
    specs, cuts = partitions(param_dims(model), expert_axis(config.mesh)), state_cuts(config, mesh)

    def local(shape: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(shape.shape), shape.dtype)

    shapes = jax.tree.map(local, slot_shapes(param_shapes(model), config.expert_slots(mesh.shape)), specs)
    return tuple(
        Reduction.of(
            _owned(shapes, model, owner, lambda leaf, _: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)),
            _owned(specs, model, owner, lambda spec, _: PartitionSpec(*spec[1:])),
            _owned(cuts, model, owner, lambda cut, _: cut.unstacked()),
            mesh.shape,
            bucket_cap_mb,
        )
        for owner in range(model.num_layers + 2)
    )


def measured_times(config: Config) -> Mapping[str, Stage]:
    """Times that a file gives, the same on all processes: collectives in another order would wait for each other."""
    path = config.schedule.task_times
    if path is None:
        return {}
    kinds = config.model.block_kinds
    return read_alike(lambda: read_times(path, kinds), f"schedule.task_times={path}").compute


def _turns(config: Config) -> tuple[int, Turns | None]:
    """The segment with most periods, and its blocks in turns, if they are worth a loop."""
    runs = segments(config.model)
    number, longest = max(enumerate(runs), key=lambda run: run[1].repeats)
    first = sum(len(run.kinds) * run.repeats for run in runs[:number])
    return number, Turns.of(first, len(longest.kinds), longest.repeats, config.schedule.unroll)


def _owned(tree: Tree, model: Model, owner: int, take: Callable[[Any, int], Any]) -> Tree:
    """An owner's part of a tree like the parameters; `take(leaf, period)` gives a block's share of a stacked leaf."""
    if owner == 0:
        return tree["embedding"]
    if owner == model.num_layers + 1:
        return {name: tree[name] for name in ("norm", "head") if name in tree}
    number, period, place = _places(model)[owner - 1]
    return jax.tree.map(lambda leaf: take(leaf, period), tree["segments"][number][place])


@functools.cache
def _places(model: Model) -> list[tuple[int, int, int]]:
    """Segment, period and place in it of each block."""
    return [
        (number, period, place)
        for number, segment in enumerate(segments(model))
        for period in range(segment.repeats)
        for place in range(len(segment.kinds))
    ]


def _stored(params: Tree, model: Model, block: int) -> Stored:
    """The weights of a block's experts, not taken out."""
    number, period, place = _places(model)[block]
    return Stored(params["segments"][number][place]["moe"]["experts"], period)


def _slice(leaf: jax.Array, period: int) -> jax.Array:
    return leaf[period]


def scheduled_gradients(
    params: Tree,
    token_BN1: jax.Array,
    config: Config,
    how: Computation,
    global_tokens: int,
    plan: Plan,
    earlier: Tree = None,
    when: When = EVALUATION,
    slot_ME: jax.Array | None = None,
) -> tuple[Tree, Parts]:
    """Gradients of the objective, summed over devices, and this device's share of its parts.

    `earlier` are gradients of this device that are to be added before the sums; `when` and `slot_ME` as there. Of what
    `plan.cuts` cut a device gets the sum of its own part. The same as `jax.grad` of `local_objective` and
    `sync_gradients`, to round-off.
    """
    shape, model, looped = plan.schedule.shape, config.model, plan.looped
    tokens = own_tokens(token_BN1)
    facts = Facts(config, how, shape, global_tokens, tokens=tokens.input_Bn.size)
    issued = plan.schedule.actions if looped is None else (*looped.bottom, *looped.top)
    outside = {action.block for action in issued} - {NO_BLOCK}
    blocks = {block: _owned(params, model, block + 1, _slice) for block in outside}
    seen = when.seen(token_BN1[:, :-1], model.moe, how.seed)
    moe = [block for block, kind in enumerate(model.block_kinds) if kind == "moe"]
    slots = {} if slot_ME is None else {block: slot_ME[m] for m, block in enumerate(moe) if block in outside}
    tasks = Tasks(facts, params, blocks, tokens, functools.partial(_stored, params, model), seen, slots)
    sums = Sums(
        plan.reductions, tasks, None if earlier is None else lambda owner: _owned(earlier, model, owner, _slice)
    )
    if looped is None:
        run(issued, tasks, sums)
        return _gathered(sums.total, model, {}), _parts(sums, global_tokens)
    number, _ = _turns(config)
    loops = Loops(
        looped,
        segments(model)[number],
        sums,
        params["segments"][number],
        plan.cuts["segments"][number],
        None if earlier is None else earlier["segments"][number],
        seen,
        slot_ME,
    )
    run(looped.bottom, tasks, sums)
    loops.up()
    run(looped.top, tasks, sums)
    loops.down()
    run(looped.end, tasks, sums)
    loops.reduce()
    run(looped.rest, tasks, sums)
    for block in range(looped.turns.last, model.num_layers):
        if _places(model)[block][0] == number:
            loops.gradients.put_sum(0, block, sums.total(block + 1))
    return _gathered(sums.total, model, {number: loops.gradients.tree()}), _parts(sums, global_tokens)


def _gathered(total: Callable[[int], Tree], model: Model, stacked: dict[int, Tree]) -> Tree:
    """Gradients in the layout of the parameters, of all owners and the segments that are stacked already."""
    trees: dict[int, Tree] = dict(stacked)
    for number, segment in enumerate(segments(model)):
        if number not in stacked:
            owners = [owner for owner, place in enumerate(_places(model), start=1) if place[0] == number]
            period = len(segment.kinds)
            trees[number] = {
                place: jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(total, owners[place::period]))
                for place in range(period)
            }
    return {"embedding": total(0), "segments": trees, **total(model.num_layers + 1)}


def _parts(sums: Sums, global_tokens: int) -> Parts:
    return parts_of(sums.tasks.cross_entropy, sums.stats(), sums.count_ME, global_tokens, sums.model.moe)
