"""Run a stage's passes in a tick: per-device code inside `shard_map`.

A pass is a while-loop with trip count 0 or 1. Unlike branches of a conditional, iterations of a loop update buffers and
sums of gradients in place. Stages run different passes, but all members of a collective's group belong to one stage, so
they always run the same ones.

M microbatches of b sequences on this device, N local tokens of each, D model width.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.config.registry import EXCHANGE_FACTS
from moe_jax.models.head import LossForm, LossTerms, no_loss
from moe_jax.parallel.ordering import barrier_after
from moe_jax.parallel.pipeline import (
    Receive,
    no_handle,
    receive_transfer,
    stage,
    start_transfer,
    to_next,
    to_previous,
)
from moe_jax.parallel.trees import Grads, Params
from moe_jax.step.context import StepContext, StepInputs
from moe_jax.step.losses import ObjectiveParts, with_max_logits
from moe_jax.step.pipelined.buffers import SlotBuffers, get, put, with_own_layout
from moe_jax.step.pipelined.build import PipelinedPlan
from moe_jax.step.pipelined.embed_and_head import (
    embedded,
    embedding_gradient,
    head_gradients,
    head_gradients_with_mtp,
    share_of_loss,
)
from moe_jax.step.pipelined.model_chunk import ForwardResult, InputGradient, ModelChunk, RecomputedChunk
from moe_jax.step.pipelined.stage_inputs import StageInputs
from moe_jax.step.pipelined.stage_params import add_gradients, zero_gradients
from moe_jax.step.pipelined.tick_table import PASS_SCOPE, TickPass, TickRow, rows_of
from moe_jax.step.scheduled.step_dims import StepDims


class State(NamedTuple):
    """The values of a stage between ticks."""

    x_bND: jax.Array  # to be sent to the next stage
    dx_bND: jax.Array  # to be sent to the previous stage
    posted: jax.Array  # in the background: a handle of the next stage's transfer
    activations: jax.Array  # received: [slots, b, N, D]
    gradients: jax.Array
    saved: list[jax.Array]  # buffers of residuals of forward passes
    weight: list[jax.Array]  # buffers of what weight gradients need from backward passes
    taken: list[jax.Array]  # on CPUs: a copy of `saved`, for a pass that also writes there
    grads: Grads  # sums of them, float32, see `zero_gradients`
    parts: ObjectiveParts


class PipelineStage:
    """The passes of this device's stage. `params` are those of its blocks, and those that all stages have."""

    def __init__(self, params: Params, inputs: StepInputs, context: StepContext, plan: PipelinedPlan):
        config, compute = context.config, context.compute
        self.params, self.plan, self.compute, self._model = params, plan, compute, config.model
        self._loss_form = LossForm.of(config)
        self.inputs = StageInputs(params, inputs, context, plan)
        sequences, length = self.inputs.shape_bN
        self._x_bND = jax.ShapeDtypeStruct((sequences, length, config.model.hidden_size), jnp.dtype(compute.dtype))
        sizes = inputs.routed_tokens(context), inputs.loss_divisor(context), sequences * length
        if plan.mtp is not None:
            self._mtp_dims = StepDims(config, compute, plan.mtp.shape, *sizes, config.model.num_layers)
        self.chunks: list[ModelChunk | RecomputedChunk] = []
        for number, orders in enumerate(plan.orders):
            dims = StepDims(config, compute, orders.shape, *sizes, plan.first_block(number))
            consts = jax.eval_shape(
                functools.partial(self.inputs.consts, number), TickPass(*(jnp.int32(0),) * len(TickPass._fields))
            )
            chunk = ModelChunk(dims, orders, self._x_bND, consts)
            is_recomputed = config.schedule.remat == "chunk"
            self.chunks.append(RecomputedChunk(chunk, self._x_bND) if is_recomputed else chunk)
        residuals = [chunk.saved_shapes for chunk in self.chunks]
        buffered = [chunk.buffered_shapes for chunk in self.chunks]
        self.saved, self.taken = SlotBuffers(residuals, plan.slots.saved.num_slots), SlotBuffers(residuals, 1)
        self.weight = SlotBuffers(buffered, plan.slots.weight.num_slots)

    def first_state(self, backward: bool = True) -> State:
        """Return the state before the first tick of a step, with or without a backward pass."""
        model, slots = self._model, self.plan.slots
        zeros, nothing = jnp.zeros(self._x_bND.shape, self._x_bND.dtype), jnp.float32(0)
        num_moe, head = model.block_kinds.count("moe"), no_loss(self._loss_form)
        counts_ME = jnp.zeros((num_moe, model.moe.num_experts if num_moe else 0), jnp.int32)
        return State(
            x_bND=zeros,
            dx_bND=zeros,
            posted=no_handle(),
            # one extra slot, see `rows_of`
            activations=jnp.zeros((slots.activations.num_slots + 1, *zeros.shape), zeros.dtype),
            gradients=jnp.zeros((slots.gradients.num_slots + 1, *zeros.shape), zeros.dtype),
            saved=self.saved.empty() if backward else [],
            weight=self.weight.empty() if backward else [],
            taken=self.taken.empty() if backward and self._copies_saved else [],
            grads=zero_gradients(self.params, self.plan) if backward else {},
            parts=ObjectiveParts(
                *(head.cross_entropy, nothing, nothing, counts_ME, jnp.zeros(num_moe)),
                z_loss=head.z_loss,
                source_loss_S=head.source_loss_S,
                mtp_loss=head.mtp_loss,
                max_logit_ALH=jnp.zeros((self.plan.table.microbatches, model.num_blocks, self._top.dims.own_heads))
                if self.compute.attention.max_logits
                else None,
            ),
        )

    def tick(self, state: State, row: TickRow) -> State:
        """Run the passes of a tick, and exchange activations and gradients with the neighbouring stages.

        Transfers overlap with passes that do not need them. Gradients of the previous tick are sent during the forward
        pass, and activations of this tick during the backward pass; or both at the end, during the weight gradients. In
        the background, gradients are sent as soon as they are computed.
        """
        if self._overlaps_weight_gradients:
            return self._tick_overlapping_weight_gradients(state, row)
        fwd, bwd, split = row.forward, row.backward, self.plan.table.split_weight_grad
        runs = self.plan.runs_of(row)
        run = functools.partial(_run, runs)
        gradient = receive_transfer(state.posted, self._x_bND) if self._in_background else to_previous(state.dx_bND)
        state = run("embed", self._embed, state, fwd)
        state = self._of_structures(run, "forward", functools.partial(self._forward, save=True), state, fwd)
        dx_bND = gradient(state.x_bND)
        runs.update(self._once_arrived(runs, ("head", "together"), dx_bND))
        state = state._replace(gradients=put(state.gradients, dx_bND, row.gradient_to))
        state = run("head", self._head, state, bwd)
        if self.plan.has_pairs:
            state = self._run_together(run, state, bwd, fwd)
        activation = self._to_next(state, row)
        state = self._of_structures(run, "backward", self._input_gradient if split else self._backward, state, bwd)
        if not self._in_background:
            x_bND = activation(state.dx_bND)
            runs.update(self._once_arrived(runs, ("embed_back", "weight"), x_bND))
            state = _received(state, row, x_bND)
        else:
            state = state._replace(posted=start_transfer(state.dx_bND, "to_previous", row.gradient_part))
        state = run("embed_back", self._embed_back, state, bwd)
        if split:
            state = self._of_structures(run, "weight", self._weight_gradients, state, row.weight)
        if self._in_background:
            overlapped = min(jax.tree.leaves(state.grads), key=jnp.size)
            # send what other stages wait for before waiting
            state = _received(state, row, activation(barrier_after(overlapped, state.posted)))
        return state

    def _tick_overlapping_weight_gradients(self, state: State, row: TickRow) -> State:
        fwd, bwd = row.forward, row.backward
        runs = self.plan.runs_of(row)
        run = functools.partial(_run, runs)
        state = run("embed", self._embed, state, fwd)
        state = run("head", self._head, state, bwd)
        if self.compute.platform == "cpu" and self.plan.mtp is not None:  # both passes have collectives
            forward = [name for name in runs if name.startswith("forward")]
            runs.update({name: barrier_after(runs[name], state.gradients) for name in forward})
        state = self._of_structures(run, "forward", functools.partial(self._forward, save=True), state, fwd)
        state = self._run_together(run, state, bwd, fwd)
        state = self._of_structures(run, "backward", self._input_gradient, state, bwd)
        activation, gradient = to_next(state.x_bND), to_previous(state.dx_bND)
        state = run("embed_back", self._embed_back, state, bwd)
        state = self._of_structures(run, "weight", self._weight_gradients, state, row.weight)
        overlapped = min(jax.tree.leaves(state.grads["segments"]), key=jnp.size)
        state = _received(state, row, activation(overlapped))
        return state._replace(gradients=put(state.gradients, gradient(overlapped), row.gradient_to))

    def _run_together(self, run: Callable[..., State], state: State, bwd: TickPass, fwd: TickPass) -> State:
        if self._copies_saved:
            state = self._of_structures(run, "take", self._take, state, bwd)
        return self._of_structures(run, "together", self._together, state, bwd, fwd)

    def forward_tick(self, state: State, row: TickRow) -> State:
        """Run a tick of a step without a backward pass: no residuals are saved, and the loss is computed with the
        forward pass.
        """
        fwd = row.forward
        run = functools.partial(_run, self.plan.runs_of(row))
        state = run("embed", self._embed, state, fwd)
        state = self._of_structures(run, "forward", functools.partial(self._forward, save=False), state, fwd)
        activation = self._to_next(state, row)
        state = _received(state, row, activation(state.x_bND))
        return run_if(fwd.runs & fwd.at_loss, self._add_forward_loss, state, fwd)

    def _once_arrived(
        self, runs: dict[str, jax.Array], passes: tuple[str, ...], x_bND: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the run flags of these passes, made to depend on x: otherwise XLA:TPU overlaps the transfer of x with
        the shortest pass.
        """
        names = [name for name in runs if name.startswith(passes)] if self.compute.platform == "tpu" else []
        return {name: barrier_after(runs[name], x_bND) for name in names}

    def _to_next(self, state: State, row: TickRow) -> Receive:
        if self._in_background:
            return receive_transfer(start_transfer(state.x_bND, "to_next", row.activation_part), self._x_bND)
        return to_next(state.x_bND)

    def _of_structures(
        self, run: Callable[..., State], name: str, body: Callable[..., State], state: State, *works: TickPass
    ) -> State:
        for number in range(len(self.chunks)):
            state = run(f"{name}_{number}", functools.partial(body, number), state, *works)
        return state

    # passes

    def _embed(self, state: State, work: TickPass) -> State:
        x_bND = embedded(self.params, self.inputs.tokens(work), self._model, self.compute)
        return state._replace(activations=put(state.activations, x_bND, work.received))

    def _forward(self, number: int, state: State, work: TickPass, save: bool) -> State:
        done = self.chunks[number].forward(get(state.activations, work.received), self.inputs.consts(number, work))
        return self._with_forward(state, work, number, done, save)

    def _take(self, number: int, state: State, work: TickPass) -> State:
        residuals = self._residuals(state, work, number)
        return state._replace(taken=self.taken.write(state.taken, number, 0, residuals))

    def _together(self, number: int, state: State, bwd: TickPass, fwd: TickPass) -> State:
        residuals = (
            self.taken.read(state.taken, number, 0) if self._copies_saved else self._residuals(state, bwd, number)
        )
        forward, backward = self.chunks[number].together(
            get(state.activations, fwd.received),
            self.inputs.consts(number, fwd),
            get(state.gradients, bwd.received),
            self.inputs.consts(number, bwd),
            residuals,
        )
        # read before they are written to, or they would be copied
        forward_residuals, _ = jax.lax.optimization_barrier((forward.residuals, residuals))
        state = self._with_forward(state, fwd, number, forward._replace(residuals=forward_residuals))
        if isinstance(backward, InputGradient):
            return self._with_input_gradient(state, bwd, number, backward, residuals)
        return self._with_gradients(state._replace(dx_bND=backward.dx_bND), bwd, number, backward.grads)

    def _add_forward_loss(self, state: State, work: TickPass) -> State:
        loss = share_of_loss(self._top.dims, self.params, state.x_bND, self.inputs.tokens(work))
        # x was sent already; if it stayed unchanged, the compiler could hoist this, see `run_if`
        return self._add_loss(state._replace(x_bND=jnp.zeros_like(state.x_bND)), loss)

    def _head(self, state: State, work: TickPass) -> State:
        top = self._top_structure
        x_bND = self._top.output(self.inputs.consts(top, work), self._residuals(state, work, top))
        tokens, mtp = self.inputs.tokens(work), self.inputs.mtp(work)
        if mtp is None:
            done = head_gradients(self._top.dims, self.params, x_bND, tokens)
        else:
            done = head_gradients_with_mtp(self._mtp_dims, self.params, x_bND, tokens, mtp)
        state = self._add_loss(state, done.loss)
        if done.mtp_parts is not None:
            state = self._add_parts(state, done.mtp_parts, jnp.asarray(self.plan.mtp_rows))
        if done.mtp_max_logit_lH is not None:
            state = self._add_max_logits(state, work, done.mtp_max_logit_lH, self._model.num_layers)
        grads = state.grads | {name: state.grads[name] + grad for name, grad in done.grads.items()}
        grads = add_gradients(grads, self.plan, self.plan.stages.mtp, work.chunk, done.mtp)
        return state._replace(gradients=put(state.gradients, done.dx_bND, work.received), grads=grads)

    def _backward(self, number: int, state: State, work: TickPass) -> State:
        dx_bND, residuals = get(state.gradients, work.received), self._residuals(state, work, number)
        done = self.chunks[number].backward(dx_bND, self.inputs.consts(number, work), residuals)
        return self._with_gradients(state._replace(dx_bND=done.dx_bND), work, number, done.grads)

    def _input_gradient(self, number: int, state: State, work: TickPass) -> State:
        dx_bND, residuals = get(state.gradients, work.received), self._residuals(state, work, number)
        done = self._split_chunk(number).input_gradient(dx_bND, self.inputs.consts(number, work), residuals)
        return self._with_input_gradient(state, work, number, done, residuals)

    def _with_input_gradient(
        self, state: State, work: TickPass, number: int, done: InputGradient, residuals: list[jax.Array]
    ) -> State:
        # read before they are written to, or they would be copied
        reused, _ = jax.lax.optimization_barrier((done.reused, residuals))
        buffer_slots = self.chunks[number].buffer_slots
        return state._replace(
            dx_bND=done.dx_bND,
            saved=self.saved.write_reused(state.saved, number, work.saved, buffer_slots, reused),
            weight=self.weight.write(state.weight, number, work.weight, done.buffered),
        )

    def _weight_gradients(self, number: int, state: State, work: TickPass) -> State:
        chunk, consts = self._split_chunk(number), self.inputs.consts(number, work)
        residuals = self._residuals(state, work, number)
        reused = self.saved.read_reused(state.saved, number, work.saved, chunk.buffer_slots)
        buffered = self.weight.read(state.weight, number, work.weight)
        return self._with_gradients(state, work, number, chunk.weight_gradients(consts, residuals, reused, buffered))

    def _embed_back(self, state: State, work: TickPass) -> State:
        grad = embedding_gradient(self.params, self.inputs.tokens(work), state.dx_bND, self._model, self.compute)
        return state._replace(grads=state.grads | {"embedding": state.grads["embedding"] + grad})

    # inputs and outputs of passes

    @functools.cached_property
    def rows(self) -> TickRow:
        """The passes of all stages in each tick, with the gradient timing that this program uses."""
        return rows_of(self.plan.table, self.plan.slots, self.plan.structure_of, self._overlaps_weight_gradients)

    @property
    def _copies_saved(self) -> bool:
        """Whether the residuals that a pair of passes reads are copied in a separate loop first, because XLA:CPU drops
        ordering of reads.

        A pass that reads and writes the same buffers would copy all of them.
        """
        return self.plan.has_pairs and self.compute.platform == "cpu"

    @property
    def _overlaps_weight_gradients(self) -> bool:
        """Whether ticks end with weight gradients that overlap all of a tick's transfers."""
        return self.plan.has_pairs and self.plan.table.split_weight_grad and not self._in_background

    @property
    def _in_background(self) -> bool:
        """Whether transfers run in the background. CPU collective-permutes wait for all devices, so for the slowest
        stage.
        """
        return EXCHANGE_FACTS.of(self.compute.exchange).in_background

    @property
    def _top_structure(self) -> int:
        """The structure of the model's highest blocks."""
        return self.plan.structure_of(self.plan.table.stages - 1, self.plan.table.chunks - 1)

    @property
    def _top(self) -> ModelChunk | RecomputedChunk:
        return self.chunks[self._top_structure]

    def _split_chunk(self, number: int) -> ModelChunk:
        """Return a chunk whose weight gradients are separate. The config rules out `remat=chunk` for those."""
        chunk = self.chunks[number]
        assert isinstance(chunk, ModelChunk)
        return chunk

    def _residuals(self, state: State, work: TickPass, number: int) -> list[jax.Array]:
        return with_own_layout(self.saved.read(state.saved, number, work.saved), self.compute.platform)

    def _with_gradients(self, state: State, work: TickPass, number: int, grads: list[Grads]) -> State:
        with jax.named_scope("add_gradients"):
            blocks = self.plan.structures[number]
            return state._replace(grads=add_gradients(state.grads, self.plan, blocks, work.chunk, grads))

    def _with_forward(self, state: State, work: TickPass, number: int, done: ForwardResult, save: bool = True) -> State:
        if done.parts is not None:
            state = self._add_parts(state, done.parts, jnp.asarray(self.plan.moe_rows(number))[stage(), work.chunk])
        if done.max_logit_lH is not None:
            state = self._add_max_logits(state, work, done.max_logit_lH, self.inputs.blocks_below(work))
        if save:
            with jax.named_scope("keep_forward"):
                state = state._replace(saved=self.saved.write(state.saved, number, work.saved, done.residuals))
        return state._replace(x_bND=done.x_bND)

    def _add_parts(self, state: State, own: ObjectiveParts, rows_m: jax.Array) -> State:
        """Add terms of the objective; `rows_m` are the indices of their blocks among the model's with experts."""
        so_far = state.parts._replace(max_logit_ALH=None)
        own = own._replace(
            count_ME=jnp.zeros_like(so_far.count_ME).at[rows_m].set(own.count_ME),
            num_dropped_M=jnp.zeros_like(so_far.num_dropped_M).at[rows_m].set(own.num_dropped_M),
        )
        total: ObjectiveParts = jax.tree.map(jnp.add, so_far, own)
        return state._replace(parts=total._replace(max_logit_ALH=state.parts.max_logit_ALH))

    def _add_max_logits(self, state: State, work: TickPass, max_logit_lH: jax.Array, below: int | jax.Array) -> State:
        microbatches = self.plan.table.microbatches
        return state._replace(parts=with_max_logits(state.parts, max_logit_lH, work.microbatch, microbatches, below))

    def _add_loss(self, state: State, loss: LossTerms) -> State:
        so_far = LossTerms(*(getattr(state.parts, name) for name in LossTerms._fields))
        return state._replace(parts=state.parts._replace(**jax.tree.map(jnp.add, so_far, loss)._asdict()))


def _received(state: State, row: TickRow, x_bND: jax.Array) -> State:
    return state._replace(activations=put(state.activations, x_bND, row.activation_to))


def _run(runs: dict[str, jax.Array], name: str, body: Callable[..., State], state: State, *works: TickPass) -> State:
    with jax.named_scope(PASS_SCOPE + name):
        return run_if(runs[name], body, state, *works)


def run_if(condition: jax.Array, body: Callable[..., State], state: State, *works: TickPass) -> State:
    """Return `body(state, *works)` if the condition holds, else `state`, using a loop with trip count 0 or 1.

    XLA hoists loop-invariant code out of a loop even if its trip count is 0: a whole pass would run in every tick. So
    passes read their inputs from slots whose index depends on the iteration number, which is 0 but unknown to the
    compiler.
    """

    def one_iteration(iteration: jax.Array, state: State) -> State:
        return body(state, *(jax.tree.map(lambda place: place + iteration, work) for work in works))

    return jax.lax.fori_loop(0, jnp.int32(condition), one_iteration, state)
