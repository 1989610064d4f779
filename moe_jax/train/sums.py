"""Sums over devices of a step's gradients and counts, task by task.

Owners of gradients are counted: 0 is the embedding, b + 1 block b, the last one the norm and the head.
M blocks with experts, E experts.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.models.moe import RouterStats
from moe_jax.parallel.grad_sync import sum_over_batch
from moe_jax.parallel.ordering import after, hold
from moe_jax.parallel.reductions import REDUCTIONS
from moe_jax.schedule.actions import NO_BLOCK, Action
from moe_jax.train.reduction import Reduction
from moe_jax.train.tasks import Tasks

Tree = Any


class Sums:
    """Runs the sums over devices of a step, or of a turn of a loop, and collects what comes out.

    `earlier` gives gradients of an owner that are to be added before.
    """

    def __init__(self, reductions: tuple[Reduction, ...], tasks: Tasks, earlier: Callable[[int], Tree] | None):
        self.reductions, self.tasks, self.earlier = reductions, tasks, earlier
        self.model = tasks.facts.config.model
        self.from_turns: dict[int, Tree] = {}  # gradients of owners whose tasks are those of another turn
        self.stats_of_turns: dict[int, RouterStats] = {}  # of all blocks of a loop, by its first block
        self.vectors: dict[int, list[jax.Array]] = {}
        self.sums: dict[int, list[jax.Array]] = {}
        self.sent: dict[int, list[jax.Array]] = {}
        self.count_ME: jax.Array | None = None  # of all devices
        self.share_ME: jax.Array | None = None

    def run(self, action: Action) -> None:
        """Run a G task."""
        if action.op == "counts":
            self._count()
            return
        owner = {"embed": 0, "head": len(self.reductions) - 1}.get(action.op, action.block + 1)
        reduction = self.reductions[owner]
        if owner not in self.vectors:
            self.vectors[owner] = reduction.flatten(self.own(owner))
        chunk = self.tasks.in_order(reduction.take(self.vectors[owner], action.part))
        reduce = REDUCTIONS[self.tasks.facts.config.exchange.reduction]
        total = self.tasks.last = reduce(chunk, reduction.axes(action.part))
        self.sums.setdefault(owner, []).append(total)
        self.sent.setdefault(owner, []).append(chunk)

    def _count(self) -> None:
        stats = self.stats()
        assert stats is not None  # the shape has no counts without routers
        self.count_ME = self.tasks.last = sum_over_batch(self.tasks.in_order(stats.count_E))
        self.share_ME = self.count_ME / self.count_ME.sum(axis=-1, keepdims=True)
        moe = [block for block, kind in enumerate(self.model.block_kinds) if kind == "moe"]
        self.tasks.share = dict(zip(moe, self.share_ME, strict=True))

    def stats(self) -> RouterStats | None:
        """Router statistics of all microbatches with a leading dimension M; None without routers."""
        of_block: dict[int, list[RouterStats]] = {}
        for (block, _), stats in self.tasks.stats.items():
            of_block.setdefault(block, []).append(stats)
        rows = {
            block: jax.tree.map(lambda *parts: jnp.expand_dims(sum(parts), 0), *parts)
            for block, parts in of_block.items()
        }
        rows |= self.stats_of_turns
        in_order = [rows[block] for block in sorted(rows)]
        return jax.tree.map(lambda *blocks: jnp.concatenate(blocks), *in_order) if in_order else None

    def own(self, owner: int) -> Tree:
        """An owner's gradients of this device."""
        if owner in self.from_turns:
            return self.from_turns[owner]
        own = self._of_this_part(owner)
        if self.earlier is None:
            return own
        return jax.tree.map(
            lambda new, old: None if new is None else new + old, own, self.earlier(owner), is_leaf=_is_missing
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

    def total(self, owner: int) -> Tree:
        """An owner's gradients, summed over devices as far as reductions were run."""
        chunks = zip(self.sums.get(owner, []), self.sent.get(owner, []), strict=True)
        return self.reductions[owner].restore(self.own(owner), [self._arrived(*chunk) for chunk in chunks])

    def _arrived(self, total: jax.Array, sent: jax.Array) -> jax.Array:
        platform = self.tasks.facts.how.platform
        if platform != "cpu" or self.tasks.computed is None:
            return total
        # read behind all tasks: until then no task gets the memory of the sum or of what was sent
        return hold(after(total, self.tasks.computed, platform), sent, platform)


def _is_missing(leaf: Any) -> bool:
    return leaf is None
