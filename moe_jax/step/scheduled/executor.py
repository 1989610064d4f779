"""What each action of a schedule does: per-device code inside `shard_map`, one method per direction and op.

B sequences of this device, N tokens of each, M blocks with experts, E experts. Microbatches and pieces: see `facts`.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.config import ModelConfig
from moe_jax.models.dispatch import Arrival, Phase, TokenExchange
from moe_jax.models.dispatchers.protocol import CapacityState, DispatchMetadata, ExpertRows
from moe_jax.models.dispatchers.ragged import Stored, lane_experts
from moe_jax.models.head import cross_entropy
from moe_jax.models.hooks import hooks_of
from moe_jax.models.moe import RouterStats, run_experts
from moe_jax.models.transformer import (
    REMAT_POLICIES,
    ComputeConfig,
    Routed,
    attend_and_route,
    dense_block,
    embed,
    rejoin,
)
from moe_jax.parallel.all_to_all import ragged
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.sequence_shards import OwnTokens
from moe_jax.parallel.trees import Params, Tree
from moe_jax.schedule.actions import Action
from moe_jax.step.scheduled.expert_weight_casts import ExpertWeights
from moe_jax.step.scheduled.issue_order import IssueOrder
from moe_jax.step.scheduled.lane_overflow import RareRows
from moe_jax.step.scheduled.scan_residuals import Given
from moe_jax.step.scheduled.split_vjp import SplitBackward, differentiate, floats_of, with_floats
from moe_jax.step.scheduled.step_dims import StepDims

Key = tuple[str, int, int]  # op, block, microbatch or piece
Piece = ExpertRows | ragged.Lanes  # rows on their way, or where experts of a ragged exchange see them
Flow = dict[int, Piece | Arrival]  # by piece


class Tasks:
    """Runs forward and backward tasks and keeps what lies between them.

    `ends` holds embedding, norm and head. A turn of a loop over blocks has neither ends nor tokens.
    """

    def __init__(
        self,
        facts: StepDims,
        ends: Params | None,
        given: Given,
        tokens: OwnTokens | None = None,
        stored: Callable[[int], Stored] | None = None,
    ):
        self.facts, self.blocks = facts, given.blocks
        self.ends: Params = ends or {}
        self.expert_weights = ExpertWeights(facts, given.blocks, stored)
        self.rare = RareRows(facts, self.expert_weights)
        self.tokens: list[OwnTokens] = []  # of each microbatch
        if tokens is not None:
            parts = (jnp.split(x_Bn, facts.microbatches) for x_Bn in tokens)
            self.tokens = list(map(OwnTokens, *parts))
        self.router_inputs = given.router_inputs and given.router_inputs.parts(
            facts.microbatches
        )  # what gates look at, below the blocks
        self.slots = given.slots  # where the experts of each block lie, if not in their order
        self.x: dict[int, jax.Array] = {}  # residual stream of each microbatch
        self.metadata: dict[int, DispatchMetadata] = {}  # what brings its tokens back, as long as it is not settled
        self.flow: Flow = {}  # each piece: sent, received, returned
        self.dx: dict[int, jax.Array] = {}  # cotangents of the three above
        self.dmetadata: dict[int, list[jax.Array]] = {}
        self.dflow: Flow = {}
        self.widths: list[int] = []  # rows of each piece of a microbatch
        self.pullbacks: dict[Key, Callable[..., Any]] = {}
        self.waiting: dict[Key, SplitBackward] = {}
        self.stats: dict[tuple[int, int], RouterStats] = {}  # of block and microbatch
        self.share: Callable[[int], jax.Array]  # of all pairs of a block that chose each expert
        self.grads: dict[tuple[str, int], Tree] = {}
        self.cross_entropy = jnp.float32(0)
        self.ties = IssueOrder(facts.compute.platform)
        self.awaits_rows = False  # whether a backward task does nothing before its rows have arrived

    # forward

    def forward(self, action: Action) -> None:
        """Run an F task."""
        runs = {"embed": self._embed, "attend": self._attend, "head": self._head, "expert": self._experts}
        if action.op in runs:
            runs[action.op](action)
        else:
            self._exchange(self.flow, action)

    def _embed(self, action: Action) -> None:
        for r in self.facts.microbatches_of(action):
            look_up = partial(_look_up, tokens=self.tokens[r].input_Bn, compute=self.facts.compute)
            self.x[r] = self._differentiate(("embed", action.block, r), look_up, self.ends["embedding"], ())

    def settle(self, r: int, consumer: int) -> None:
        """Join what the experts of the block below returned with the residual stream of microbatch r."""
        if self.metadata.get(r) is None:
            self.x[r] = self.ties.in_turn(self.x[r])
            return
        model, axis = self.facts.config.model, self.facts.dispatcher.slot_axis
        pieces = [self._arrived_rows(self.flow, p) for p in self.facts.pieces_of_microbatch(r)]
        self.widths = [piece.shape[axis] for piece in pieces]
        rows = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=axis)
        inputs = (self.x[r], rows, self.metadata.pop(r))
        self.x[r] = self._differentiate(
            ("settle", consumer, r), partial(_rejoin, model=model, ragged=self.facts.ragged), (), inputs
        )

    def _attend(self, action: Action) -> None:
        facts, block = self.facts, action.block
        model, weights = facts.config.model, self.blocks[block]
        view = facts.view(block)
        for r in facts.microbatches_of(action):
            self.settle(r, block)
            if facts.shape.kinds[block] == "dense":
                function = self._remat(partial(dense_block, model=model, view=view, impl=facts.compute.attention))
                self.x[r] = self._differentiate(("attend", block, r), function, weights, self.x[r])
                self.ties.computed(self.x[r])
                continue
            route = partial(attend_and_route, model=model, view=view, compute=facts.compute)
            router_inputs = self.router_inputs and self.router_inputs[r].above(block)
            capacity, slot_E = self._capacity(block, r), self.slots.get(block)
            function = self._remat(
                partial(route, capacity=capacity, ragged=facts.ragged, router_inputs=router_inputs, slot_E=slot_E)
            )
            routed: Routed = self._differentiate(("attend", block, r), function, _without_experts(weights), self.x[r])
            self.x[r], self.metadata[r], self.stats[block, r] = routed.x_BND, routed.metadata, routed.stats
            self.ties.computed(routed.sent.rows)
            pieces = facts.pieces_of_microbatch(r)
            split = facts.dispatcher.split(routed.sent, len(pieces)) if len(pieces) > 1 else [routed.sent]
            self.flow.update(zip(pieces, split, strict=True))

    def _capacity(self, block: int, r: int) -> CapacityState:
        """What earlier microbatches leave of the experts' slots."""
        nothing = jnp.zeros(self.facts.config.model.moe.num_experts, jnp.int32)
        used = sum((self.stats[block, earlier].count_E for earlier in range(r)), start=nothing)
        if r and self.facts.compute.platform == "gpu":
            # XLA:GPU would compute two microbatches' sizes in one operation, and the first would wait for the second
            used = self.ties.in_turn(used)
        return CapacityState(self.facts.slots, used, self.facts.microbatches, self.facts.buffer)

    def _experts(self, action: Action) -> None:
        facts, block = self.facts, action.block
        for p in facts.pieces_of(action):
            received = self._arrived(self.flow, p)
            if isinstance(received, ragged.Lanes):
                self.flow[p] = self._lanes(block, p, received)
            else:
                weights = self.blocks[block]["moe"]["experts"]
                function = partial(run_experts, moe=facts.config.model.moe, product=facts.compute.product)
                out = self._differentiate(("expert", block, p), self._remat(function), weights, received)
                self.flow[p] = ExpertRows(out)
            self.ties.computed(floats_of(self.flow[p])[0])

    def _lanes(self, block: int, p: int, lanes: ragged.Lanes) -> ragged.Lanes:
        """Experts on their lanes, and on the rows that do not fit there."""
        weights = self.expert_weights.forward(block, lanes.main_LbD)
        filled_L = ragged.filled(lanes.count_PE, self.facts.compute.expert_axis)
        function = self._remat(partial(lane_experts, filled_L=filled_L, moe=self.facts.config.model.moe))
        main = self._differentiate(("expert", block, p), function, weights, lanes.main_LbD)
        return lanes._replace(main_LbD=main, rest_R=self.rare.forward(block, p, lanes, filled_L))

    def _head(self, action: Action) -> None:
        model, blocks = self.facts.config.model, len(self.facts.shape.kinds)

        def share(weights: Tree, x: jax.Array, tokens: jax.Array) -> jax.Array:
            return cross_entropy(weights, x, tokens, model, self.facts.compute.loss_chunk) / self.facts.global_tokens

        matrix = "embedding" if model.tie_word_embeddings else "head"
        weights = {name: self.ends[name] for name in ("norm", matrix)}
        for r in self.facts.microbatches_of(action):
            self.settle(r, blocks)
            function = partial(share, tokens=self.tokens[r].target_Bn)
            loss = self._differentiate(("head", action.block, r), function, weights, self.x.pop(r))
            self.ties.computed(loss)
            self.cross_entropy += loss

    # backward

    def backward(self, action: Action) -> None:
        """Run a B task."""
        runs = {"embed": self._embed_back, "attend": self._attend_back, "head": self._head_back}
        runs |= {"expert": self._experts_back}
        if action.op in runs:
            runs[action.op](action)
        else:
            self._exchange(self.dflow, action)

    def _head_back(self, action: Action) -> None:
        for r in self.facts.microbatches_of(action):
            (self.dx[r],) = self._pull("head", action.block, r, [self.ties.in_turn(jnp.float32(1))])
            self.ties.computed(self.dx[r])
            self.settle_back(r, len(self.facts.shape.kinds))

    def settle_back(self, r: int, consumer: int) -> None:
        """Backward of `settle`: cotangents of the residual stream, of the returned rows and of their weights."""
        pullback = self.pullbacks.pop(("settle", consumer, r), None)
        if pullback is None:
            return
        _, (self.dx[r], drows, *self.dmetadata[r]) = pullback([self.dx[r]])
        pieces = self.facts.pieces_of_microbatch(r)
        bounds = [sum(self.widths[:i]) for i in range(1, len(pieces))]
        axis = self.facts.dispatcher.slot_axis
        drows_of_pieces = map(ExpertRows, jnp.split(drows, bounds, axis=axis))
        self.dflow.update(zip(pieces, drows_of_pieces, strict=True))

    def _experts_back(self, action: Action) -> None:
        block, split = action.block, self.facts.shape.split_weight_grad
        for p in self.facts.pieces_of(action):
            d = self._arrived(self.dflow, p)
            d_out = d.main_LbD if isinstance(d, ragged.Lanes) else d.rows
            (d_in,) = self._pull("expert", block, p, [d_out], self.expert_weights.instead(block, d_out))
            self.ties.computed(d_in)
            if isinstance(d, ragged.Lanes):
                self.dflow[p] = d._replace(main_LbD=d_in, rest_R=self.rare.backward(block, p, d.rest_R))
            else:
                self.dflow[p] = ExpertRows(d_in)
        if not split:
            self._add_rare_rows(block)

    def _add_rare_rows(self, block: int) -> None:
        """Let the rows that found no room in their lanes count in the experts' gradients, once all others do.

        Before, they would be in the way of adding up the pieces in one operation.
        """
        under_way = self.pullbacks.keys() | self.waiting.keys()
        if not any(("expert", block, p) in under_way for p in range(self.facts.num_pieces)):
            self.grads["expert", block] = self.rare.add_weights(block, self.grads["expert", block])

    def _attend_back(self, action: Action) -> None:
        facts, block = self.facts, action.block
        for r in facts.microbatches_of(action):
            cotangents = [self.ties.in_turn(self.dx[r])]
            if facts.shape.kinds[block] == "moe":
                axis = facts.dispatcher.slot_axis
                pieces = [self._arrived_rows(self.dflow, p) for p in facts.pieces_of_microbatch(r)]
                drows = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=axis)
                if self.awaits_rows:
                    cotangents = [depend_on(cotangents[0], drows, facts.compute.platform)]
                cotangents += [drows, *self._no_cotangents(r), *self.dmetadata.pop(r), *self._router_cotangents(block)]
            (self.dx[r],) = self._pull("attend", block, r, cotangents)
            self.ties.computed(self.dx[r])
            self.settle_back(r, block)

    def _no_cotangents(self, r: int) -> list[jax.Array]:
        """Cotangents of the source of a microbatch's rows, if the exchange is ragged."""
        return [jnp.zeros_like(self.dx[r]).reshape(-1, self.dx[r].shape[-1])] if self.facts.ragged else []

    def _router_cotangents(self, block: int) -> tuple[jax.Array, jax.Array]:
        """Gradients of the auxiliary losses by a microbatch's summed probabilities [E] and squared logits."""
        moe = self.facts.config.model.moe
        per_token = 1 / self.facts.global_tokens
        balance = moe.aux_loss_coeff * moe.num_experts * per_token
        return balance * self.share(block), jnp.float32(moe.z_loss_coeff * per_token)

    def _embed_back(self, action: Action) -> None:
        for r in self.facts.microbatches_of(action):
            gradient, _ = self.pullbacks.pop(("embed", action.block, r))([self.ties.in_turn(self.dx.pop(r))])
            self._add(("embed", action.block), gradient)

    def weights(self, action: Action) -> None:
        """Run a W task."""
        parts = self.facts.pieces_of(action) if action.op == "expert" else self.facts.microbatches_of(action)
        for part in parts:
            gradient = self.waiting.pop((action.op, action.block, part)).weights(self.ties.in_turn)
            self.ties.computed(jax.tree.leaves(gradient)[0])
            self._add((action.op, action.block), gradient)
        if action.op == "expert":
            self._add_rare_rows(action.block)

    # collectives

    def _exchange(self, flow: Flow, action: Action) -> None:
        """Exchange the rows of an action's pieces, or backward their cotangents."""
        if self.facts.ragged:
            for p in self.facts.pieces_of(action):
                flow[p] = self._exchanged_ragged(_sent(flow, p), action, p)
                self.ties.issued(floats_of(flow[p])[0])
            return
        compute, pieces = self.facts.compute, self.facts.pieces_of(action)
        phase: Phase = "dispatch" if action.op == "dispatch" else "combine"
        exchange = TokenExchange(phase, compute.route, hooks_of(self.facts.config.model.moe), action.direction == "B")
        only_starts = compute.route.exchange.only_starts
        tie = partial(self.ties.in_order, only_starts=only_starts)
        in_flight = exchange.start([_rows(_sent(flow, p)) for p in pieces], self.facts.dispatcher.slot_axis, tie)
        if in_flight.num_rows:
            self.ties.issued(in_flight.under_way[-1], only_starts)
        flow.update(zip(pieces, in_flight.pieces(), strict=True))

    def _exchanged_ragged(self, piece: Piece, action: Action, p: int) -> Piece:
        """Sizes, then rows; each microbatch for itself. Cotangents travel by the pullback, which knows the sizes."""
        key, exchange = (action.op, action.block, p), self.facts.ragged_exchange
        if action.direction == "B":
            again = self.rare.send_again(action.block, p, self.ties.in_order) if action.op == "combine" else None
            if again is not None:
                self.ties.issued(again)
            first, *others = floats_of(piece)
            _, d = self.pullbacks.pop(key)([self.ties.in_order(first), *others])
            if action.op == "dispatch":
                return ExpertRows(d[0])
            return ragged.Lanes(main_LbD=d[0], rest_R=d[1], count_PE=self.rare.count_PE(action.block, p))
        if isinstance(piece, ragged.Lanes):
            lanes = piece._replace(main_LbD=self.ties.in_order(piece.main_LbD))
            return self._differentiate(key, lambda _, lanes: exchange.combine(lanes), (), lanes)
        assert piece.sizes is not None, "ragged rows travel with their sizes"
        assert piece.source is not None, "and may have to be sent again"
        self.rare.sent(p, piece.source)
        count_E = self.ties.in_order(piece.sizes) if self.facts.compute.platform == "gpu" else piece.sizes
        inputs = self.ties.in_order(piece.rows), exchange.sizes(count_E)
        return self._differentiate(key, lambda _, inputs: exchange.dispatch(*inputs), (), inputs)

    def _arrived(self, flow: Flow, p: int) -> Piece:
        """A piece that compute goes on with, now."""
        piece = flow.pop(p)
        if isinstance(piece, Arrival):
            return piece.finish(self.ties.in_turn)
        first, *others = floats_of(piece)
        return with_floats(piece, [self.ties.in_turn(first), *others])

    def _arrived_rows(self, flow: Flow, p: int) -> jax.Array:
        """The rows of a piece that is back at its tokens' device."""
        return _rows(self._arrived(flow, p)).rows

    # pullbacks

    def _remat(self, function: Callable[..., Any]) -> Callable[..., Any]:
        remat = self.facts.compute.remat
        return function if remat == "none" else jax.checkpoint(function, policy=REMAT_POLICIES[remat])

    def _differentiate(self, key: Key, function: Callable[[Tree, Tree], Tree], weights: Tree, inputs: Tree) -> Any:
        result, self.pullbacks[key] = differentiate(function, weights, inputs, least=self.facts.keeps_least)
        return result

    def _pull(
        self,
        op: str,
        block: int,
        part: int,
        cotangents: Sequence[jax.Array],
        instead: Iterable[tuple[jax.Array, jax.Array]] = (),
    ) -> list[jax.Array]:
        """Gradients of a task's inputs; those of its weights are added up now, or wait for their W task.

        `instead`: see `SplitBackward`.
        """
        pulled = SplitBackward(self.pullbacks.pop((op, block, part)), cotangents, instead)
        inputs = pulled.inputs()
        if self.facts.shape.split_weight_grad:
            self.waiting[op, block, part] = pulled
        else:
            self._add((op, block), pulled.weights(lambda x: x))
        return inputs

    def _add(self, owner: tuple[str, int], gradient: Tree) -> None:
        gradient = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient)  # of casts, as autodiff would
        so_far = self.grads.get(owner)
        self.grads[owner] = gradient if so_far is None else jax.tree.map(jnp.add, so_far, gradient)


def _look_up(embedding: jax.Array, _: Tree, tokens: jax.Array, compute: ComputeConfig) -> jax.Array:
    return embed(embedding, tokens, compute)


def _sent(flow: Flow, p: int) -> Piece:
    """A piece that is not in flight."""
    piece = flow[p]
    assert not isinstance(piece, Arrival)
    return piece


def _rows(piece: Piece) -> ExpertRows:
    """A piece that is not in lanes."""
    assert isinstance(piece, ExpertRows)
    return piece


def _rejoin(
    _: Tree, inputs: tuple[jax.Array, jax.Array, DispatchMetadata], model: ModelConfig, ragged: bool
) -> jax.Array:
    x, returned, metadata = inputs
    return rejoin(x, returned, metadata, model, ragged)


def _without_experts(block: Tree) -> Tree:
    return block | {"moe": {name: value for name, value in block["moe"].items() if name != "experts"}}
