"""One all-to-all over the whole axis."""

import jax
from jaxtyping import Array, Shaped

from moe_jax.config.facts import ExchangeFacts
from moe_jax.parallel.ranks import Ranks

FACTS = ExchangeFacts(listed=0)


def start(x: Shaped[Array, "P ..."], ranks: Ranks) -> tuple[jax.Array, ...]:
    """Send block p to rank p."""
    if ranks.size() == 1:
        return (x,)
    return (jax.lax.all_to_all(x, ranks.axis, split_axis=0, concat_axis=0, tiled=True),)


def finish(under_way: tuple[jax.Array, ...], ranks: Ranks) -> Shaped[Array, "P ..."]:
    """Return the result. Its block p came from rank p."""
    return under_way[0]
