"""Weights of the blocks in a scan: each iteration reads its share of the stacked parameters.

With `optimizer.zero=3` devices store shards. An iteration then computes with whole weights that the iteration before it
has gathered, and gathers those of its neighbor: the one above it in the forward scan, the one below it in the backward
scan. Experts that no other device has are not gathered: they are read where they are stored.

Blocks have the numbers of iteration 0. Only the gathers of a forward iteration have those of the blocks above.
"""

import jax
import jax.numpy as jnp

from moe_jax.parallel.gathered_params import cast_for_products
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.trees import Tree
from moe_jax.step.scheduled.executor import Tasks
from moe_jax.step.scheduled.layer_loop_grads import StackLayout
from moe_jax.step.scheduled.param_gathering import ParamGathering, but_experts, with_experts
from moe_jax.step.scheduled.step_dims import StepDims

ABOVE, BELOW = 1, -1  # the neighbor whose weights a forward or a backward iteration gathers

Weights = dict[int, Tree]  # of an iteration's blocks, by their numbers


class ScanWeights:
    """The weights of a scan's iterations. Methods with `neighbor` take ABOVE or BELOW."""

    def __init__(self, params: Tree, gathers: Tree, layout: StackLayout, dims: StepDims):
        """`params` are stacked, with this device's shards if they are sharded. `gathers` has their `ParamGather`s. Both
        are by place in a period.
        """
        self._params, self._gathers, self._layout, self._dims = params, gathers, layout, dims

    def of(self, iteration: int | jax.Array, x: jax.Array, gathered: Weights | None) -> Weights:
        """Return the weights of an iteration that begins with the residual stream `x`.

        `gathered` are those that the iteration before it has gathered; None if devices store whole weights.
        """
        stored = {block: self._stored(block, iteration, x) for block in self._layout.blocks}
        return stored if gathered is None else self._with_local_experts(gathered, stored)

    def _stored(self, block: int, iteration: int | jax.Array, x: jax.Array) -> Tree:
        """Return the stored weights of a block as products read them.

        On TPUs no earlier than `x`: outside of loops XLA would copy them when the step begins.
        """
        platform = self._dims.compute.platform
        number = depend_on(jnp.int32(iteration), x, platform) if platform == "tpu" else iteration
        weights = self._layout.take(self._params, number, block)
        return cast_for_products(self._gathers[self._layout.place_in_period(block)], weights)

    # gathers (`optimizer.zero=3`)

    def shards(self, iteration: int | jax.Array, neighbor: int) -> Weights:
        """Return this device's shards of the weights that an iteration gathers, by the numbers of the gathers."""
        other = jnp.clip(iteration + neighbor, 0, self._layout.scan_blocks.count - 1)
        offset = self._gather_offset(neighbor)
        return {block + offset: self._layout.take(self._params, other, block) for block in self._layout.blocks}

    def gathering(self, shards: Weights | None, neighbor: int) -> ParamGathering | None:
        """Return what gathers these shards; None without shards."""
        if shards is None:
            return None
        offset, place = self._gather_offset(neighbor), self._layout.place_in_period
        gathers = {block + offset: self._gathers[place(block)] for block in self._layout.blocks}
        return ParamGathering(gathers, shards, {}, self._dims.config)

    def arrived(self, gathering: ParamGathering | None, neighbor: int) -> Weights | None:
        """Wait for the weights that an iteration has gathered, and return them for that neighbor."""
        if gathering is None:
            return None
        offset = self._gather_offset(neighbor)
        for block in self._layout.blocks:
            gathering.arrive(block + offset)
        return {block: gathering.whole[block + offset] for block in self._layout.blocks}

    def _gather_offset(self, neighbor: int) -> int:
        """How far the block numbers of gathers are above those of the iteration that runs them."""
        return self._layout.scan_blocks.size if neighbor == ABOVE else 0

    # weights that are passed between the scans and the tasks outside of them

    def gathered_outside(self, tasks: Tasks, iteration: int) -> Weights | None:
        """Return the weights of an iteration that `tasks` have gathered; None if devices store whole weights."""
        if tasks.gathering is None:
            return None
        numbers = self._numbers(iteration)
        for number in numbers.values():
            tasks.gathering.arrive(number)
        weights = {block: tasks.blocks[number] for block, number in numbers.items()}
        has_local = self._dims.shape.local_experts
        return {block: but_experts(own) for block, own in weights.items()} if has_local else weights

    def pass_to(self, tasks: Tasks, iteration: int, gathered: Weights | None) -> None:
        """Pass the weights of an iteration that a scan has gathered to `tasks`, which run it outside of the scans."""
        if gathered is not None:
            numbers = self._numbers(iteration)
            weights = {numbers[block]: own for block, own in gathered.items()}
            tasks.blocks |= self._with_local_experts(weights, tasks.blocks)

    def _numbers(self, iteration: int) -> dict[int, int]:
        """The number of each block of an iteration outside of the scans, by its number in them."""
        return {block: block + iteration * self._layout.scan_blocks.size for block in self._layout.blocks}

    def _with_local_experts(self, gathered: Weights, stored: Weights) -> Weights:
        """Return gathered weights of blocks with the experts that only this device has, if there are some."""
        if not self._dims.shape.local_experts:
            return gathered
        return {block: with_experts(weights, stored.get(block)) for block, weights in gathered.items()}
