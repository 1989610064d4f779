"""Run the actions of a schedule: per-device code inside `shard_map`, one method for each direction and op.

B sequences of this device, N tokens of each, M blocks with experts, E experts. `StepDims` defines microbatches (index
r) and pieces (index p).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.config import ModelConfig
from moe_jax.models.dispatch import Arrival, Flow, Piece, in_blocks
from moe_jax.models.dispatchers.hot import joined
from moe_jax.models.dispatchers.protocol import CapacityState, DispatchMetadata, ExpertRows
from moe_jax.models.dispatchers.ragged import Stored, lane_experts
from moe_jax.models.moe import RouterContext, RouterStats
from moe_jax.models.mtp import MTPInputs, after_mtp_input
from moe_jax.models.transformer import (
    ComputeConfig,
    Routed,
    attend_and_route,
    dense_block,
    embed,
    experts_of,
    rejoin,
)
from moe_jax.parallel.all_to_all import ragged
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.sequence_shards import LocalTokens
from moe_jax.parallel.trees import Params, Tree
from moe_jax.schedule.actions import Action
from moe_jax.step.scheduled.head_tasks import HeadTasks
from moe_jax.step.scheduled.hot_copies import HotCopies, Pass
from moe_jax.step.scheduled.issue_order import IssueOrder
from moe_jax.step.scheduled.lane_overflow import ExpertWeights, LaneOverflow
from moe_jax.step.scheduled.param_gathering import ParamGathering, but_experts
from moe_jax.step.scheduled.pullbacks import Pullbacks
from moe_jax.step.scheduled.row_transfers import RowTransfers
from moe_jax.step.scheduled.scan_residuals import BlockConsts
from moe_jax.step.scheduled.split_vjp import floats_of, with_floats
from moe_jax.step.scheduled.step_dims import StepDims


class Tasks:
    """Runs forward and backward tasks and stores the values passed between them.

    `ends` holds the embedding, the norms and the head. A scan iteration over blocks has no `ends` and no `tokens`.
    `regathers`: the weights of backward tasks are gathered again. `mtp`: what multi-token prediction reads.
    """

    def __init__(
        self,
        dims: StepDims,
        ends: Params | None,
        consts: BlockConsts,
        tokens: LocalTokens | None = None,
        stored: Callable[[int], Stored] | None = None,
        gathering: ParamGathering | None = None,
        regathers: bool = False,
        mtp: MTPInputs | None = None,
    ):
        self.dims, self.blocks = dims, consts.blocks
        self.ends: Params = ends or {}
        self.expert_weights = ExpertWeights(dims, consts.blocks, stored)
        self.lane_overflow = LaneOverflow(dims, self.expert_weights)
        self.tokens: list[LocalTokens] = []  # by microbatch
        if tokens is not None:
            parts = (jnp.split(x_Bn, dims.microbatches) for x_Bn in tokens)
            self.tokens = list(map(LocalTokens, *parts))
        self.mtp = [None] * dims.microbatches if mtp is None else mtp.parts(dims.microbatches)
        # of multi-token prediction: embeddings of next tokens, features of the decoder's last block, their cotangents
        self.mtp_embedding, self.decoded = dict[int, jax.Array](), dict[int, jax.Array]()
        self.d_mtp_embedding, self.d_decoded = dict[int, jax.Array](), dict[int, jax.Array]()
        # what gates read besides features, before block 0
        self.router_inputs = consts.router_inputs and consts.router_inputs.parts(dims.microbatches)
        self.documents = consts.documents(dims.microbatches)
        self.placements = consts.placements  # placement of each block's experts, if not in order
        self.x: dict[int, jax.Array] = {}  # residual stream of each microbatch
        self.metadata: dict[int, DispatchMetadata] = {}  # to unpermute its rows after combine
        self.flow: Flow = {}  # by piece: its rows before dispatch, at the experts, or after combine
        self.dx: dict[int, jax.Array] = {}  # dx, dmetadata, dflow: cotangents of x, metadata, flow
        self.dmetadata: dict[int, list[jax.Array]] = {}
        self.dflow: Flow = {}
        self.widths: list[int] = []  # rows of each piece of a microbatch
        self.pullbacks = Pullbacks(dims, consts.blocks, regathers)
        self.stats: dict[tuple[int, int], RouterStats] = {}  # by block and microbatch
        self.max_logits: dict[int, jax.Array] = {}  # by block [1, H]; of all blocks of a scan [L, H] by its first one
        self.share: Callable[[int], jax.Array]  # block → each expert's share of the block's (token, choice) pairs
        self.heads = HeadTasks(dims, self.ends, self.tokens, self.mtp, self.pullbacks)
        in_loop = tokens is None and dims.first_block is None
        uses_network = in_loop and dims.compute.exchanges_inside_nodes
        self.order = IssueOrder(dims.compute.platform, gathering is not None, uses_network)
        self.transfers = RowTransfers(dims, self.pullbacks, self.lane_overflow)
        self.hot = HotCopies(dims, self.pullbacks, consts.blocks)
        self.gathering = gathering
        self.awaits_rows = False  # whether backward attend tasks wait for their rows before any computation

    # forward

    def forward(self, action: Action) -> None:
        """Run an F (forward) task."""
        self._params_arrive(action)
        runs = {"embed": self._embed, "attend": self._attend, "head": self._head, "expert": self._experts}
        runs.get(action.op, partial(self.transfers.send, self.flow, order=self.order))(action)
        if action.op == "dispatch":
            self._send_copies("F", action.block)
        if self.gathering is not None and self.gathering.whole is self.blocks:
            self.gathering.release(action, self.dims.shape)

    def _send_copies(self, of: Pass, block: int) -> None:
        if self.dims.compute.hot_experts:
            self._arrive(block, of_experts=True)
            self.hot.send(of, block, self.order)

    def _embed(self, action: Action) -> None:
        for r in self.dims.microbatches_of(action):
            mtp, tokens = self.mtp[r], [self.tokens[r].input_Bn]
            tokens += [] if mtp is None else [mtp.next_Bn]
            look_up = partial(_look_up, tokens=tokens, model=self.dims.config.model, compute=self.dims.compute)
            self.x[r], *of_next = self.pullbacks.differentiate(
                ("embed", action.block, r), look_up, self.ends["embedding"], ()
            )
            if of_next:
                (self.mtp_embedding[r],) = of_next

    def add_combine_to_residual(self, r: int, consumer: int) -> None:
        """Add the combined expert outputs of the previous block to the residual stream of microbatch r."""
        if self.metadata.get(r) is None:
            self.x[r] = self.order.after_compute(self.x[r])
            return
        model, axis = self.dims.config.model, self.dims.dispatcher.slot_axis
        pieces = [self._arrived_rows(self.flow, p) for p in self.dims.pieces_of_microbatch(r)]
        self.widths = [piece.shape[axis] for piece in pieces]
        rows = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=axis)
        inputs = (self.x[r], rows, self.hot.returned.pop(r, None), self.metadata.pop(r))
        self.x[r] = self.pullbacks.differentiate(
            ("residual", consumer, r), partial(_rejoin, model=model, ragged=self.dims.ragged), (), inputs
        )

    def _attend(self, action: Action) -> None:
        dims, block, compute = self.dims, action.block, self.dims.compute
        model, view = dims.config.model, dims.view(block)
        for r in dims.microbatches_of(action):
            self.add_combine_to_residual(r, block)
            document = self.documents[r]
            if dims.shape.kinds[block] == "dense":
                run = partial(dense_block, model=model, view=view, impl=compute.attention, document_BL=document)
                self.x[r], max_logit_H = self._attended(block, r, run)
                self._add_max_logits(block, max_logit_H)
                self.order.record_compute(self.x[r])
                continue
            inputs = None if self.router_inputs is None else self.router_inputs[r].above(block)
            context = RouterContext(inputs, self._capacity(block, r), self.placements.get(block), compute.rank_speeds)
            context = self.hot.context(context, block, self.order)
            route = partial(attend_and_route, model=model, view=view, compute=compute, document_BL=document)
            routed: Routed = self._attended(block, r, partial(route, context=context, ragged=dims.ragged))
            self.x[r], self.metadata[r], self.stats[block, r] = routed.x_BND, routed.metadata, routed.stats
            self._add_max_logits(block, routed.max_logit_H)
            self.order.record_compute(routed.sent.rows)
            self.hot.take(block, r, routed.hot, self.order)
            pieces = dims.pieces_of_microbatch(r)
            split = dims.dispatcher.split(routed.sent, len(pieces)) if len(pieces) > 1 else [routed.sent]
            self.flow.update(zip(pieces, split, strict=True))

    def _add_max_logits(self, block: int, max_logit_H: jax.Array | None) -> None:
        if max_logit_H is not None:
            self.max_logits[block] = jnp.maximum(self.max_logits.get(block, -jnp.inf), max_logit_H[None])

    def max_logit_LH(self) -> jax.Array | None:
        """Return the largest attention logits of each block that has run, over microbatches; None: not asked for."""
        return jnp.concatenate([rows for _, rows in sorted(self.max_logits.items())]) if self.max_logits else None

    def _attended(self, block: int, r: int, run: Callable[..., Any]) -> Any:
        """Run attention and what follows it on a microbatch's residual stream."""
        key, weights = ("attend", block, r), but_experts(self.blocks[block])
        if not self.dims.is_mtp(block):
            return self.pullbacks.differentiate(key, run, weights, self.x[r], remat=True)
        self.decoded[r] = self.x[r]
        inputs = self.x[r], self.mtp_embedding.pop(r)
        run = after_mtp_input(run, self.dims.config.model)
        weights |= {"last_norm": self.ends["norm"]}
        return self.pullbacks.differentiate(key, run, weights, inputs, remat=True)

    def _capacity(self, block: int, r: int) -> CapacityState:
        """Return the capacity that earlier microbatches have left in the experts' slots."""
        nothing = jnp.zeros(self.dims.config.model.moe.num_experts, jnp.int32)
        used = sum((self.stats[block, earlier].count_E for earlier in range(r)), start=nothing)
        if r and self.dims.compute.platform == "gpu":
            # XLA:GPU would compute two microbatches' sizes in one operation, and the first would wait for the second
            used = self.order.after_compute(used)
        return CapacityState(self.dims.slots, used, self.dims.microbatches, self.dims.buffer)

    def _experts(self, action: Action) -> None:
        dims, block = self.dims, action.block
        for p in dims.pieces_of(action):
            received = self._arrived(self.flow, p)
            if isinstance(received, ragged.Lanes):
                self.flow[p] = self._lanes(block, p, received)
            else:
                weights = self.blocks[block]["moe"]["experts"]
                run = experts_of(dims.config.model.moe, dims.compute)
                out = self.pullbacks.differentiate(("expert", block, p), run, weights, received, remat=True)
                self.flow[p] = ExpertRows(out)
            self.order.record_compute(floats_of(self.flow[p])[0])
            self.hot.compute(block, p, floats_of(self.flow[p])[0], self.order)

    def _lanes(self, block: int, p: int, lanes: ragged.Lanes) -> ragged.Lanes:
        """Apply the experts to their lanes, and to the rows that overflowed them."""
        weights = self.expert_weights.forward(block, lanes.main_LbD)
        filled_L = ragged.filled(lanes.count_PE, self.dims.compute.expert_axis)
        function = partial(lane_experts, filled_L=filled_L, moe=self.dims.config.model.moe)
        main = self.pullbacks.differentiate(("expert", block, p), function, weights, lanes.main_LbD, remat=True)
        return lanes._replace(main_LbD=main, rest_R=self.lane_overflow.forward(block, p, lanes, filled_L))

    def _head(self, action: Action) -> None:
        for r in self.dims.microbatches_of(action):
            self.add_combine_to_residual(r, len(self.dims.shape.kinds))
            x = [self.decoded.pop(r), self.x.pop(r)] if self.dims.shape.mtp else [self.x.pop(r)]
            self.order.record_compute(self.heads.forward(action.block, r, x))

    # backward

    def backward(self, action: Action) -> None:
        """Run a B (backward) task."""
        self._params_arrive(action)
        runs = {"embed": self._embed_back, "attend": self._attend_back, "head": self._head_back}
        runs["expert"] = self._experts_back
        runs.get(action.op, partial(self.transfers.send, self.dflow, order=self.order))(action)
        if action.op == "combine":
            self._send_copies("B", action.block)
        if action.op == "dispatch":
            self.hot.sum(action.block, self.order)

    def _head_back(self, action: Action) -> None:
        for r in self.dims.microbatches_of(action):
            *of_decoded, self.dx[r] = self.heads.backward(action.block, r, self.order.after_compute(jnp.float32(1)))
            if of_decoded:
                (self.d_decoded[r],) = of_decoded
            self.order.record_compute(self.dx[r])
            self.add_combine_to_residual_back(r, len(self.dims.shape.kinds))

    def add_combine_to_residual_back(self, r: int, consumer: int) -> None:
        """Backward of `add_combine_to_residual`: cotangents of the stream, the returned rows and their weights."""
        pullback = self.pullbacks.stored.pop(("residual", consumer, r), None)
        if pullback is None:
            return
        _, (self.dx[r], drows, *rest) = pullback([self.dx[r]])
        if self.dims.compute.hot_experts:
            self.hot.d_returned[r], *rest = rest
        self.dmetadata[r] = rest
        pieces = self.dims.pieces_of_microbatch(r)
        bounds = [sum(self.widths[:i]) for i in range(1, len(pieces))]
        axis = self.dims.dispatcher.slot_axis
        drows_of_pieces = map(ExpertRows, jnp.split(drows, bounds, axis=axis))
        self.dflow.update(zip(pieces, drows_of_pieces, strict=True))

    def _experts_back(self, action: Action) -> None:
        block, split = action.block, self.dims.shape.split_weight_grad
        for p in self.dims.pieces_of(action):
            d = self._arrived(self.dflow, p)
            d_out = d.main_LbD if isinstance(d, ragged.Lanes) else d.rows
            (d_in,) = self.pullbacks.pull(("expert", block, p), [d_out], self.expert_weights.replacements(block, d_out))
            self.order.record_compute(d_in)
            if isinstance(d, ragged.Lanes):
                self.dflow[p] = d._replace(main_LbD=d_in, rest_R=self.lane_overflow.backward(block, p, d.rest_R))
            else:
                self.dflow[p] = ExpertRows(d_in)
            self.hot.backward(block, p, self.order)
        if not split:
            self._add_overflow_gradients(block)

    def _add_overflow_gradients(self, block: int) -> None:
        """Add the weight gradients of rows that overflowed their lanes, after those of all pieces.

        If they were added earlier, XLA could not add up the pieces in one operation.
        """
        if not any(self.pullbacks.is_under_way(("expert", block, p)) for p in range(self.dims.num_pieces)):
            grads = self.pullbacks.grads
            grads["expert", block] = self.lane_overflow.add_weights(block, grads["expert", block])

    def _attend_back(self, action: Action) -> None:
        dims, block = self.dims, action.block
        for r in dims.microbatches_of(action):
            dx, of_field = self.order.after_compute(self.dx[r]), dict[str, Any]()  # cotangents by field of `Routed`
            if dims.shape.kinds[block] == "moe":
                axis = dims.dispatcher.slot_axis
                pieces = [self._arrived_rows(self.dflow, p) for p in dims.pieces_of_microbatch(r)]
                drows = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=axis)
                if self.awaits_rows:
                    dx = depend_on(dx, drows, dims.compute.platform)
                of_field |= {"sent": (drows, self._no_cotangents(r)), "metadata": self.dmetadata.pop(r)}
                of_field |= {"stats": self._router_cotangents(block), "hot": self.hot.d_rows(r)}
            of_field["x_BND"] = dx
            if dims.compute.attention.max_logits:
                of_field["max_logit_H"] = jnp.zeros(dims.own_heads)
            cotangents = jax.tree.leaves([of_field.get(name) for name in Routed._fields])
            self.dx[r], *of_next = self.pullbacks.pull(("attend", block, r), cotangents)
            if of_next:
                self.dx[r], (self.d_mtp_embedding[r],) = self.dx[r] + self.d_decoded.pop(r), of_next
            self.order.record_compute(self.dx[r])
            self.add_combine_to_residual_back(r, block)

    def _no_cotangents(self, r: int) -> list[jax.Array]:
        """Return zero cotangents for the source of a microbatch's rows, if the exchange is ragged."""
        return [jnp.zeros_like(self.dx[r]).reshape(-1, self.dx[r].shape[-1])] if self.dims.ragged else []

    def _router_cotangents(self, block: int) -> tuple[jax.Array, jax.Array]:
        """Return the gradients of the auxiliary losses with respect to a microbatch's summed probabilities [E] and
        squared logits.
        """
        moe = self.dims.config.model.moe
        per_token = 1 / self.dims.routed_tokens
        balance = moe.aux_loss_coeff * moe.num_experts * per_token
        return balance * self.share(block), jnp.asarray(moe.z_loss_coeff * per_token, jnp.float32)

    def _embed_back(self, action: Action) -> None:
        for r in self.dims.microbatches_of(action):
            cotangents = [self.order.after_compute(self.dx.pop(r))]
            cotangents += [self.d_mtp_embedding.pop(r)] if self.dims.shape.mtp else []
            gradient, _ = self.pullbacks.stored.pop(("embed", action.block, r))(cotangents)
            self.pullbacks.add(("embed", action.block), gradient)

    def weights(self, action: Action) -> None:
        """Run a W (weight gradient) task."""
        parts = self.dims.pieces_of(action) if action.op == "expert" else self.dims.microbatches_of(action)
        for part in parts:
            gradient = self.pullbacks.waiting.pop((action.op, action.block, part)).weights(self.order.after_compute)
            if action.op != "head" or self.heads.returns_gradients(part):
                self.order.record_compute(*jax.tree.leaves(gradient))
            self.pullbacks.add((action.op, action.block), gradient)
            if action.op == "expert":
                self.hot.weights(action.block, part, self.order)
        if action.op == "expert":
            self._add_overflow_gradients(action.block)
            self.hot.sum(action.block, self.order)

    # collectives

    def _arrived(self, flow: Flow, p: int) -> Piece:
        """Return a piece for the next compute task, ordered after the previous one."""
        piece = flow.pop(p)
        if isinstance(piece, Arrival):
            return piece.finish(self.order.after_compute)
        first, *others = floats_of(piece)
        return with_floats(piece, [self.order.after_compute(first), *others])

    def _arrived_rows(self, flow: Flow, p: int) -> jax.Array:
        """Return the rows of a piece that has returned to the device of its tokens."""
        return in_blocks(self._arrived(flow, p)).rows

    def gather_params(self, action: Action) -> None:
        """Run a P task."""
        assert self.gathering is not None, "devices have shards of parameters"
        self.gathering.run(action, self.order)

    def _params_arrive(self, action: Action) -> None:
        """Wait for the weights of an F or B task that are being gathered. In a scan they are another iteration's."""
        if action.op not in ("embed", "head"):
            self._arrive(action.block, of_experts=action.op == "expert")
        elif self.gathering is not None:
            self.gathering.arrive(action.op)
            self.ends |= self.gathering.whole.pop(action.op, {})

    def _arrive(self, block: int, of_experts: bool) -> None:
        if self.gathering is not None and self.gathering.whole is self.blocks:
            self.gathering.arrive(block, of_experts=[of_experts])


def _look_up(
    embedding: jax.Array, _: Tree, tokens: Sequence[jax.Array], model: ModelConfig, compute: ComputeConfig
) -> list[jax.Array]:
    return [embed(embedding, token_Bn, model, compute) for token_Bn in tokens]


def _rejoin(
    _: Tree,
    inputs: tuple[jax.Array, jax.Array, jax.Array | None, DispatchMetadata],
    model: ModelConfig,
    ragged: bool,
) -> jax.Array:
    x, returned, of_copies, metadata = inputs
    returned = returned if of_copies is None else joined(returned, of_copies)
    return rejoin(x, returned, metadata, model, ragged)
