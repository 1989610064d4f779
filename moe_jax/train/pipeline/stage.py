"""What a stage does in a tick: per-device code inside `shard_map`.

A pass runs as a loop of one turn or none. Unlike branches of a condition, turns of a loop change buffers and sums of
gradients in place. Stages differ in what they run, and members of a collective's group never do: they are all of one
stage.

M microbatches of b sequences on this device, N tokens of each and N1 = N + 1, D model width.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.config import Config
from moe_jax.models.transformer import Computation
from moe_jax.parallel.pipeline import stage, to_next, to_previous
from moe_jax.parallel.tensor_axis import own_tokens
from moe_jax.train.facts import Facts
from moe_jax.train.objective import Parts
from moe_jax.train.pipeline.buffers import Buffers
from moe_jax.train.pipeline.chunk import Chunk
from moe_jax.train.pipeline.ends import embedded, embedding_gradient, share_of_loss, through_head
from moe_jax.train.pipeline.plan import Plan
from moe_jax.train.pipeline.rows import Pass, Row

Tree = Any


class State(NamedTuple):
    """What a stage has between ticks."""

    x_bND: jax.Array  # to be sent to the next stage
    dx_bND: jax.Array  # to be sent to the one before
    activations: jax.Array  # received: [slots, b, N, D]
    gradients: jax.Array
    saved: list[jax.Array]  # buffers of what forward passes keep
    weight: list[jax.Array]  # and of what backward passes leave to weight gradients
    grads: Tree  # float32, like the parameters of this device
    parts: Parts


class Stage:
    """The passes of this device's stage. `params` are its own blocks', and what all stages have."""

    def __init__(
        self, params: Tree, token_BN1: jax.Array, config: Config, how: Computation, global_tokens: int, plan: Plan
    ):
        self.params, self.plan, self.how, self._model = params, plan, how, config.model
        token_BN1 = own_tokens(token_BN1)
        self.token_MbN1 = token_BN1.reshape(plan.table.microbatches, -1, token_BN1.shape[1])
        sequences, length = self.token_MbN1.shape[1], self.token_MbN1.shape[2] - 1
        self._x_bND = jax.ShapeDtypeStruct((sequences, length, config.model.d_model), jnp.dtype(how.dtype))
        self.chunks = []
        for number, schedule in enumerate(plan.schedules):
            facts = Facts(
                config, how, schedule.shape, global_tokens, sequences * length, first_block=plan.first_block(number)
            )
            weights = jax.eval_shape(functools.partial(self._weights, number, jnp.int32(0)))
            self.chunks.append(Chunk(facts, schedule, self._x_bND, weights, plan.table.split_weight_grad))
        self.weight = Buffers([chunk.held_shapes for chunk in self.chunks], plan.slots.weight.num_slots)
        self.saved = Buffers([chunk.saved_shapes for chunk in self.chunks], plan.slots.saved.num_slots)

    def first_state(self, backward: bool = True) -> State:
        """Before the first tick of a step with or without a backward pass."""
        model, slots = self._model, self.plan.slots
        zeros, nothing = jnp.zeros(self._x_bND.shape, self._x_bND.dtype), jnp.float32(0)
        num_moe = model.block_kinds.count("moe")
        counts_ME = jnp.zeros((num_moe, model.moe.num_experts if num_moe else 0), jnp.int32)
        return State(
            x_bND=zeros,
            dx_bND=zeros,
            # one slot more, see `rows_of`
            activations=jnp.zeros((slots.activations.num_slots + 1, *zeros.shape), zeros.dtype),
            gradients=jnp.zeros((slots.gradients.num_slots + 1, *zeros.shape), zeros.dtype),
            saved=self.saved.empty() if backward else [],
            weight=self.weight.empty() if backward else [],
            grads=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), self.params) if backward else {},
            parts=Parts(nothing, nothing, nothing, counts_ME, nothing),
        )

    def tick(self, state: State, row: Row) -> State:
        """Let arrive what other stages sent, then run what the table says."""
        state = state._replace(
            activations=_put(state.activations, to_next(state.x_bND), row.activation_to),
            gradients=_put(state.gradients, to_previous(state.dx_bND), row.gradient_to),
        )
        state = self._run_forward(state, row.forward)
        state = self._run_backward(state, row.backward)
        if not self.plan.table.split_weight_grad:
            return state
        return self._turn_of_structure(row.weight, self._weight_gradients, state)

    def forward_tick(self, state: State, row: Row) -> State:
        """The same of a step without a backward pass: nothing is kept, and the loss comes with the forward pass."""
        state = state._replace(activations=_put(state.activations, to_next(state.x_bND), row.activation_to))
        state = self._run_forward(state, row.forward, keep=False)
        return turn_if(row.forward.runs & row.forward.at_loss, functools.partial(self._lose, row.forward), state)

    def _run_forward(self, state: State, work: Pass, keep: bool = True) -> State:
        state = turn_if(work.runs & work.at_end, functools.partial(self._embed, work), state)
        return self._turn_of_structure(work, functools.partial(self._forward, keep=keep), state)

    def _run_backward(self, state: State, work: Pass) -> State:
        state = turn_if(work.runs & work.at_loss, functools.partial(self._head, work), state)
        backward = self._input_gradient if self.plan.table.split_weight_grad else self._backward
        state = self._turn_of_structure(work, backward, state)
        return turn_if(work.runs & work.at_end, functools.partial(self._embed_back, work), state)

    def _turn_of_structure(self, work: Pass, body: Callable[[Pass, int, State], State], state: State) -> State:
        for number in range(len(self.chunks)):
            state = turn_if(work.runs & (work.structure == number), functools.partial(body, work, number), state)
        return state

    # passes

    def _embed(self, work: Pass, state: State) -> State:
        x_bND = embedded(self.params, self._tokens(work), self.how)
        return state._replace(activations=_put(state.activations, x_bND, work.received))

    def _forward(self, work: Pass, number: int, state: State, keep: bool) -> State:
        chunk, x_bND = self.chunks[number], _get(state.activations, work.received)
        x_bND, parts, kept = chunk.forward(x_bND, self._weights(number, work.chunk))
        if parts is not None:
            rows_m = jnp.asarray(self.plan.moe_rows(number))[stage(), work.chunk]
            counts_ME = jnp.zeros_like(state.parts.count_ME).at[rows_m].set(parts.count_ME)
            state = state._replace(parts=jax.tree.map(jnp.add, state.parts, parts._replace(count_ME=counts_ME)))
        if keep:
            state = state._replace(saved=self.saved.write(state.saved, number, work.saved, kept))
        return state._replace(x_bND=x_bND)

    def _lose(self, work: Pass, state: State) -> State:
        return self._add_loss(state, share_of_loss(self._top.facts, self.params, state.x_bND, self._tokens(work)))

    def _head(self, work: Pass, state: State) -> State:
        kept = self.saved.read(state.saved, self._number_of_top, work.saved)
        x_bND = self._top.output(self._weights(self._number_of_top, work.chunk), kept)
        loss, dx_bND, grads = through_head(self._top.facts, self.params, x_bND, self._tokens(work))
        state = self._add_loss(state, loss)
        added = {name: state.grads[name] + grad for name, grad in grads.items()}
        return state._replace(gradients=_put(state.gradients, dx_bND, work.received), grads=state.grads | added)

    def _backward(self, work: Pass, number: int, state: State) -> State:
        chunk, dx_bND = self.chunks[number], _get(state.gradients, work.received)
        kept = self.saved.read(state.saved, number, work.saved)
        dx_bND, grads = chunk.backward(dx_bND, self._weights(number, work.chunk), kept)
        return state._replace(dx_bND=dx_bND, grads=self._added(state.grads, number, work.chunk, grads))

    def _input_gradient(self, work: Pass, number: int, state: State) -> State:
        kept = self.saved.read(state.saved, number, work.saved)
        dx_bND, held = self.chunks[number].input_gradient(
            _get(state.gradients, work.received), self._weights(number, work.chunk), kept
        )
        return state._replace(dx_bND=dx_bND, weight=self.weight.write(state.weight, number, work.weight, held))

    def _weight_gradients(self, work: Pass, number: int, state: State) -> State:
        kept = self.saved.read(state.saved, number, work.saved)
        held = self.weight.read(state.weight, number, work.weight)
        grads = self.chunks[number].weight_gradients(self._weights(number, work.chunk), kept, held)
        return state._replace(grads=self._added(state.grads, number, work.chunk, grads))

    def _embed_back(self, work: Pass, state: State) -> State:
        grad = embedding_gradient(self.params, self._tokens(work), state.dx_bND, self.how)
        return state._replace(grads=state.grads | {"embedding": state.grads["embedding"] + grad})

    # what they read and write

    @property
    def _number_of_top(self) -> int:
        """Of the structure of the model's highest blocks."""
        return self.plan.structure_of(self.plan.table.stages - 1, self.plan.table.chunks - 1)

    @property
    def _top(self) -> Chunk:
        return self.chunks[self._number_of_top]

    def _tokens(self, work: Pass) -> jax.Array:
        return _get(self.token_MbN1, work.microbatch)

    def _weights(self, number: int, chunk: jax.Array) -> dict[int, Tree]:
        """Of the blocks of a model chunk."""
        weights = {}
        for block, held in enumerate(self.plan.structures[number]):
            take = functools.partial(_get, place=self._row(number, block, chunk))
            weights[block] = jax.tree.map(take, self.params["segments"][held.segment][held.place])
        return weights

    def _added(self, grads: Tree, number: int, chunk: jax.Array, new: list[Tree]) -> Tree:
        """The sums of gradients with those of a model chunk's blocks."""
        segments = {segment: dict(places) for segment, places in grads["segments"].items()}
        for block, held in enumerate(self.plan.structures[number]):
            row = self._row(number, block, chunk)
            segments[held.segment][held.place] = jax.tree.map(
                lambda total, grad, row=row: _put(total, _get(total, row) + grad, row),
                segments[held.segment][held.place],
                new[block],
            )
        return grads | {"segments": segments}

    def _row(self, number: int, block: int, chunk: jax.Array) -> jax.Array | int:
        """Of a block in the stacked arrays of this stage."""
        held = self.plan.structures[number][block]
        if self.plan.table.chunks == 1:
            return held.row
        return chunk * self.plan.stages.rows[held.segment] + held.row

    def _add_loss(self, state: State, loss: jax.Array) -> State:
        return state._replace(parts=state.parts._replace(cross_entropy=state.parts.cross_entropy + loss))


def turn_if(condition: jax.Array, body: Callable[[State], State], state: State) -> State:
    """`body(state)` where the condition holds, in a loop of one turn or none."""
    return jax.lax.fori_loop(0, jnp.int32(condition), lambda _, state: body(state), state)


def _get(x: jax.Array, place: jax.Array | int) -> jax.Array:
    return x[place] if isinstance(place, int) else jax.lax.dynamic_index_in_dim(x, place, keepdims=False)


def _put(x: jax.Array, value: jax.Array, place: jax.Array | int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, value, place, axis=0)
