"""What the passes of a stage read besides the residual stream, by microbatch.

M microbatches of b sequences on this device, N local tokens of each.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.config.layer_layout import GroupBlock
from moe_jax.models.mtp import MTPInputs
from moe_jax.parallel.pipeline import stage
from moe_jax.parallel.sequence_shards import LocalTokens
from moe_jax.parallel.trees import Params
from moe_jax.plan.pass_orders import Orders
from moe_jax.step.context import StepContext, StepInputs
from moe_jax.step.pipelined.buffers import get
from moe_jax.step.pipelined.build import PipelinedPlan
from moe_jax.step.pipelined.stage_params import weights_of
from moe_jax.step.pipelined.tick_table import TickPass
from moe_jax.step.scheduled.scan_residuals import BlockConsts


class MTPBlock(NamedTuple):
    """The block of multi-token prediction for one microbatch."""

    orders: Orders
    consts: BlockConsts
    inputs: MTPInputs


class StageInputs:
    """The inputs of all microbatches on this device. `params` are those of its stage's blocks."""

    def __init__(self, params: Params, inputs: StepInputs, context: StepContext, plan: PipelinedPlan):
        self._params, self._plan = params, plan
        self._slot_ME = inputs.slot_ME  # placement of all blocks' experts; None: experts in order
        by_microbatch = functools.partial(_by_microbatch, microbatches=plan.table.microbatches)
        self._tokens = LocalTokens(*map(by_microbatch, inputs.local_tokens()))
        document_BN, router_inputs = inputs.document_BN(context), inputs.router_inputs(context)
        self._document_MbN = None if document_BN is None else by_microbatch(document_BN)
        self._router_inputs = router_inputs and router_inputs.with_tokens(by_microbatch)
        mtp = inputs.mtp(context)
        self._mtp = mtp and mtp._replace(next_Bn=by_microbatch(mtp.next_Bn), target_Bn=by_microbatch(mtp.target_Bn))

    @property
    def shape_bN(self) -> tuple[int, int]:
        """Sequences of a microbatch, and local tokens of each."""
        _, sequences, length = self._tokens.input_Bn.shape
        return sequences, length

    def tokens(self, work: TickPass) -> LocalTokens:
        """Return the tokens of a pass."""
        return LocalTokens(*(get(x_Mbn, work.microbatch) for x_Mbn in self._tokens))

    def consts(self, number: int, work: TickPass) -> BlockConsts:
        """Return the constants of a pass over the blocks of a chunk with structure `number`."""
        plan, below = self._plan, self.blocks_below(work)
        rows_m = jnp.asarray(plan.moe_rows(number))[stage(), work.chunk]
        return self._consts(plan.structures[number], work, below, rows_m)

    def blocks_below(self, work: TickPass) -> jax.Array:
        """Return the number of the model's blocks below the chunk of a pass."""
        return jnp.asarray(self._plan.stages.first_block)[work.chunk * self._plan.table.stages + stage()]

    def mtp(self, work: TickPass) -> MTPBlock | None:
        """Return the block of multi-token prediction for a pass of the head; None without it, and in evaluation."""
        if self._mtp is None:
            return None
        plan, own = self._plan, self._mtp
        assert plan.mtp is not None
        inputs = own._replace(next_Bn=get(own.next_Bn, work.microbatch), target_Bn=get(own.target_Bn, work.microbatch))
        consts = self._consts(plan.stages.mtp, work, plan.stages.model.num_layers, jnp.asarray(plan.mtp_rows))
        return MTPBlock(plan.mtp, consts, inputs)

    def _consts(
        self, blocks: Sequence[GroupBlock], work: TickPass, below: int | jax.Array, rows_m: jax.Array
    ) -> BlockConsts:
        """Return the constants of blocks above the lowest `below` ones. `rows_m` are the indices of those with experts
        among the model's.
        """
        weights = weights_of(self._params, self._plan, blocks, work.chunk)
        slots = {}
        if self._slot_ME is not None:
            moe = [block for block, member in enumerate(blocks) if member.kind == "moe"]
            slots = {block: get(self._slot_ME, rows_m[m]) for m, block in enumerate(moe)}
        document_bN = None if self._document_MbN is None else get(self._document_MbN, work.microbatch)
        if self._router_inputs is None:
            return BlockConsts(weights, None, slots, document_bN)
        router_inputs = self._router_inputs.with_tokens(lambda x_Mbn: get(x_Mbn, work.microbatch)).above(below)
        return BlockConsts(weights, router_inputs, slots, document_bN)


def _by_microbatch(x_Bn: jax.Array, microbatches: int) -> jax.Array:
    return x_Bn.reshape(microbatches, -1, x_Bn.shape[1])
