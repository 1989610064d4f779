"""How t tensor ranks, each with 1/t of the width of every expert, share an exchange: forms of one idea (MoNTA).

`to_experts` sends this rank's rows [P, …], one block for each of P expert ranks, to all tensor ranks of the target, and
returns what all sources sent here [t·P, …]. `from_experts` sends back the sum of what the tensor ranks computed, and is
the transpose of `to_experts`. `send` exchanges rows [P, …] between expert ranks that have the same tensor rank. All
forms return the same bits.

    form                 to_experts      from_experts   an all-to-all carries
    replicated           gather, send    send, sum      all rows, t times as many as with sharded
    sharded              send, gather    sum, send      the own rows
    sharded_chunked      as sharded in chunks: the second transfer of one overlaps with the first of the next
    sharded_overlapped   as sharded_chunked, and each chunk is copied to its place while later ones travel

Where a schedule has tasks for the two transfers of `sharded` (`exchange.tensor_form=sharded_scheduled`, FSMoE), the
route of dispatch and combine is `without_tensor`, and `received` and `computed` gather and sum.

If experts are sharded over tensor ranks, too (`WHOLE_EXPERTS`), each is whole on its rank: rows are only sent. On one
tensor rank nothing is gathered or summed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from moe_jax.config.registry import EXCHANGE_FACTS
from moe_jax.parallel.all_to_all import Exchange, exchange_named
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.ranks import Ranks
from moe_jax.parallel.sequence_shards import tp_all_gather, tp_reduce_scatter

Send = Callable[[jax.Array], jax.Array]
WHOLE_EXPERTS = "whole"  # the form of experts that tensor ranks do not share
_SLOTS = -2  # the dimension that counts rows, in front of their features


class Chunking(NamedTuple):
    """The number of chunks into which rows are split, and the platform."""

    chunks: int
    platform: str  # cpu, gpu or tpu


Transfer = Callable[[jax.Array, Send, Chunking], jax.Array]


@dataclass(frozen=True)
class Unchunked:
    """A transfer with one exchange of all rows, and what the tensor ranks do among themselves before and after it.

    Nothing else happens between, so other work can run while the exchange is in flight.
    """

    pre_comm: Send
    post_comm: Send

    def __call__(self, x: Shaped[Array, "..."], send: Send, chunking: Chunking) -> Shaped[Array, "..."]:
        """Run all three steps, one after another."""
        return self.post_comm(send(self.pre_comm(x)))


class Form(NamedTuple):
    """How rows travel to the experts and back."""

    to_experts: Transfer
    from_experts: Transfer


class DispatchRoute(NamedTuple):
    """How rows travel to the experts and back: `algorithm` between expert ranks, `form` over tensor ranks."""

    algorithm: str
    ranks: Ranks
    form: str = "sharded"
    chunks: int = 1

    @property
    def exchange(self) -> Exchange:
        """The exchange of full blocks.

        `ragged` is for microbatches of a scheduled step; other steps send padded rows.
        """
        return exchange_named("flat" if EXCHANGE_FACTS.of(self.algorithm).ragged else self.algorithm)

    @property
    def in_background(self) -> bool:
        """Whether gathers and sums over tensor ranks run concurrently with the program, as the exchange does."""
        return self.shares_experts and self.exchange.start_after is not None

    @property
    def without_tensor(self) -> "DispatchRoute":
        """The route without the transfers between tensor ranks."""
        return self._replace(form=WHOLE_EXPERTS)

    @property
    def goes_by_hops(self) -> bool:
        """Whether blocks travel one by one, so that experts can process one while the next travels."""
        return self.algorithm == "ring" and self.form in ("sharded", WHOLE_EXPERTS)

    @property
    def shares_experts(self) -> bool:
        """Whether tensor ranks share each expert, so that they gather its rows and sum its outputs. Runs inside
        `shard_map`.
        """
        return self.form != WHOLE_EXPERTS and jax.lax.axis_size(Axis.TENSOR) > 1

    def received(self, x: Shaped[Array, "P ..."]) -> Shaped[Array, "tP ..."]:
        """Return the rows of a block that has arrived, as the experts need them."""
        return _gather(x) if self.shares_experts else x

    def computed(self, x: Float[Array, "tP ..."]) -> Float[Array, "P ..."]:
        """Return the outputs of the experts for a block, as they are sent back."""
        return _sum(x) if self.shares_experts else x

    def transfer(self, *, to_experts: bool) -> Transfer:
        """Return the transfer to the experts, or the one from them."""
        form = _WHOLE if self.form == WHOLE_EXPERTS else FORMS[self.form]
        return form.to_experts if to_experts else form.from_experts

    def all_to_all(self, x: jax.Array, send: Send, *, to_experts: bool) -> jax.Array:
        """Transfer `x` to the experts, or from them, with `send` as the exchange between expert ranks."""
        return self.transfer(to_experts=to_experts)(x, send, Chunking(self.chunks, self.ranks.platform))


# replicated, sharded


def _identity(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    return x


def _gather(x: Shaped[Array, "P ..."]) -> Shaped[Array, "tP ..."]:
    return tp_all_gather(x, 0)


def _sum(x: Float[Array, "tP ..."]) -> Float[Array, "P ..."]:
    return tp_reduce_scatter(x, 0)


def _gather_by_target(x: Shaped[Array, "P ..."]) -> Shaped[Array, "P t ..."]:
    return tp_all_gather(x[:, None], 1)


def _by_source(x: Shaped[Array, "P t ..."]) -> Shaped[Array, "tP ..."]:
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _by_target(x: Shaped[Array, "tP ..."]) -> Shaped[Array, "P t ..."]:
    ranks = jax.lax.axis_size(Axis.TENSOR)
    return jnp.swapaxes(x.reshape(ranks, x.shape[0] // ranks, *x.shape[1:]), 0, 1)


def _sum_by_target(x: Float[Array, "P t ..."]) -> Float[Array, "P ..."]:
    return tp_reduce_scatter(x, 1)[:, 0]


# sharded_chunked, sharded_overlapped


class _ChunkCollector(Protocol):
    """Collects rows that arrive chunk by chunk."""

    def add(self, chunk: jax.Array) -> None:
        """Add the next chunk."""

    def all(self) -> jax.Array:
        """Return all rows, after the last chunk was added."""


class _Concatenated:
    """Concatenates the chunks at the end."""

    def __init__(self, _: Shaped[Array, "..."]):
        self._chunks: list[jax.Array] = []

    def add(self, chunk: jax.Array) -> None:
        self._chunks.append(chunk)

    def all(self) -> jax.Array:
        return self._chunks[0] if len(self._chunks) == 1 else jnp.concatenate(self._chunks, axis=_SLOTS)


class _Filled:
    """Memory for as many rows as `x` has. Each chunk is copied into it on arrival."""

    def __init__(self, x: Shaped[Array, "..."]):
        self._rows = x.shape[_SLOTS]
        self._filled = 0
        self._target: jax.Array | None = None

    def add(self, chunk: jax.Array) -> None:
        if chunk.ndim < 3 or chunk.shape[_SLOTS] == self._rows:
            self._target = chunk
            return
        dim = chunk.ndim + _SLOTS
        if self._target is None:
            shape = (*chunk.shape[:dim], self._rows, *chunk.shape[dim + 1 :])
            self._target = jax.lax.empty(shape, chunk.dtype)
        self._target = jax.lax.dynamic_update_slice_in_dim(self._target, chunk, self._filled, axis=dim)
        self._filled += chunk.shape[dim]

    def all(self) -> jax.Array:
        assert self._target is not None
        return self._target


def _split(x: Shaped[Array, "..."], chunking: Chunking) -> list[jax.Array]:
    """Split rows into chunks as equal as possible, none of them empty. Sizes [P, L] stay one chunk."""
    if x.ndim < 3 or not jnp.issubdtype(x.dtype, jnp.inexact):
        return [x]
    rows = x.shape[_SLOTS]
    chunks = max(min(chunking.chunks, rows), 1)
    return jnp.split(x, [rows * i // chunks for i in range(1, chunks)], axis=_SLOTS)


def _pipelined(
    x: Shaped[Array, "..."],
    first: Send,
    second: Send,
    chunking: Chunking,
    collect: Callable[[jax.Array], _ChunkCollector],
) -> Shaped[Array, "..."]:
    """Send rows through two transfers, chunk by chunk.

    `second` of one chunk runs concurrently with `first` of the next.
    """
    head, *others = _split(x, chunking)
    halfway, rows = first(head), collect(x)
    for chunk in others:
        following = first(depend_on(chunk, halfway, chunking.platform))
        # neither is used before both exist: without this XLA:GPU runs one after the other
        arrived, halfway = jax.lax.optimization_barrier((second(halfway), following))
        rows.add(arrived)
    rows.add(second(halfway))
    return rows.all()


def _chunked(collect: Callable[[jax.Array], _ChunkCollector]) -> Form:
    def to_experts(x: Shaped[Array, "P ..."], send: Send, chunking: Chunking) -> Shaped[Array, "tP ..."]:
        return _pipelined(x, send, _gather, chunking, collect)

    def from_experts(x: Shaped[Array, "tP ..."], send: Send, chunking: Chunking) -> Shaped[Array, "P ..."]:
        return _pipelined(x, _sum, send, chunking, collect)

    return Form(to_experts, from_experts)


_WHOLE = Form(Unchunked(_identity, _identity), Unchunked(_identity, _identity))
FORMS = {
    "replicated": Form(Unchunked(_gather_by_target, _by_source), Unchunked(_by_target, _sum_by_target)),
    "sharded": Form(Unchunked(_identity, _gather), Unchunked(_sum, _identity)),
    "sharded_chunked": _chunked(_Concatenated),
    "sharded_overlapped": _chunked(_Filled),
}
