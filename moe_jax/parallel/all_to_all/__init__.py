"""Algorithms that exchange blocks of rows between the ranks of a mesh axis: one file each, one signature.

`start` sends block p to rank p and returns what is in flight. `finish` assembles the blocks that arrived: block p of
the result came from rank p. The two together are their own inverse and their own transpose.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from moe_jax.config import registry
from moe_jax.config.plugins import load_part, place_of
from moe_jax.errors import ConfigError
from moe_jax.parallel.ranks import Ranks

# what `start` returns and `finish` takes: the last entry is the array that arrives last, the others are whatever else
# `finish` needs
UnderWay = tuple[Any, ...]


class Exchange(NamedTuple):
    """An exchange algorithm in two halves. Other work can run between them."""

    start: Callable[[jax.Array, Ranks], UnderWay]
    finish: Callable[[UnderWay, Ranks], jax.Array]
    only_starts: bool = False  # whether `start` only submits the rows and returns before anything has arrived
    # like `start`, of the result of another collective in flight; None: that has to be finished first
    start_after: Callable[[UnderWay, Ranks], UnderWay] | None = None

    def __call__(self, x: jax.Array, ranks: Ranks) -> jax.Array:
        """Run both halves."""
        return _both(self, ranks, x)

    def bind(self, ranks: Ranks) -> Callable[[jax.Array], jax.Array]:
        """Return both halves as a function of the rows alone."""
        return lambda x: self(x, ranks)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _both(exchange: Exchange, ranks: Ranks, x: jax.Array) -> jax.Array:
    return exchange.finish(exchange.start(x, ranks), ranks)


def _forward(exchange: Exchange, ranks: Ranks, x: jax.Array) -> tuple[jax.Array, None]:
    return _both(exchange, ranks, x), None


def _backward(exchange: Exchange, ranks: Ranks, _: None, dx: jax.Array) -> tuple[jax.Array | None]:
    return (_both(exchange, ranks, dx) if jnp.issubdtype(dx.dtype, jnp.floating) else None,)


_both.defvjp(_forward, _backward)

EXCHANGES = {
    name: Exchange(
        module.start,
        module.finish,
        registry.EXCHANGE_FACTS[name].only_starts,
        getattr(module, "start_after", None),
    )
    for name, module in registry.EXCHANGE_FACTS.modules().items()
    if not registry.EXCHANGE_FACTS[
        name
    ].ragged  # a ragged exchange also sends the sizes of its rows, so its signature differs
}
RAGGED = tuple(name for name in registry.EXCHANGE_FACTS if name not in EXCHANGES)
BY_NODE = tuple(name for name, facts in registry.EXCHANGE_FACTS.items() if facts.by_node)


def exchange_named(algorithm: str) -> Exchange:
    """Return the exchange that a config names.

    Raises ConfigError for an unknown name, for `auto` and for `ragged`.
    """
    exchange = load_part("exchange.algorithm", algorithm, EXCHANGES)
    if not isinstance(exchange, Exchange):
        raise ConfigError(
            f"exchange.algorithm={algorithm} is of type {type(exchange).__name__}: "
            "name a moe_jax.parallel.all_to_all.Exchange"
        )
    return exchange


def check_exchange(algorithm: str, ranks: Ranks, mesh: Mesh) -> None:
    """Raise ConfigError unless rows arrive in the shape and type in which they were sent."""
    exchange, size = exchange_named(algorithm), math.prod(mesh.shape[axis] for axis in ranks.axes)
    rows, spec = jax.ShapeDtypeStruct((size**2, 3), jnp.bfloat16), PartitionSpec(ranks.axis)
    try:
        sent = jax.shard_map(exchange.bind(ranks), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        arrived = jax.eval_shape(sent, rows)
    except Exception as error:  # raised by functions from outside the project
        message = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ConfigError(
            f"exchange.algorithm={algorithm} cannot be traced on {size} ranks ({message}){place_of(error)}: fix it"
        ) from error
    if not isinstance(arrived, jax.ShapeDtypeStruct):
        raise ConfigError(
            f"exchange.algorithm={algorithm} makes {type(arrived).__name__} of rows: finish must return one array"
        )
    if (arrived.shape, arrived.dtype) != (rows.shape, rows.dtype):
        forms = [f"{x.dtype}[{x.shape[0] // size}, {', '.join(map(str, x.shape[1:]))}]" for x in (arrived, rows)]
        raise ConfigError(
            f"exchange.algorithm={algorithm} makes {forms[0]} of {forms[1]} on {size} ranks: it must be the same"
        )
