"""One exchange: rows travel to their experts and the results back, between `permute` and `unpermute`.

    permute ──► dispatch ──► experts ──► combine ──► unpermute
              start, finish            start, finish

`TokenExchange` handles everything that a transfer needs: the codec of the hooks, the form in which tensor ranks share
it, and the sizes, which are whole numbers and travel without a codec. Steps differ in where they start and finish it:

    plain       in one place: `run`
    ring        block by block, so that experts compute one block while the next travels: `hop`
    scheduled   in different tasks: `start` returns pieces `InFlight`, which later tasks finish
    ragged      in one task, sizes first; only rows that exist travel: `RaggedExchange`

The algorithms that move blocks between ranks are in `moe_jax/parallel/all_to_all/`, one file each. The forms over
tensor ranks are in `moe_jax/parallel/tensor_dispatch.py`. P expert ranks, E experts.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoEConfig
from moe_jax.models.dispatchers.protocol import ExpertRows
from moe_jax.models.hooks import hooks_of
from moe_jax.models.hooks.protocol import Hooks, WireCodec
from moe_jax.parallel import tensor_background
from moe_jax.parallel.all_to_all import UnderWay, ragged
from moe_jax.parallel.all_to_all.ring import shift
from moe_jax.parallel.ranks import Ranks
from moe_jax.parallel.tensor_dispatch import DispatchRoute, Send, Unchunked

Phase = Literal["dispatch", "combine"]
Tie = Callable[[jax.Array], jax.Array]  # returns its argument, to be used only after something else exists


class TokenExchange(NamedTuple):
    """Dispatch or combine, of rows or (`backward`) of their cotangents."""

    phase: Phase
    route: DispatchRoute
    hooks: Hooks
    backward: bool = False

    @property
    def to_experts(self) -> bool:
        """The direction: the cotangents of a dispatch come from the experts."""
        return (self.phase == "dispatch") != self.backward

    @property
    def codec(self) -> WireCodec:
        """The codec of the rows of this exchange."""
        return self.hooks.codec(self.phase, backward=self.backward)

    @property
    def transposed(self) -> "TokenExchange":
        """The exchange of the cotangents."""
        return self._replace(backward=not self.backward)

    def run(self, x: ExpertRows) -> ExpertRows:
        """Start and finish. Block p goes to rank p, and block p of the result came from rank p."""
        with jax.named_scope(self.phase):
            return ExpertRows(self._over_tensor(x.rows, self._exchange_rows), self._exchange_sizes(x.sizes))

    def hop(self, block: ExpertRows, distance: int) -> ExpertRows:
        """Send one block [1, …] to the rank `distance` after this one, and return the block of the rank before.

        A block that stays (distance 0) is rounded by the codec, too. The caller gathers or sums over tensor ranks.
        """
        there, back = (partial(shift, distance=hops, ranks=self.route.ranks) for hops in (distance, -distance))
        with jax.named_scope(self.phase):
            rows = _encoded(self, there, back, block.rows)
            return ExpertRows(rows, None if block.sizes is None else there(block.sizes))

    def start(self, pieces: Sequence[ExpertRows], slot_axis: int, tie: Tie) -> "InFlight":
        """Start one exchange for the rows of all pieces, concatenated along `slot_axis`.

        `tie` is applied to what the first collective sends; on CPUs also to sizes, which would run beside a loop's own
        collectives if no feature decides them (`measure/races.py`).
        """
        rows = pieces[0].rows if len(pieces) == 1 else jnp.concatenate([x.rows for x in pieces], axis=slot_axis)
        under_way, finish = self._start(rows, tie)
        ties_sizes = self.route.ranks.platform == "cpu"
        sizes = [self._exchange_sizes(tie(x.sizes) if ties_sizes and x.sizes is not None else x.sizes) for x in pieces]
        widths = [x.rows.shape[slot_axis] for x in pieces]
        return InFlight(under_way, finish, widths, slot_axis, sizes, self.codec.keeps_rows)

    def start_after(self, earlier: "InFlight", tie: Tie) -> "InFlight":
        """Start an exchange of the rows of a collective in flight, without waiting for them if a codec keeps them.

        `tie` is applied to what the program hands over.
        """
        start_after = self.route.exchange.start_after
        if start_after is None or not (self.codec.keeps_rows and earlier.keeps_rows):
            return self.start(earlier.all(tie), earlier.slot_axis, tie)
        *others, handle = earlier.under_way
        ranks, finish = self.route.ranks, self.route.exchange.finish
        sizes = [self._exchange_sizes(own) for own in earlier.sizes]
        under_way = start_after((*others, tie(handle)), ranks)
        return earlier.followed_by(under_way, lambda under_way: finish(under_way, ranks), sizes)

    def _start(self, rows: jax.Array, tie: Tie) -> tuple[UnderWay, Callable[[UnderWay], jax.Array]]:
        """Return what is in flight, and the function that turns it into rows.

        With several tensor ranks a collective of XLA also finishes here, because its result is gathered or summed. An
        exchange in the background finishes here only if it is split into chunks.
        """
        exchange, ranks, codec = self.route.exchange, self.route.ranks, self.codec
        transfer = self.route.transfer(to_experts=self.to_experts)
        post_comm: Send = _identity
        if not self.route.shares_experts:
            under_way = exchange.start(tie(codec.encode(rows)), ranks)
        elif exchange.only_starts and isinstance(transfer, Unchunked):
            under_way = exchange.start(codec.encode(transfer.pre_comm(tie(rows))), ranks)
            post_comm = transfer.post_comm
        else:
            return (self._over_tensor(tie(rows), self._exchange_rows),), operator.itemgetter(0)
        return under_way, lambda under_way: post_comm(codec.decode(exchange.finish(under_way, ranks), rows.dtype))

    def _over_tensor(self, x: jax.Array, send: Send) -> jax.Array:
        return self.route.all_to_all(x, send, to_experts=self.to_experts)

    def _exchange_blocks(self, x: jax.Array) -> jax.Array:
        return self.route.exchange(x, self.route.ranks)

    def _exchange_rows(self, x: jax.Array) -> jax.Array:
        return _encoded(self, self._exchange_blocks, self._exchange_blocks, x)

    def _exchange_sizes(self, sizes: Int[Array, "..."] | None) -> Int[Array, "..."] | None:
        return None if sizes is None else self._over_tensor(sizes, self._exchange_blocks)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _encoded(exchange: TokenExchange, there: Send, back: Send, x: jax.Array) -> jax.Array:
    """Send rows by `there`, with the codec of an exchange.

    Their cotangents are sent by `back`, with the codec of the transposed exchange.
    """
    codec = exchange.codec
    return codec.decode(there(codec.encode(x)), x.dtype)


def _encoded_forward(exchange: TokenExchange, there: Send, back: Send, x: jax.Array) -> tuple[jax.Array, None]:
    return _encoded(exchange, there, back, x), None


def _encoded_backward(exchange: TokenExchange, there: Send, back: Send, _: None, dx: jax.Array) -> tuple[jax.Array]:
    return (_encoded(exchange.transposed, back, there, dx),)


_encoded.defvjp(_encoded_forward, _encoded_backward)


def _identity(x: jax.Array) -> jax.Array:
    return x


def dispatch_compute_combine(
    sent: ExpertRows, experts: Callable[[ExpertRows], jax.Array], route: DispatchRoute, moe: MoEConfig
) -> jax.Array:
    """Return the experts' outputs for all rows, back in their places [P, …], for steps that schedule nothing between.

    On a ring blocks travel one by one: in hop s rank r sends block r + s, and its outputs return along the same links.
    Blocks that stay (s = 0) need no link, so their experts overlap with the first hop.
    """
    hooks = hooks_of(moe)
    dispatch, combine = TokenExchange("dispatch", route, hooks), TokenExchange("combine", route, hooks)
    if not route.goes_by_hops:
        return combine.run(ExpertRows(experts(dispatch.run(sent)))).rows
    ep_size, rank = route.ranks.size(), jax.lax.axis_index(route.ranks.axis)
    received = []
    for distance in range(ep_size):
        block = jax.tree.map(partial(jax.lax.dynamic_index_in_dim, index=(rank + distance) % ep_size), sent)
        received.append(dispatch.hop(block, distance))
    returned: jax.Array | None = None
    for distance, block in enumerate(received):
        out = route.computed(experts(jax.tree.map(route.received, block)))
        back = combine.hop(ExpertRows(out), -distance).rows
        if returned is None:
            returned = jax.lax.empty((ep_size, *back.shape[1:]), back.dtype)
        returned = jax.lax.dynamic_update_index_in_dim(returned, back, (rank + distance) % ep_size, axis=0)
    assert returned is not None
    return returned


class InFlight:
    """Pieces between the start and the finish of their collective, which finishes when the first piece is needed.

    `keeps_rows`: what is in flight are the rows themselves, so another collective can send them on.
    """

    def __init__(
        self,
        under_way: UnderWay,
        finish: Callable[[UnderWay], jax.Array],
        widths: Sequence[int],
        slot_axis: int,
        sizes: Sequence[Int[Array, "..."] | None],
        keeps_rows: bool,
    ):
        self.under_way, self.slot_axis, self.sizes, self.keeps_rows = under_way, slot_axis, sizes, keeps_rows
        self._finish, self._widths = finish, widths
        self._rows: list[jax.Array] | None = None

    def followed_by(
        self,
        under_way: UnderWay,
        finish: Callable[[UnderWay], jax.Array],
        sizes: Sequence[Int[Array, "..."] | None],
    ) -> "InFlight":
        """Return the same pieces in the collective that sends them on."""
        return InFlight(under_way, finish, self._widths, self.slot_axis, sizes, self.keeps_rows)

    def all(self, tie: Tie) -> list[ExpertRows]:
        """Return all pieces, which are needed now."""
        return [self.piece(number, tie) for number in range(len(self._widths))]

    @property
    def num_rows(self) -> int:
        """The slots of all pieces together; 0: nothing is in flight."""
        return sum(self._widths)

    def pieces(self) -> "list[Arrival]":
        """Return one `Arrival` for each piece."""
        return [Arrival(self, number) for number in range(len(self._widths))]

    def piece(self, number: int, tie: Tie) -> ExpertRows:
        """Return a piece that is needed now. `tie` is applied to the array that arrives last."""
        if self._rows is None:
            *others, last = self.under_way
            bounds = [sum(self._widths[:i]) for i in range(1, len(self._widths))]
            self._rows = jnp.split(self._finish((*others, tie(last))), bounds, axis=self.slot_axis)
        return ExpertRows(self._rows[number], self.sizes[number])


class Arrival(NamedTuple):
    """One piece of an exchange in flight."""

    exchange: InFlight
    number: int

    def finish(self, tie: Tie) -> ExpertRows:
        """Return its rows and sizes."""
        return self.exchange.piece(self.number, tie)


Piece = ExpertRows | ragged.Lanes  # rows in transit, or the lanes of a ragged exchange's experts
Flow = dict[int, Piece | Arrival]  # by number of the piece


def at_rest(piece: Piece | Arrival) -> Piece:
    """Return a piece that is not in flight."""
    assert not isinstance(piece, Arrival)
    return piece


def in_blocks(piece: Piece | Arrival) -> ExpertRows:
    """Return a piece that is neither in flight nor in lanes."""
    assert isinstance(piece, ExpertRows)
    return piece


def over_tensor(piece: Piece | Arrival, route: DispatchRoute, to_experts: bool, tie: Tie) -> ExpertRows:
    """Return the pieces of all tensor ranks, or (from the experts) the sum of theirs: each is the other's transpose.

    A piece in flight arrives here. `tie` is applied to what is sent.
    """
    move = route.received if to_experts else route.computed
    rows, sizes, _ = piece.finish(tie) if isinstance(piece, Arrival) else in_blocks(piece)
    return ExpertRows(move(tie(rows)), None if sizes is None else move(sizes))


def in_one_flight(pieces: Sequence[Piece | Arrival]) -> InFlight | None:
    """Return the collective that has exactly these pieces in flight; None if they are not in flight."""
    first = pieces[0]
    if not isinstance(first, Arrival):
        return None
    assert list(pieces) == first.exchange.pieces(), "tasks in a row have the same pieces"
    return first.exchange


def over_tensor_in_background(
    pieces: Sequence[Piece | Arrival], route: DispatchRoute, to_experts: bool, slot_axis: int, tie: Tie
) -> InFlight:
    """Start what `over_tensor` does, for all pieces. Rows in flight are sent on without waiting for them.

    `tie` is applied to what the program hands over.
    """
    move = route.received if to_experts else route.computed
    earlier = in_one_flight(pieces)
    if earlier is not None and earlier.keeps_rows and to_experts:
        *others, handle = earlier.under_way
        sizes = [None if own is None else move(own) for own in earlier.sizes]
        return earlier.followed_by(
            tensor_background.gather_after((*others, tie(handle))), tensor_background.finish, sizes
        )
    rows = list(map(in_blocks, pieces)) if earlier is None else earlier.all(tie)
    together = rows[0].rows if len(rows) == 1 else jnp.concatenate([x.rows for x in rows], axis=slot_axis)
    start = tensor_background.start_gather if to_experts else tensor_background.start_sum
    sizes = [None if x.sizes is None else move(x.sizes) for x in rows]
    widths = [x.rows.shape[slot_axis] for x in rows]
    return InFlight(start(tie(together)), tensor_background.finish, widths, slot_axis, sizes, keeps_rows=True)


class RaggedExchange(NamedTuple):
    """An exchange with sizes: each row is sent straight into the lane of its expert.

    It supports neither hooks nor several tensor ranks. The two phases are transposes of each other.
    """

    ranks: Ranks
    widths: ragged.Widths  # of the lanes
    num_rows: int  # S, the most that a rank sends

    def sizes(self, count_E: Int[Array, " E"]) -> Int[Array, "P E"]:
        """Return how many rows each rank sends to each expert. All ranks get the whole table."""
        return ragged.gather_sizes(count_E, self.ranks.axis)

    def dispatch(self, rows_S: Float[Array, "S ..."], count_PE: Int[Array, "P E"]) -> ragged.Lanes:
        """Send rows that are sorted by expert into lanes."""
        axis, platform = self.ranks.axis, self.ranks.platform
        return ragged.Lanes(*ragged.to_lanes(rows_S, count_PE, self.widths, axis, platform), count_PE)

    def combine(self, lanes: ragged.Lanes) -> ExpertRows:
        """Send rows back from the lanes, each to where it came from: [S, …]."""
        return ExpertRows(ragged.from_lanes(*lanes, self.num_rows, self.ranks.axis, self.ranks.platform))
