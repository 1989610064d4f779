"""The largest attention logit of each head, which QK-clip reads (`optimizer.qk_clip`).

Logits are computed again, in tiles, whichever kernel computes attention, since none returns its largest one. It is over
all pairs of a query and a key that it sees, but those of queries that are padding. It has no gradient.

B sequences of L tokens, of which n are of this context rank; H heads of queries, K width of queries and keys.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.models.attention import tiles
from moe_jax.models.attention.core import AttentionImpl
from moe_jax.models.attention.over_context import MAX_LOGITS
from moe_jax.models.attention.tile_products import TileInputs, by_group, no_logits, with_largest
from moe_jax.parallel.context import context_ranks
from moe_jax.parallel.ordering import depend_on

KeysOf = Callable[[Any], jax.Array]  # keys [B, n, G, K], or what they are computed from → keys


def with_max_logits(
    out_BnHV: Float[Array, "B n H V"],
    query_BnHK: Float[Array, "B n H K"],
    sent: Any,
    keys_of: KeysOf,
    document_BL: Int[Array, "B L"] | None,
    window: int | None,
    scale: float,
    impl: AttentionImpl,
) -> tuple[Float[Array, "B n H V"], Float[Array, " H"] | None]:
    """Return the outputs of attention, and the largest logit of each head over this rank's queries if `impl` asks.

    `keys_of(sent)` are this rank's keys; `sent` is what context ranks exchange. On CPUs that begins after attention's
    own exchange, and ends before anything that reads the outputs, since two collectives must not meet there.
    """
    if not impl.max_logits:
        return out_BnHV, None
    query_BnHK, sent, last = jax.lax.stop_gradient((query_BnHK, sent, out_BnHV))
    with jax.named_scope("max_logits"):
        if context_ranks() == 1:
            key_BnGK = jax.lax.stop_gradient(keys_of(sent))
            return out_BnHV, _of_sequence(query_BnHK, key_BnGK, document_BL, window, scale)
        if impl.platform == "cpu":
            sent = depend_on(sent, last, "cpu")
        largest_H = MAX_LOGITS[impl.context_form](query_BnHK, sent, keys_of, document_BL, window, scale)
    return depend_on(out_BnHV, largest_H, "cpu") if impl.platform == "cpu" else out_BnHV, largest_H


def _of_sequence(
    query_BNHK: jax.Array, key_BNGK: jax.Array, document_BN: jax.Array | None, window: int | None, scale: float
) -> Float[Array, " H"]:
    """Return the largest logits where all tokens of a sequence are on one rank; it is padded to whole tiles."""
    length = query_BNHK.shape[1]
    tile, pairs_P2 = tiles.of_sequence(length, window, tiles.TILE)
    padding = -length % tile

    def padded(x: jax.Array, value: int = 0) -> jax.Array:
        widths = [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, widths, constant_values=value) if padding else x

    position_N = jnp.arange(length + padding)
    query_N = jnp.where(position_N < length, position_N, -1)  # those that fill up tiles see no key
    documents = None if document_BN is None else (padded(document_BN, -1),) * 2
    query, key = by_group(padded(query_BNHK), key_BNGK), padded(key_BNGK)
    pairs_P2, positions, query = jax.lax.optimization_barrier((jnp.asarray(pairs_P2), (query_N, position_N), query))
    inputs = TileInputs(query, key, key, pairs_P2, positions, documents, tile, window, scale)
    return with_largest(no_logits(query), inputs).reshape(-1)
