"""Ragged all-to-all: sizes travel first, then only the rows that exist, each straight into the lane of its expert.

P ranks with L experts each, E = P·L; S rows on the sender, sorted by expert, each in the shape of `row_shape`; D
features. The lane of an expert takes the rows of all sources, one source after another: its first b rows are in `main`,
and the others in `rest`.
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
from moe_jax.parallel.uninitialized import uninitialized

FACTS = ExchangeFacts(listed=5, ragged=True)

_LINE = 128  # features


def row_shape(features: int) -> tuple[int, ...]:
    """Return the shape of a row. Wide rows are stored as lines, so that no two rows share a tile of TPU memory."""
    return (features // _LINE, _LINE) if features % (8 * _LINE) == 0 else (features,)


class Widths(NamedTuple):
    """How many rows each lane has."""

    main: int
    rest: int


class Lanes(NamedTuple):
    """Rows on the rank of their experts. A row that no source filled has arbitrary content, possibly NaN."""

    main_LbD: Float[Array, "L b D"]
    rest_R: Float[Array, "R ..."]  # R = L·w rows as they arrived, one lane after another
    count_PE: Int[Array, "P E"]  # rows from every rank to every expert


def filled(count_PE: Int[Array, "P E"], axis: Axes) -> Int[Array, " L"]:
    """Return how many rows are in the lanes of this rank's experts, `main` and `rest` together."""
    ranks = len(count_PE)
    own_PL = jax.lax.dynamic_index_in_dim(
        count_PE.reshape(ranks, ranks, -1), jax.lax.axis_index(axis), 1, keepdims=False
    )
    return own_PL.sum(axis=0)


def overflows(count_PE: Int[Array, "P E"], main: int) -> Bool[Array, ""]:
    """Return whether any expert of any rank receives more rows than `main`.

    The result is the same on all ranks of the axis.
    """
    return count_PE.sum(axis=0).max() > main


def gather_sizes(count_E: Int[Array, " E"], axis: Axes) -> Int[Array, "P E"]:
    """Return how many rows each rank sends to each expert. All ranks get the whole table."""
    return jax.lax.all_gather(count_E, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def to_lanes(
    rows_S: Float[Array, "S ..."], count_PE: Int[Array, "P E"], widths: Widths, axis: Axes, platform: str
) -> tuple[Float[Array, "L b D"], Float[Array, "R ..."]]:
    """Move each row into the lane of its expert. Rows of the lanes that no source fills are arbitrary."""
    rest = rest_lanes(rows_S, count_PE, widths, axis, platform)
    if rest.size and platform == "tpu":
        # without it XLA:TPU overlaps the transfer of `rest`, which is nearly always empty, instead of this one
        rows_S = depend_on(rows_S, rest, platform)
    main = _received(rows_S, count_PE, 0, widths.main, axis, platform)
    return main.reshape(_experts_per_rank(count_PE), widths.main, math.prod(rows_S.shape[1:])), rest


def rest_lanes(
    rows_S: Float[Array, "S ..."], count_PE: Int[Array, "P E"], widths: Widths, axis: Axes, platform: str
) -> Float[Array, "R ..."]:
    """Move the rows that do not fit in `main`. Not differentiable."""
    return _received(rows_S, count_PE, widths.main, widths.rest, axis, platform)


def _received(rows_S: jax.Array, count_PE: jax.Array, first: int, width: int, axis: Axes, platform: str) -> jax.Array:
    """Return rows `first` … `first` + `width` of all lanes."""
    me, local_experts = jax.lax.axis_index(axis), _experts_per_rank(count_PE)
    own_PE, place_PE = _offsets(count_PE)
    skip_PE, size_PE = _clip_to_range(place_PE, count_PE, first, width)
    lane_E = jnp.tile(jnp.arange(local_experts, dtype=jnp.int32) * width, count_PE.shape[0])
    slices = _Slices(
        start=(own_PE + skip_PE)[me],
        sent=size_PE[me],
        target=lane_E + (place_PE + skip_PE)[me] - first,
        received=_columns_of_rank(size_PE, me),
    )
    move = functools.partial(_move, rows_S, local_experts * width, None, slices, axis, platform)
    return _move_on_overflow(overflows(count_PE, first), move, platform) if first else _in_scope("rows", move)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def from_lanes(
    main_LbD: Float[Array, "L b D"],
    rest_R: Float[Array, "R ..."],
    count_PE: Int[Array, "P E"],
    num_rows: int,
    axis: Axes,
    platform: str,
) -> Float[Array, "S ..."]:
    """Move each row back to where `to_lanes` took it from. Other rows of the result are arbitrary."""
    me, local_experts = jax.lax.axis_index(axis), _experts_per_rank(count_PE)
    own_PE, place_PE = _offsets(count_PE)
    rows_S = None
    main = main_LbD.shape[1]
    main_R = main_LbD.reshape(local_experts * main, *rest_R.shape[1:])
    for first, lanes_R in ((main, rest_R), (0, main_R)):
        width = len(lanes_R) // local_experts
        skip_PE, size_PE = _clip_to_range(place_PE, count_PE, first, width)
        lane_L = jnp.arange(local_experts, dtype=jnp.int32) * width - first
        slices = _Slices(
            start=jnp.tile(lane_L, count_PE.shape[0]) + _columns_of_rank(place_PE + skip_PE, me),
            sent=_columns_of_rank(size_PE, me),
            target=_columns_of_rank(own_PE + skip_PE, me),
            received=size_PE[me],
        )
        move = functools.partial(_move, lanes_R, num_rows, rows_S, slices, axis, platform)
        rows_S = _move_on_overflow(overflows(count_PE, first), move, platform) if first else _in_scope("rows", move)
    assert rows_S is not None
    return rows_S


def _to_lanes_forward(rows_S, count_PE, widths, axis, platform):  # type: ignore[no-untyped-def]
    return to_lanes(rows_S, count_PE, widths, axis, platform), (count_PE, len(rows_S))


def _to_lanes_backward(widths, axis, platform, saved, cotangents):  # type: ignore[no-untyped-def]
    count_PE, num_rows = saved
    return from_lanes(*cotangents, count_PE, num_rows, axis, platform), None


def _from_lanes_forward(main_LbD, rest_R, count_PE, num_rows, axis, platform):  # type: ignore[no-untyped-def]
    widths = Widths(main_LbD.shape[1], len(rest_R) // _experts_per_rank(count_PE))
    return from_lanes(main_LbD, rest_R, count_PE, num_rows, axis, platform), (count_PE, widths)


def _from_lanes_backward(num_rows, axis, platform, saved, cotangent):  # type: ignore[no-untyped-def]
    count_PE, widths = saved
    return *to_lanes(cotangent, count_PE, widths, axis, platform), None


to_lanes.defvjp(_to_lanes_forward, _to_lanes_backward)
from_lanes.defvjp(_from_lanes_forward, _from_lanes_backward)


def _experts_per_rank(count_PE: jax.Array) -> int:
    """Return how many experts a rank has."""
    return count_PE.shape[1] // count_PE.shape[0]


def _offsets(count_PE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return where the rows for each expert begin: among the rows of their source, and in the lane of their expert."""
    return jnp.cumsum(count_PE, axis=1) - count_PE, jnp.cumsum(count_PE, axis=0) - count_PE


def _clip_to_range(place_PE: jax.Array, count_PE: jax.Array, first: int, width: int) -> tuple[jax.Array, jax.Array]:
    """Clip each source's run of rows in a lane to rows `first` … `first` + `width` of the lane.

    Returns how many rows of the run come before this range, and how many are in it.
    """
    begin_PE = jnp.clip(place_PE, first, first + width)
    return begin_PE - place_PE, jnp.clip(place_PE + count_PE, first, first + width) - begin_PE


def _columns_of_rank(x_PE: jax.Array, rank: jax.Array) -> jax.Array:
    """Return the columns of a rank's experts, source by source, as [P · L]."""
    ranks = len(x_PE)
    return jax.lax.dynamic_index_in_dim(x_PE.reshape(ranks, ranks, -1), rank, axis=1, keepdims=False).ravel()


def _move_on_overflow(overflowed: jax.Array, move: Callable[[], jax.Array], platform: str) -> jax.Array:
    """Return the result of `move` if lanes overflow; otherwise it is arbitrary.

    A collective that moves no rows still costs its start-up time. On TPU a branch around it costs more, because it
    prevents the overlap of the collective before it. XLA:CPU would run a collective in a branch concurrently with the
    collectives that follow.
    """
    shape = jax.eval_shape(move)
    overflow = functools.partial(_in_scope, "overflow", move)
    if platform != "gpu":
        return overflow()
    with jax.named_scope("rows"):
        return jax.lax.cond(overflowed, overflow, lambda: jax.lax.empty(shape.shape, shape.dtype))


def _in_scope(name: str, move: Callable[[], jax.Array]) -> jax.Array:
    with jax.named_scope(name):
        return move()


class _Slices(NamedTuple):
    """L slices for each rank. All arrays are [P · L]."""

    start: jax.Array  # in the sender's rows
    sent: jax.Array  # rows
    target: jax.Array  # where they start on the receiver
    received: jax.Array  # rows from each rank


def _move(
    source: jax.Array, num_rows: int, target: jax.Array | None, slices: _Slices, axis: Axes, platform: str
) -> jax.Array:
    """Return `target` with the arriving slices written over it.

    `target` has `num_rows` rows; with None its other rows are arbitrary.
    """
    if target is None:
        # not zeros: writing and copying them costs as much as the exchange
        target = uninitialized((num_rows, *source.shape[1:]), source, slices.start, platform)
    if not target.size or not source.size:
        return target
    if platform == "cpu":
        return _move_dense(source, target, slices, axis)
    return jax.lax.ragged_all_to_all(
        source, target, slices.start, slices.sent, slices.target, slices.received, axis_name=axis
    )


def _move_dense(source: jax.Array, target: jax.Array, slices: _Slices, axis: Axes) -> jax.Array:
    """Do the same with full blocks, for platforms without a ragged collective."""
    ranks, width = jax.lax.axis_size(axis), source.shape[0]
    start, sent, place = (x.reshape(ranks, -1, 1) for x in (slices.start, slices.sent, slices.target))
    row = jnp.arange(width)
    inside = (row >= start) & (row < start + sent)  # [P, L, S]
    target_PS = jnp.min(jnp.where(inside, place + row - start, target.shape[0]), axis=1)
    moved = jax.lax.all_to_all(jnp.broadcast_to(source, (ranks, *source.shape)), axis, 0, 0, tiled=True)
    arrived_PS = jax.lax.all_to_all(target_PS, axis, 0, 0, tiled=True)
    return target.at[arrived_PS.ravel()].set(moved.reshape(ranks * width, *source.shape[1:]), mode="drop")
