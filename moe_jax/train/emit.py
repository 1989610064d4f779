"""The gradients of a training step, its tasks issued one by one in the order of a schedule.

B sequences of this device, N tokens of each and N1 = N + 1, M blocks with experts, E experts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moe_jax.config import Config, Model
from moe_jax.models.moe import RouterStats
from moe_jax.models.parameters import blocks_of, param_dims, param_shapes, stack_blocks
from moe_jax.models.transformer import Computation
from moe_jax.parallel.grad_sync import sum_over_batch
from moe_jax.parallel.mesh import Axis, batch_shards
from moe_jax.parallel.reductions import REDUCTIONS
from moe_jax.parallel.sharding import partitions
from moe_jax.plan.costs import rates_of, task_times
from moe_jax.schedule.actions import NO_BLOCK, Action, is_reduction, two_streams
from moe_jax.schedule.build import make_schedule, make_shape
from moe_jax.schedule.dependencies import check
from moe_jax.schedule.schedule import Schedule
from moe_jax.train.objective import Parts, parts_of
from moe_jax.train.reduction import Reduction
from moe_jax.train.tasks import Facts, Tasks

Tree = Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule and how the gradients of its owners are summed."""

    schedule: Schedule
    reductions: tuple[Reduction, ...]  # embed, the blocks, head

    def without_reductions(self) -> "Plan":
        """The same with gradients left as they are on each device."""
        actions = tuple(action for action in self.schedule.actions if not is_reduction(action))
        nothing = dataclasses.replace(self.reductions[0], vectors=(), chunks=())
        return Plan(dataclasses.replace(self.schedule, actions=actions), (nothing,) * len(self.reductions))


def make_plan(config: Config, mesh: Mesh) -> Plan:
    """The schedule that a config asks for, with the chunks of its reductions. Raises ScheduleError."""
    settings, model = config.schedule, config.model
    specs = partitions(param_dims(model))

    def local(shape: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(shape.shape), shape.dtype)

    shapes = _owners(
        jax.tree.map(local, param_shapes(model), specs),
        model,
        lambda leaf, _: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
    )
    owner_specs = _owners(specs, model, lambda spec, _: PartitionSpec(*spec[1:]))
    chunk_mb = settings.chunk_mb if settings.grad_reduce == "chunked" else None
    reductions = tuple(
        Reduction.of(shape, spec, mesh.shape, chunk_mb) for shape, spec in zip(shapes, owner_specs, strict=True)
    )
    shape = make_shape(
        settings.policy,
        model.block_kinds,
        settings.microbatches,
        settings.backward_microbatches,
        weight_grad=settings.weight_grad,
        grad_reduce=settings.grad_reduce,
        reductions=tuple(len(reduction.chunks) for reduction in reductions),
        tied=model.tie_embeddings,
        local_experts=mesh.shape[Axis.DATA] == 1,
    )
    platform = Computation.of(config, mesh).platform
    tokens = config.train.batch_size // config.train.grad_accumulation // batch_shards(mesh) * config.data.seq_len
    sent = [reduction.sent_bytes(mesh.shape) for reduction in reductions]
    times = task_times(config, tokens, mesh.shape[Axis.EXPERT], sent, rates_of(config, platform))
    schedule = make_schedule(settings.policy, shape, times.of(shape), two_streams)
    check(schedule)
    return Plan(schedule, reductions)


def _owners(tree: Tree, model: Model, take: Callable[[Any, int], Any]) -> list[Tree]:
    """The subtrees of embed, the blocks and head; `take` gives one block's share of a stacked leaf."""
    top = {name: tree[name] for name in ("norm", "head") if name in tree}
    return [tree["embedding"], *blocks_of(tree, model, take), top]


def scheduled_gradients(
    params: Tree,
    token_BN1: jax.Array,
    config: Config,
    how: Computation,
    global_tokens: int,
    plan: Plan,
    earlier: Tree = None,
) -> tuple[Tree, Parts]:
    """Gradients of the objective, summed over devices, and this device's share of its parts.

    `earlier` are gradients of this device that are to be added before the sums. The same
    as `jax.grad` of `local_objective` and `sync_gradients`, to round-off.
    """
    shape = plan.schedule.shape
    facts = Facts(config, how, shape, global_tokens, tokens=token_BN1[:, 1:].size)
    blocks = dict(enumerate(_owners(params, config.model, lambda leaf, turn: leaf[turn])[1:-1]))
    tasks = Tasks(facts, params, blocks, token_BN1)
    sums = Sums(plan.reductions, tasks, earlier and _owners(earlier, config.model, lambda leaf, turn: leaf[turn]))
    runs = {"F": tasks.forward, "B": tasks.backward, "W": tasks.weights, "G": sums.run}
    for action in plan.schedule.actions:
        with jax.named_scope(str(action)):
            runs[action.direction](action)
    return sums.gradients(), sums.parts()


def _is_missing(leaf: Any) -> bool:
    return leaf is None


class Sums:
    """Runs the sums over devices of a step and collects what comes out."""

    def __init__(self, reductions: tuple[Reduction, ...], tasks: Tasks, earlier: list[Tree] | None):
        self.reductions, self.tasks, self.earlier = reductions, tasks, earlier
        self.model = tasks.facts.config.model
        self.vectors: dict[int, list[jax.Array]] = {}
        self.sums: dict[int, list[jax.Array]] = {}
        self.counts: jax.Array | None = None  # of all devices, [M, E]

    def run(self, action: Action) -> None:
        """Run a G task."""
        if action.op == "counts":
            self._count()
            return
        owner = {"embed": 0, "head": len(self.reductions) - 1}.get(action.op, action.block + 1)
        reduction = self.reductions[owner]
        if owner not in self.vectors:
            self.vectors[owner] = reduction.flatten(self._own(owner))
        chunk = self.tasks.in_order(reduction.take(self.vectors[owner], action.part))
        reduce = REDUCTIONS[self.tasks.facts.config.exchange.reduction]
        total = self.tasks.last = reduce(chunk, reduction.axes(action.part))
        self.sums.setdefault(owner, []).append(total)

    def _count(self) -> None:
        own = self.stats().count_E
        self.counts = self.tasks.last = sum_over_batch(self.tasks.in_order(own))
        share_ME = self.counts / self.counts.sum(axis=-1, keepdims=True)
        self.tasks.share = dict(zip(self._moe_blocks(), share_ME, strict=True))

    def _moe_blocks(self) -> list[int]:
        return [block for block, kind in enumerate(self.model.block_kinds) if kind == "moe"]

    def stats(self) -> RouterStats:
        """Router statistics of all microbatches, with a leading dimension M."""
        microbatches = range(self.tasks.facts.microbatches)
        of_block = [
            jax.tree.map(lambda *parts: sum(parts), *(self.tasks.stats[block, r] for r in microbatches))
            for block in self._moe_blocks()
        ]
        return jax.tree.map(lambda *blocks: jnp.stack(blocks), *of_block)

    def _own(self, owner: int) -> Tree:
        """An owner's gradients of this device."""
        own = self._of_this_part(owner)
        if self.earlier is None:
            return own
        return jax.tree.map(
            lambda new, old: None if new is None else new + old, own, self.earlier[owner], is_leaf=_is_missing
        )

    def _of_this_part(self, owner: int) -> Tree:
        grads = self.tasks.grads
        if owner == 0:
            embedding = grads["embed", NO_BLOCK]
            return embedding + grads["head", NO_BLOCK]["embedding"] if self.model.tie_embeddings else embedding
        if owner == len(self.reductions) - 1:
            return {name: grad for name, grad in grads["head", NO_BLOCK].items() if name != "embedding"}
        block = grads["attend", owner - 1]
        if "moe" not in block:
            return block
        # a reduction of this block may come before the gradients of experts that nobody shares
        experts = grads.get(("expert", owner - 1))
        if experts is None:
            experts = jax.tree.map(lambda _: None, self.tasks.blocks[owner - 1]["moe"]["experts"])
        return block | {"moe": block["moe"] | {"experts": experts}}

    def gradients(self) -> Tree:
        """All gradients, in the layout of the parameters."""
        owned = [
            reduction.restore(self._own(owner), self.sums.get(owner, []))
            for owner, reduction in enumerate(self.reductions)
        ]
        return {"embedding": owned[0], "segments": stack_blocks(owned[1:-1], self.model), **owned[-1]}

    def parts(self) -> Parts:
        """This device's share of the objective's parts."""
        return parts_of(
            self.tasks.cross_entropy,
            self.stats() if self._moe_blocks() else None,
            self.counts,
            self.tasks.facts.global_tokens,
        )
