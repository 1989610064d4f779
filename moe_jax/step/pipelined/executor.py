"""What a stage does in a tick: per-device code inside `shard_map`.

A pass runs as a loop of one turn or none. Unlike branches of a condition, turns of a loop change buffers and sums of
gradients in place. Stages differ in what they run, and members of a collective's group never do: they are all of one
stage.

M microbatches of b sequences on this device, N tokens of each that are its own, D model width.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.config.registry import EXCHANGE_FACTS
from moe_jax.parallel.ordering import barrier_after
from moe_jax.parallel.pipeline import (
    Receive,
    no_ticket,
    receive_transfer,
    stage,
    start_transfer,
    to_next,
    to_previous,
)
from moe_jax.parallel.sequence_shards import OwnTokens, local_tokens
from moe_jax.parallel.trees import Grads, Params
from moe_jax.step.context import StepContext, StepInputs
from moe_jax.step.losses import ObjectiveParts
from moe_jax.step.pipelined.buffers import Buffers
from moe_jax.step.pipelined.build import PipelinedPlan
from moe_jax.step.pipelined.embed_and_head import embedded, embedding_gradient, share_of_loss, through_head
from moe_jax.step.pipelined.model_chunk import ForwardResult, InputGradient, ModelChunk
from moe_jax.step.pipelined.slot_ops import get, put, taken_out
from moe_jax.step.pipelined.stage_params import added, no_sums, weights_of
from moe_jax.step.pipelined.tick_table import PASS_SCOPE, Row, TickPass, rows_of
from moe_jax.step.scheduled.scan_residuals import Given
from moe_jax.step.scheduled.step_dims import StepDims


class State(NamedTuple):
    """What a stage has between ticks."""

    x_bND: jax.Array  # to be sent to the next stage
    dx_bND: jax.Array  # to be sent to the one before
    posted: jax.Array  # in the background: the ticket of what the stage behind sends
    activations: jax.Array  # received: [slots, b, N, D]
    gradients: jax.Array
    saved: list[jax.Array]  # buffers of what forward passes keep
    weight: list[jax.Array]  # and of what backward passes leave to weight gradients
    taken: list[jax.Array]  # on CPUs: of `saved`, for a pass that also writes there
    grads: Grads  # sums of them, float32, see `no_sums`
    parts: ObjectiveParts


class PipelineStage:
    """The passes of this device's stage. `params` are its own blocks', and what all stages have."""

    def __init__(self, params: Params, inputs: StepInputs, context: StepContext, plan: PipelinedPlan):
        config, compute = context.config, context.compute
        self.params, self.plan, self.compute, self._model = params, plan, compute, config.model
        self.slot_ME = inputs.slot_ME  # where experts of all blocks lie; None: in their order
        by_microbatch = functools.partial(_by_microbatch, microbatches=plan.table.microbatches)
        self.tokens = OwnTokens(*map(by_microbatch, local_tokens(inputs.token_BN1)))
        router_inputs = inputs.router_inputs(context)
        self.router_inputs = router_inputs and router_inputs._replace(
            id=by_microbatch(router_inputs.id), place=by_microbatch(router_inputs.place)
        )
        _, sequences, length = self.tokens.input_Bn.shape
        self._x_bND = jax.ShapeDtypeStruct((sequences, length, config.model.hidden_size), jnp.dtype(compute.dtype))
        self.chunks = []
        for number, orders in enumerate(plan.orders):
            tokens, first_block = sequences * length, plan.first_block(number)
            facts = StepDims(config, compute, orders.shape, context.global_tokens, tokens, first_block)
            given = jax.eval_shape(
                functools.partial(self._given, number), TickPass(*(jnp.int32(0),) * len(TickPass._fields))
            )
            self.chunks.append(ModelChunk(facts, orders, self._x_bND, given))
        kept, held = [chunk.saved_shapes for chunk in self.chunks], [chunk.held_shapes for chunk in self.chunks]
        self.saved, self.taken = Buffers(kept, plan.slots.saved.num_slots), Buffers(kept, 1)
        self.weight = Buffers(held, plan.slots.weight.num_slots)

    def first_state(self, backward: bool = True) -> State:
        """Before the first tick of a step with or without a backward pass."""
        model, slots = self._model, self.plan.slots
        zeros, nothing = jnp.zeros(self._x_bND.shape, self._x_bND.dtype), jnp.float32(0)
        num_moe = model.block_kinds.count("moe")
        counts_ME = jnp.zeros((num_moe, model.moe.num_experts if num_moe else 0), jnp.int32)
        return State(
            x_bND=zeros,
            dx_bND=zeros,
            posted=no_ticket(),
            # one slot more, see `rows_of`
            activations=jnp.zeros((slots.activations.num_slots + 1, *zeros.shape), zeros.dtype),
            gradients=jnp.zeros((slots.gradients.num_slots + 1, *zeros.shape), zeros.dtype),
            saved=self.saved.empty() if backward else [],
            weight=self.weight.empty() if backward else [],
            taken=self.taken.empty() if backward and self._takes_out else [],
            grads=no_sums(self.params, self.plan) if backward else {},
            parts=ObjectiveParts(nothing, nothing, nothing, counts_ME, jnp.zeros(num_moe)),
        )

    def tick(self, state: State, row: Row) -> State:
        """Run what the table says; what stages send arrives beside passes that do not wait for it.

        Gradients of the tick before travel beside the forward pass, activations of this one beside the backward pass,
        or both beside weight gradients at the end. In the background gradients leave as soon as they are there.
        """
        if self._sends_behind:
            return self._tick_that_sends_behind(state, row)
        ahead, behind, split = row.forward, row.backward, self.plan.table.split_weight_grad
        turns = self.plan.turns_of(row)
        run = functools.partial(_run, turns)
        gradient = receive_transfer(state.posted, self._x_bND) if self._in_background else to_previous(state.dx_bND)
        state = run("embed", self._embed, state, ahead)
        state = self._of_structures(run, "forward", functools.partial(self._forward, keep=True), state, ahead)
        dx_bND = gradient(state.x_bND)
        turns.update(self._once_arrived(turns, ("head", "together"), dx_bND))
        state = state._replace(gradients=put(state.gradients, dx_bND, row.gradient_to))
        state = run("head", self._head, state, behind)
        if self.plan.has_pairs:
            state = self._run_together(run, state, behind, ahead)
        activation = self._to_next(state, row)
        state = self._of_structures(run, "backward", self._input_gradient if split else self._backward, state, behind)
        if not self._in_background:
            x_bND = activation(state.dx_bND)
            turns.update(self._once_arrived(turns, ("embed_back", "weight"), x_bND))
            state = _received(state, row, x_bND)
        else:
            state = state._replace(posted=start_transfer(state.dx_bND, "to_previous", row.gradient_part))
        state = run("embed_back", self._embed_back, state, behind)
        if split:
            state = self._of_structures(run, "weight", self._weight_gradients, state, row.weight)
        if self._in_background:
            beside = min(jax.tree.leaves(state.grads), key=jnp.size)
            # this stage waits only once what others wait for has left
            state = _received(state, row, activation(barrier_after(beside, state.posted)))
        return state

    def _tick_that_sends_behind(self, state: State, row: Row) -> State:
        ahead, behind = row.forward, row.backward
        turns = self.plan.turns_of(row)
        run = functools.partial(_run, turns)
        state = run("embed", self._embed, state, ahead)
        state = run("head", self._head, state, behind)
        state = self._of_structures(run, "forward", functools.partial(self._forward, keep=True), state, ahead)
        state = self._run_together(run, state, behind, ahead)
        state = self._of_structures(run, "backward", self._input_gradient, state, behind)
        activation, gradient = to_next(state.x_bND), to_previous(state.dx_bND)
        state = run("embed_back", self._embed_back, state, behind)
        state = self._of_structures(run, "weight", self._weight_gradients, state, row.weight)
        beside = min(jax.tree.leaves(state.grads["segments"]), key=jnp.size)
        state = _received(state, row, activation(beside))
        return state._replace(gradients=put(state.gradients, gradient(beside), row.gradient_to))

    def _run_together(self, run: Callable[..., State], state: State, behind: TickPass, ahead: TickPass) -> State:
        if self._takes_out:
            state = self._of_structures(run, "take", self._take, state, behind)
        return self._of_structures(run, "together", self._together, state, behind, ahead)

    def forward_tick(self, state: State, row: Row) -> State:
        """The same of a step without a backward pass: nothing is kept, and the loss comes with the forward pass."""
        ahead = row.forward
        run = functools.partial(_run, self.plan.turns_of(row))
        state = run("embed", self._embed, state, ahead)
        state = self._of_structures(run, "forward", functools.partial(self._forward, keep=False), state, ahead)
        activation = self._to_next(state, row)
        state = _received(state, row, activation(state.x_bND))
        return turn_if(ahead.runs & ahead.at_loss, self._lose, state, ahead)

    def _once_arrived(
        self, turns: dict[str, jax.Array], passes: tuple[str, ...], x_bND: jax.Array
    ) -> dict[str, jax.Array]:
        """Turns of these passes, known when x is there: XLA:TPU lets x travel beside the shortest pass it finds."""
        names = [name for name in turns if name.startswith(passes)] if self.compute.platform == "tpu" else []
        return {name: barrier_after(turns[name], x_bND) for name in names}

    def _to_next(self, state: State, row: Row) -> Receive:
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
        x_bND = embedded(self.params, self._tokens(work), self.compute)
        return state._replace(activations=put(state.activations, x_bND, work.received))

    def _forward(self, number: int, state: State, work: TickPass, keep: bool) -> State:
        done = self.chunks[number].forward(get(state.activations, work.received), self._given(number, work))
        return self._with_forward(state, work, number, done, keep)

    def _take(self, number: int, state: State, work: TickPass) -> State:
        kept = self._kept(state, work, number)
        return state._replace(taken=self.taken.write(state.taken, number, 0, kept))

    def _together(self, number: int, state: State, behind: TickPass, ahead: TickPass) -> State:
        kept = self.taken.read(state.taken, number, 0) if self._takes_out else self._kept(state, behind, number)
        forward, backward = self.chunks[number].together(
            get(state.activations, ahead.received),
            self._given(number, ahead),
            get(state.gradients, behind.received),
            self._given(number, behind),
            kept,
        )
        # read before they are written to, or they would be copied
        forward_kept, _ = jax.lax.optimization_barrier((forward.kept, kept))
        state = self._with_forward(state, ahead, number, forward._replace(kept=forward_kept))
        if isinstance(backward, InputGradient):
            return self._with_input_gradient(state, behind, number, backward, kept)
        return self._with_gradients(state._replace(dx_bND=backward.dx_bND), behind, number, backward.grads)

    def _lose(self, state: State, work: TickPass) -> State:
        loss = share_of_loss(self._top.facts, self.params, state.x_bND, self._tokens(work))
        # which was sent; unchanged it would be the compiler's to hoist, see `turn_if`
        return self._add_loss(state._replace(x_bND=jnp.zeros_like(state.x_bND)), loss)

    def _head(self, state: State, work: TickPass) -> State:
        top = self._number_of_top
        x_bND = self._top.output(self._given(top, work), self._kept(state, work, top))
        loss, dx_bND, grads = through_head(self._top.facts, self.params, x_bND, self._tokens(work))
        state = self._add_loss(state, loss)
        added = {name: state.grads[name] + grad for name, grad in grads.items()}
        return state._replace(gradients=put(state.gradients, dx_bND, work.received), grads=state.grads | added)

    def _backward(self, number: int, state: State, work: TickPass) -> State:
        dx_bND, kept = get(state.gradients, work.received), self._kept(state, work, number)
        done = self.chunks[number].backward(dx_bND, self._given(number, work), kept)
        return self._with_gradients(state._replace(dx_bND=done.dx_bND), work, number, done.grads)

    def _input_gradient(self, number: int, state: State, work: TickPass) -> State:
        dx_bND, kept = get(state.gradients, work.received), self._kept(state, work, number)
        done = self.chunks[number].input_gradient(dx_bND, self._given(number, work), kept)
        return self._with_input_gradient(state, work, number, done, kept)

    def _with_input_gradient(
        self, state: State, work: TickPass, number: int, done: InputGradient, kept: list[jax.Array]
    ) -> State:
        # read before they are written to, or they would be copied
        moved, _ = jax.lax.optimization_barrier((done.moved, kept))
        rooms = self.chunks[number].rooms
        return state._replace(
            dx_bND=done.dx_bND,
            saved=self.saved.move_in(state.saved, number, work.saved, rooms, moved),
            weight=self.weight.write(state.weight, number, work.weight, done.held),
        )

    def _weight_gradients(self, number: int, state: State, work: TickPass) -> State:
        chunk, given, kept = self.chunks[number], self._given(number, work), self._kept(state, work, number)
        moved = self.saved.visit(state.saved, number, work.saved, chunk.rooms)
        held = self.weight.read(state.weight, number, work.weight)
        return self._with_gradients(state, work, number, chunk.weight_gradients(given, kept, moved, held))

    def _embed_back(self, state: State, work: TickPass) -> State:
        grad = embedding_gradient(self.params, self._tokens(work), state.dx_bND, self.compute)
        return state._replace(grads=state.grads | {"embedding": state.grads["embedding"] + grad})

    # what they read and write

    @functools.cached_property
    def rows(self) -> Row:
        """What all stages do in each tick, as this program wants it."""
        return rows_of(self.plan.table, self.plan.slots, self.plan.structure_of, self._sends_behind)

    @property
    def _takes_out(self) -> bool:
        """Whether what a pair of passes reads is taken out in a loop of its own, as XLA:CPU drops what orders reads.

        A pass that reads and writes the same buffers would copy them all.
        """
        return self.plan.has_pairs and self.compute.platform == "cpu"

    @property
    def _sends_behind(self) -> bool:
        """Whether ticks end with weight gradients, beside which all that they send travels."""
        return self.plan.has_pairs and self.plan.table.split_weight_grad and not self._in_background

    @property
    def _in_background(self) -> bool:
        """Collective-permutes of CPUs wait for all devices, and so for the stage that computes longest."""
        return EXCHANGE_FACTS.of(self.compute.exchange).in_background

    @property
    def _number_of_top(self) -> int:
        """Of the structure of the model's highest blocks."""
        return self.plan.structure_of(self.plan.table.stages - 1, self.plan.table.chunks - 1)

    @property
    def _top(self) -> ModelChunk:
        return self.chunks[self._number_of_top]

    def _tokens(self, work: TickPass) -> OwnTokens:
        return OwnTokens(*(get(x_Mbn, work.microbatch) for x_Mbn in self.tokens))

    def _given(self, number: int, work: TickPass) -> Given:
        weights = weights_of(self.params, self.plan, number, work.chunk)
        slots = self._slots(number, work)
        if self.router_inputs is None:
            return Given(weights, None, slots)
        id_bn, place_bn = (get(x_Mbn, work.microbatch) for x_Mbn in (self.router_inputs.id, self.router_inputs.place))
        below = jnp.asarray(self.plan.stages.first_block)[work.chunk * self.plan.table.stages + stage()]
        return Given(weights, self.router_inputs._replace(id=id_bn, place=place_bn).above(below), slots)

    def _slots(self, number: int, work: TickPass) -> dict[int, jax.Array]:
        if self.slot_ME is None:
            return {}
        rows_m = jnp.asarray(self.plan.moe_rows(number))[stage(), work.chunk]
        blocks = [block for block, held in enumerate(self.plan.structures[number]) if held.kind == "moe"]
        return {block: get(self.slot_ME, rows_m[m]) for m, block in enumerate(blocks)}

    def _kept(self, state: State, work: TickPass, number: int) -> list[jax.Array]:
        return taken_out(self.saved.read(state.saved, number, work.saved), self.compute.platform)

    def _with_gradients(self, state: State, work: TickPass, number: int, grads: list[Grads]) -> State:
        with jax.named_scope("add_gradients"):
            return state._replace(grads=added(state.grads, self.plan, number, work.chunk, grads))

    def _with_forward(self, state: State, work: TickPass, number: int, done: ForwardResult, keep: bool = True) -> State:
        if done.parts is not None:
            rows_m = jnp.asarray(self.plan.moe_rows(number))[stage(), work.chunk]
            so_far, own = state.parts, done.parts
            own = own._replace(
                count_ME=jnp.zeros_like(so_far.count_ME).at[rows_m].set(own.count_ME),
                num_dropped_M=jnp.zeros_like(so_far.num_dropped_M).at[rows_m].set(own.num_dropped_M),
            )
            parts = jax.tree.map(jnp.add, so_far, own)
            state = state._replace(parts=parts)
        if keep:
            with jax.named_scope("keep_forward"):
                state = state._replace(saved=self.saved.write(state.saved, number, work.saved, done.kept))
        return state._replace(x_bND=done.x_bND)

    def _add_loss(self, state: State, loss: jax.Array) -> State:
        return state._replace(parts=state.parts._replace(cross_entropy=state.parts.cross_entropy + loss))


def _by_microbatch(x_Bn: jax.Array, microbatches: int) -> jax.Array:
    return x_Bn.reshape(microbatches, -1, x_Bn.shape[1])


def _received(state: State, row: Row, x_bND: jax.Array) -> State:
    return state._replace(activations=put(state.activations, x_bND, row.activation_to))


def _run(turns: dict[str, jax.Array], name: str, body: Callable[..., State], state: State, *works: TickPass) -> State:
    with jax.named_scope(PASS_SCOPE + name):
        return turn_if(turns[name], body, state, *works)


def turn_if(condition: jax.Array, body: Callable[..., State], state: State, *works: TickPass) -> State:
    """`body(state, *works)` where the condition holds, in a loop of one turn or none.

    What no turn of a loop changes, compilers compute before it, even if there is none: a whole pass, in all ticks. So
    passes look for their inputs in slots that depend on the turn. It is 0, which compilers do not know.
    """

    def one_turn(turn: jax.Array, state: State) -> State:
        return body(state, *(jax.tree.map(lambda place: place + turn, work) for work in works))

    return jax.lax.fori_loop(0, jnp.int32(condition), one_turn, state)
