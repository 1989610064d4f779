"""Run the tasks that move rows between devices: exchanges over expert ranks, gathers and sums over tensor ranks.

A task takes the rows of its pieces, or their cotangents in the backward pass, out of a `Flow` and puts back what
arrives, or what is in flight.
"""

from functools import partial

from moe_jax.models.dispatch import (
    Flow,
    InFlight,
    Phase,
    Piece,
    TokenExchange,
    at_rest,
    in_blocks,
    in_one_flight,
    over_tensor,
    over_tensor_in_background,
)
from moe_jax.models.dispatchers.protocol import ExpertRows
from moe_jax.models.hooks import hooks_of
from moe_jax.parallel.all_to_all import ragged
from moe_jax.schedule.actions import Action
from moe_jax.step.scheduled.issue_order import IssueOrder
from moe_jax.step.scheduled.lane_overflow import LaneOverflow
from moe_jax.step.scheduled.pullbacks import Pullbacks
from moe_jax.step.scheduled.split_vjp import floats_of
from moe_jax.step.scheduled.step_dims import StepDims


class RowTransfers:
    """The exchanges of a step, in the order of its schedule."""

    def __init__(self, dims: StepDims, pullbacks: Pullbacks, lane_overflow: LaneOverflow):
        self._dims, self._pullbacks, self._lane_overflow = dims, pullbacks, lane_overflow

    def send(self, flow: Flow, action: Action, order: IssueOrder) -> None:
        """Run a dispatch, gather, scatter or combine task."""
        if action.op in ("gather", "scatter"):
            self._over_tensor(flow, action, order)
        elif self._dims.ragged:
            for p in self._dims.pieces_of(action):
                flow[p] = self._exchanged_ragged(at_rest(flow[p]), action, p, order)
                order.record_comm(floats_of(flow[p])[0])
        else:
            self._exchange(flow, action, order)

    def _over_tensor(self, flow: Flow, action: Action, order: IssueOrder) -> None:
        to_experts = (action.op == "gather") == (action.direction == "F")
        route, pieces = self._dims.compute.route, self._dims.pieces_of(action)
        if not route.in_background:
            for p in pieces:
                flow[p] = moved = over_tensor(flow[p], route, to_experts, order.after_over_tensor)
                order.record_over_tensor(moved.rows)
            return
        tie = partial(order.after_comm, only_starts=True)
        slot_axis = self._dims.dispatcher.slot_axis
        in_flight = over_tensor_in_background([flow[p] for p in pieces], route, to_experts, slot_axis, tie)
        self._record(flow, action, in_flight, order, only_starts=True)

    def _exchange(self, flow: Flow, action: Action, order: IssueOrder) -> None:
        compute, pieces = self._dims.compute, self._dims.pieces_of(action)
        phase: Phase = "dispatch" if action.op == "dispatch" else "combine"
        route = compute.route.without_tensor if self._dims.shape.sharded_experts else compute.route
        exchange = TokenExchange(phase, route, hooks_of(self._dims.config.model.moe), action.direction == "B")
        only_starts = compute.route.exchange.only_starts
        tie = partial(order.after_comm, only_starts=only_starts)
        earlier = in_one_flight([flow[p] for p in pieces])
        if earlier is None:
            in_flight = exchange.start([in_blocks(flow[p]) for p in pieces], self._dims.dispatcher.slot_axis, tie)
        else:
            in_flight = exchange.start_after(earlier, tie)
        self._record(flow, action, in_flight, order, only_starts)

    def _record(self, flow: Flow, action: Action, in_flight: InFlight, order: IssueOrder, only_starts: bool) -> None:
        if in_flight.num_rows:
            order.record_comm(in_flight.under_way[-1], only_starts)
        flow.update(zip(self._dims.pieces_of(action), in_flight.pieces(), strict=True))

    def _exchanged_ragged(self, piece: Piece, action: Action, p: int, order: IssueOrder) -> Piece:
        """Exchange the sizes, then the rows, of one microbatch; cotangents by the pullback, which has the sizes."""
        key, exchange = (action.op, action.block, p), self._dims.ragged_exchange
        if action.direction == "B":
            first, *others = floats_of(piece)
            if action.op == "combine":
                # sent before the cotangents exist, these few rows would hide behind their computation instead of them
                again = self._lane_overflow.send_again(
                    action.block, p, lambda rows_R: order.after_comm(order.after(rows_R, first))
                )
                if again is not None:
                    order.record_comm(again)
            _, d = self._pullbacks.stored.pop(key)([order.after_comm(first), *others])
            if action.op == "dispatch":
                return ExpertRows(d[0])
            return ragged.Lanes(main_LbD=d[0], rest_R=d[1], count_PE=self._lane_overflow.count_PE(action.block, p))
        if isinstance(piece, ragged.Lanes):
            lanes = piece._replace(main_LbD=order.after_comm(piece.main_LbD))
            return self._pullbacks.differentiate(key, lambda _, lanes: exchange.combine(lanes), (), lanes)
        assert piece.sizes is not None, "ragged rows travel with their sizes"
        assert piece.source is not None, "and may have to be sent again"
        self._lane_overflow.sent(p, piece.source)
        count_E = order.after_comm(piece.sizes) if self._dims.compute.platform == "gpu" else piece.sizes
        inputs = order.after_comm(piece.rows), exchange.sizes(count_E)
        return self._pullbacks.differentiate(key, lambda _, inputs: exchange.dispatch(*inputs), (), inputs)
