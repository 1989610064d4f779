"""Ragged all-to-all: sizes first, then only the rows that exist, straight into a lane for each expert.

P ranks with L experts each, E = P·L; S rows at the sender, sorted by expert, each in the shape of `row_shape`; D
features. An expert's lane takes the rows of all sources, one source behind the other: the first b in `main`, what is
more in `rest`.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.config.facts import ExchangeFacts
from moe_jax.parallel.mesh import Axes
from moe_jax.parallel.ordering import depend_on

FACTS = ExchangeFacts(listed=5, ragged=True)

_LINE = 128  # features


def row_shape(features: int) -> tuple[int, ...]:
    """A row of many features as lines, so that no two rows share a tile of a TPU's memory."""
    return (features // _LINE, _LINE) if features % (8 * _LINE) == 0 else (features,)


class Widths(NamedTuple):
    """Rows of each lane."""

    main: int
    rest: int


class Lanes(NamedTuple):
    """Rows at the experts' rank; a row that no source filled can be anything, even NaN."""

    main_LbD: Float[Array, "L b D"]
    rest_R: Float[Array, "R ..."]  # R = L·w rows as they arrived, one lane behind the other
    count_PE: Int[Array, "P E"]  # rows from every rank to every expert


def filled(count_PE: Int[Array, "P E"], axis: Axes) -> Int[Array, " L"]:
    """Rows in the lanes of this rank's experts, both kinds."""
    ranks = len(count_PE)
    own_PL = jax.lax.dynamic_index_in_dim(
        count_PE.reshape(ranks, ranks, -1), jax.lax.axis_index(axis), 1, keepdims=False
    )
    return own_PL.sum(axis=0)


def overflows(count_PE: Int[Array, "P E"], main: int) -> Bool[Array, ""]:
    """Whether any expert of any rank gets more rows than find room in its lane: the same on all ranks of the axis."""
    return count_PE.sum(axis=0).max() > main


def gather_sizes(count_E: Int[Array, " E"], axis: Axes) -> Int[Array, "P E"]:
    """How many rows each rank sends to each expert, known to all."""
    return jax.lax.all_gather(count_E, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def to_lanes(
    rows_S: Float[Array, "S ..."], count_PE: Int[Array, "P E"], widths: Widths, axis: Axes, platform: str
) -> tuple[Float[Array, "L b D"], Float[Array, "R ..."]]:
    """Each row in its expert's lane; other rows can be anything."""
    rest = rest_lanes(rows_S, count_PE, widths, axis, platform)
    if rest.size and platform == "tpu":
        # else XLA:TPU hides the rare rows, and not these
        rows_S = depend_on(rows_S, rest, platform)
    main = _received(rows_S, count_PE, 0, widths.main, axis, platform)
    return main.reshape(_held(count_PE), widths.main, math.prod(rows_S.shape[1:])), rest


def rest_lanes(
    rows_S: Float[Array, "S ..."], count_PE: Int[Array, "P E"], widths: Widths, axis: Axes, platform: str
) -> Float[Array, "R ..."]:
    """The rows that find no room in `main`; not to be differentiated."""
    return _received(rows_S, count_PE, widths.main, widths.rest, axis, platform)


def _received(rows_S: jax.Array, count_PE: jax.Array, low: int, width: int, axis: Axes, platform: str) -> jax.Array:
    """Places low … low + width of all lanes."""
    me, held = jax.lax.axis_index(axis), _held(count_PE)
    own_PE, place_PE = _places(count_PE)
    skip_PE, size_PE = _inside(place_PE, count_PE, low, width)
    lane_E = jnp.tile(jnp.arange(held, dtype=jnp.int32) * width, count_PE.shape[0])
    slices = _Slices(
        start=(own_PE + skip_PE)[me],
        sent=size_PE[me],
        target=lane_E + (place_PE + skip_PE)[me] - low,
        received=_of_rank(size_PE, me),
    )
    move = functools.partial(_move, rows_S, held * width, None, slices, axis, platform)
    return _rarely(overflows(count_PE, low), move, platform) if low else _in_scope("rows", move)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def from_lanes(
    main_LbD: Float[Array, "L b D"],
    rest_R: Float[Array, "R ..."],
    count_PE: Int[Array, "P E"],
    num_rows: int,
    axis: Axes,
    platform: str,
) -> Float[Array, "S ..."]:
    """Each row back where `to_lanes` took it from; other rows can be anything."""
    me, held = jax.lax.axis_index(axis), _held(count_PE)
    own_PE, place_PE = _places(count_PE)
    rows_S = None
    main = main_LbD.shape[1]
    main_R = main_LbD.reshape(held * main, *rest_R.shape[1:])
    for low, lanes_R in ((main, rest_R), (0, main_R)):
        width = len(lanes_R) // held
        skip_PE, size_PE = _inside(place_PE, count_PE, low, width)
        lane_L = jnp.arange(held, dtype=jnp.int32) * width - low
        slices = _Slices(
            start=jnp.tile(lane_L, count_PE.shape[0]) + _of_rank(place_PE + skip_PE, me),
            sent=_of_rank(size_PE, me),
            target=_of_rank(own_PE + skip_PE, me),
            received=size_PE[me],
        )
        move = functools.partial(_move, lanes_R, num_rows, rows_S, slices, axis, platform)
        rows_S = _rarely(overflows(count_PE, low), move, platform) if low else _in_scope("rows", move)
    assert rows_S is not None
    return rows_S


def _to_lanes_forward(rows_S, count_PE, widths, axis, platform):  # type: ignore[no-untyped-def]
    return to_lanes(rows_S, count_PE, widths, axis, platform), (count_PE, len(rows_S))


def _to_lanes_backward(widths, axis, platform, saved, cotangents):  # type: ignore[no-untyped-def]
    count_PE, num_rows = saved
    return from_lanes(*cotangents, count_PE, num_rows, axis, platform), None


def _from_lanes_forward(main_LbD, rest_R, count_PE, num_rows, axis, platform):  # type: ignore[no-untyped-def]
    widths = Widths(main_LbD.shape[1], len(rest_R) // _held(count_PE))
    return from_lanes(main_LbD, rest_R, count_PE, num_rows, axis, platform), (count_PE, widths)


def _from_lanes_backward(num_rows, axis, platform, saved, cotangent):  # type: ignore[no-untyped-def]
    count_PE, widths = saved
    return *to_lanes(cotangent, count_PE, widths, axis, platform), None


to_lanes.defvjp(_to_lanes_forward, _to_lanes_backward)
from_lanes.defvjp(_from_lanes_forward, _from_lanes_backward)


def _held(count_PE: jax.Array) -> int:
    """Experts of a rank."""
    return count_PE.shape[1] // count_PE.shape[0]


def _places(count_PE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the rows for each expert begin: among those of their source, and in their expert's lane."""
    return jnp.cumsum(count_PE, axis=1) - count_PE, jnp.cumsum(count_PE, axis=0) - count_PE


def _inside(place_PE: jax.Array, count_PE: jax.Array, low: int, width: int) -> tuple[jax.Array, jax.Array]:
    """Which rows of each run lie in places low … low + width: how many come before them, and how many they are."""
    begin_PE = jnp.clip(place_PE, low, low + width)
    return begin_PE - place_PE, jnp.clip(place_PE + count_PE, low, low + width) - begin_PE


def _of_rank(x_PE: jax.Array, rank: jax.Array) -> jax.Array:
    """The columns of a rank's experts, source by source [P · L]."""
    ranks = len(x_PE)
    return jax.lax.dynamic_index_in_dim(x_PE.reshape(ranks, ranks, -1), rank, axis=1, keepdims=False).ravel()


def _rarely(happened: jax.Array, move: Callable[[], jax.Array], platform: str) -> jax.Array:
    """What `move` brings if it has anything to do; else anything.

    A collective that moves no rows still costs its start-up. On TPU a branch around it costs more: nothing hides the
    collective before. XLA:CPU would run a collective in a branch concurrently with those that follow.
    """
    shape = jax.eval_shape(move)
    overflow = functools.partial(_in_scope, "overflow", move)
    if platform != "gpu":
        return overflow()
    with jax.named_scope("rows"):
        return jax.lax.cond(happened, overflow, lambda: jax.lax.empty(shape.shape, shape.dtype))


def _in_scope(name: str, move: Callable[[], jax.Array]) -> jax.Array:
    with jax.named_scope(name):
        return move()


class _Slices(NamedTuple):
    """L slices for each rank, all [P · L]."""

    start: jax.Array  # in the sender's rows
    sent: jax.Array  # rows
    target: jax.Array  # where the receiver puts them
    received: jax.Array  # rows from each rank


def _move(
    source: jax.Array, num_rows: int, target: jax.Array | None, slices: _Slices, axis: Axes, platform: str
) -> jax.Array:
    """`target` (None: anything) of `num_rows` rows with the slices that arrive written over it."""
    if target is None:
        # not zeros: filling and copying them costs as much as the exchange
        target = jax.lax.empty((num_rows, *source.shape[1:]), source.dtype)
    if not target.size or not source.size:
        return target
    if platform == "cpu":
        return _move_dense(source, target, slices, axis)
    return jax.lax.ragged_all_to_all(
        source, target, slices.start, slices.sent, slices.target, slices.received, axis_name=axis
    )


def _move_dense(source: jax.Array, target: jax.Array, slices: _Slices, axis: Axes) -> jax.Array:
    """The same rows in full blocks, for platforms without a ragged collective."""
    ranks, width = jax.lax.axis_size(axis), source.shape[0]
    start, sent, place = (x.reshape(ranks, -1, 1) for x in (slices.start, slices.sent, slices.target))
    row = jnp.arange(width)
    inside = (row >= start) & (row < start + sent)  # [P, L, S]
    target_PS = jnp.min(jnp.where(inside, place + row - start, target.shape[0]), axis=1)
    moved = jax.lax.all_to_all(jnp.broadcast_to(source, (ranks, *source.shape)), axis, 0, 0, tiled=True)
    arrived_PS = jax.lax.all_to_all(target_PS, axis, 0, 0, tiled=True)
    return target.at[arrived_PS.ravel()].set(moved.reshape(ranks * width, *source.shape[1:]), mode="drop")
