"""Beside the program, on a CPU cluster: see `parallel.background`."""

from typing import Any

import jax
from jaxtyping import Array, Shaped

from moe_jax.config.facts import ExchangeFacts
from moe_jax.parallel import background
from moe_jax.parallel.ranks import Ranks

FACTS = ExchangeFacts(listed=6, in_background=True, only_starts=True)


def start(x: Shaped[Array, "P ..."], ranks: Ranks) -> tuple[Any, ...]:
    """Send block p to rank p. Returns the result's shape and dtype, and a ticket."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return shape, background.start(x, "exchange", ranks.axes)


def finish(under_way: tuple[Any, ...], ranks: Ranks) -> Shaped[Array, "P ..."]:
    """Block p of the result came from rank p."""
    shape, ticket = under_way
    return background.finish(ticket, shape)
