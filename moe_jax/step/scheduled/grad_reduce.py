"""Sum a step's gradients and token counts over devices, task by task.

Owners of gradients are numbered: 0 is the embedding, b + 1 is block b, the last one is the norm and the head. M blocks
with experts, E experts.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.models.moe import RouterStats, balance_shares
from moe_jax.parallel.mesh import TOKEN_AXES, Axis
from moe_jax.parallel.reductions import REDUCTIONS, ReduceImpl, StartedSum, scatter_in_shape, scatter_of, sum_in_shape
from moe_jax.parallel.trees import Tree
from moe_jax.parallel.zero import ShardSpec
from moe_jax.schedule.actions import NO_BLOCK, Action
from moe_jax.step.scheduled.executor import Tasks
from moe_jax.step.scheduled.reduce_groups import ReduceAxes, Reduction

_SMALL = 2**16  # elements of a sum that XLA:TPU runs on the TensorCore, where it is synchronous


class GradientReducer:
    """Runs the sums over devices of a step, or of a scan iteration, and collects the results.

    `earlier` returns an owner's gradients of earlier accumulation steps, which are added before the sum.
    """

    def __init__(self, reductions: tuple[Reduction, ...], tasks: Tasks, earlier: Callable[[int], Tree] | None):
        self.reductions, self.tasks, self.earlier = reductions, tasks, earlier
        self.model = tasks.dims.config.model
        self.loop_gradients: dict[int, Tree] = {}  # gradients of owners whose tasks ran in another scan iteration
        self.loop_stats: dict[int, RouterStats] = {}  # statistics of all blocks of a scan, by its first block
        self.packed: dict[int, list[jax.Array]] = {}  # arrays of each owner's groups of gradients
        self.name = tasks.dims.config.exchange.reduction
        self.in_flight: dict[int, list[StartedSum]] = {}
        self.counts: StartedSum | None = None  # token counts of all routers, in flight

    @classmethod
    def of_device(cls, tasks: Tasks) -> "GradientReducer":
        """Return one that collects a device's own gradients and sums nothing over devices."""
        nothing = Reduction(groups=(), shard_specs=(), buckets=())
        return cls((nothing,) * (len(tasks.dims.shape.kinds) + 2), tasks, None)

    def run(self, action: Action) -> None:
        """Run a G (gradient sum) task."""
        if action.op == "counts":
            self._count()
            return
        owner = {"embed": 0, "head": len(self.reductions) - 1}.get(action.op, action.block + 1)
        reduction = self.reductions[owner]
        if owner not in self.packed:
            self.packed[owner] = reduction.pack(self.own(owner))
        bucket, spec = reduction.take(self.packed[owner], action.part)
        self.in_flight.setdefault(owner, []).append(self._start(bucket, spec, reduction.axes(action.part)))

    def _start(self, bucket: jax.Array, spec: ShardSpec | None, axes: ReduceAxes) -> StartedSum:
        """Start to reduce a bucket: scatter its sum over some axes, then sum what each rank has over the others.

        `spec`: how the sum of a bucket in its own shape is sharded; None: the bucket is flat.
        """
        whole, platform = sum_in_shape(self.name), self.tasks.dims.compute.platform
        if not axes.scattered:
            return self._started(whole, bucket, axes.others)
        scatter = scatter_of(self.name, platform) if spec is None else scatter_in_shape(self.name, platform, spec)
        scattered = self._started(scatter, bucket, axes.scattered)
        if not axes.others:
            return scattered
        return self._started(whole, scatter.finish(scattered.in_flight), axes.others)

    def _count(self) -> None:
        stats = self.stats()
        assert stats is not None  # the shape has no counts without routers
        impl = REDUCTIONS[self.name]
        impl = impl if impl.only_starts else REDUCTIONS["all_reduce"]  # the others are for large arrays
        count_n, order = stats.count_E.ravel(), self.tasks.order
        if self.tasks.dims.compute.platform == "tpu":
            # a small sum is synchronous there: next to an exchange it would wait for it, so it is a part of compute
            # after the last one, whose rows the next task needs
            self.counts = StartedSum(impl, impl.start(order.after_comm(order.after_compute(count_n)), TOKEN_AXES))
            order.record_compute(self.counts.in_flight[-1])
        else:
            self.counts = self._started(impl, count_n, TOKEN_AXES)
        moe = [block for block, kind in enumerate(self.tasks.dims.shape.kinds) if kind == "moe"]
        self.tasks.share = lambda block: self.share_ME[moe.index(block)]

    @functools.cached_property
    def count_ME(self) -> jax.Array | None:
        """Number of (token, choice) pairs on all devices that chose each expert; None without routers."""
        if self.counts is None:
            return None
        return self._arrived(self.counts).reshape(-1, self.model.moe.num_experts)

    @functools.cached_property
    def share_ME(self) -> jax.Array:
        """The factor of each expert's probability in the load-balance loss."""
        assert self.count_ME is not None
        return balance_shares(self.count_ME, self.model.moe)

    def stats(self) -> RouterStats | None:
        """Return the router statistics summed over microbatches, with a leading dimension M; None without routers."""
        of_block: dict[int, list[RouterStats]] = {}
        for (block, _), stats in self.tasks.stats.items():
            of_block.setdefault(block, []).append(stats)
        rows = {
            block: jax.tree.map(lambda *parts: jnp.expand_dims(sum(parts), 0), *parts)
            for block, parts in of_block.items()
        }
        rows |= self.loop_stats
        in_order = [rows[block] for block in sorted(rows)]
        return jax.tree.map(lambda *blocks: jnp.concatenate(blocks), *in_order) if in_order else None

    def own(self, owner: int) -> Tree:
        """Return an owner's gradients on this device."""
        if owner in self.loop_gradients:
            return self.loop_gradients[owner]
        own = self._of_this_part(owner)
        if self.earlier is None:
            return own
        return jax.tree.map(
            lambda new, old: None if new is None else new + old, own, self.earlier(owner), is_leaf=_is_missing
        )

    def _of_this_part(self, owner: int) -> Tree:
        grads = self.tasks.pullbacks.grads
        if owner == 0:
            embedding = grads["embed", NO_BLOCK]
            return embedding + grads["head", NO_BLOCK]["embedding"] if self.model.tie_word_embeddings else embedding
        if owner == len(self.reductions) - 1:
            ends = {name: grad for name, grad in grads["head", NO_BLOCK].items() if name != "embedding"}
            if self.model.has_mtp:  # whose block computes with the decoder's last norm, too
                ends["norm"] = ends["norm"] + grads["attend", self.model.num_layers]["last_norm"]
            return ends
        block = {name: grad for name, grad in grads["attend", owner - 1].items() if name != "last_norm"}
        if "moe" not in block:
            return block
        # a reduction of this block may run before the gradients of unreplicated experts exist
        experts = grads.get(("expert", owner - 1))
        if experts is None:
            experts = jax.tree.map(lambda _: None, self.tasks.blocks[owner - 1]["moe"]["experts"])
        experts = self.tasks.hot.add_to_owners(owner - 1, experts, self.tasks.order)
        return block | {"moe": block["moe"] | {"experts": experts}}

    def total(self, owner: int) -> Tree:
        """Return an owner's gradients, summed over devices as far as its reductions have run; sharded ones are this
        device's shard.
        """
        sums = [self._arrived(bucket) for bucket in self.in_flight.get(owner, [])]
        return self.reductions[owner].unpack(self.own(owner), sums)

    def _started(self, impl: ReduceImpl, x: jax.Array, axes: tuple[Axis, ...]) -> StartedSum:
        """Start a sum in the order of the schedule."""
        order = self.tasks.order
        if order.uses_network:
            in_flight = impl.start(order.after_network(x), axes)
            order.record_network(in_flight[-1])
            return StartedSum(impl, in_flight)
        if self.tasks.dims.compute.platform == "gpu" and jax.lax.axis_size(Axis.DATA) > 1:
            # Data ranks may be in other nodes, and sums over them take longer than all compute. Issued in order, they
            # would be XLA:GPU's critical path: it would finish them first and expose the exchanges.
            return StartedSum(impl, impl.start(x, axes))
        if self.tasks.dims.compute.platform == "tpu" and x.size < _SMALL:
            # synchronous there: it would wait for an exchange that is under way, and compute for it
            late = ReduceImpl(lambda x, axes: (x,), lambda started: impl(order.after_comm(started[0]), axes))
            return StartedSum(late, late.start(x, axes))
        in_flight = impl.start(order.after_comm(x, impl.only_starts), axes)
        order.record_comm(in_flight[-1], impl.only_starts)
        return StartedSum(impl, in_flight)

    def _arrived(self, started: StartedSum) -> jax.Array:
        return started.arrive(self.tasks.order.arrived_late)


def _is_missing(leaf: Any) -> bool:
    return leaf is None
