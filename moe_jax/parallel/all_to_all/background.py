"""An exchange on a CPU cluster that runs concurrently with the program: see `parallel.background`."""

from typing import Any

import jax
from jaxtyping import Array, Shaped

from moe_jax.config.facts import ExchangeFacts
from moe_jax.parallel import background
from moe_jax.parallel.ranks import Ranks

FACTS = ExchangeFacts(listed=6, in_background=True, only_starts=True)


def start(x: Shaped[Array, "P ..."], ranks: Ranks) -> tuple[Any, ...]:
    """Send block p to rank p. Returns the shape and dtype of the result, and a handle for it."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return shape, background.start(x, "exchange", ranks.axes)


def start_after(under_way: tuple[Any, ...], ranks: Ranks) -> tuple[Any, ...]:
    """Exchange the blocks that another collective in the background brings, without waiting for them."""
    shape, handle = under_way
    return shape, background.start_after(handle, "exchange", ranks.axes)


def finish(under_way: tuple[Any, ...], ranks: Ranks) -> Shaped[Array, "P ..."]:
    """Wait for the result. Its block p came from rank p."""
    shape, handle = under_way
    return background.finish(handle, shape)
