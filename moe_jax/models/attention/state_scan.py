"""Scans of layers that have states, over the tokens of sequences: one token after another, or chunk by chunk.

Tokens are a named tuple of arrays [B, N, …], with `document_BN` among them: a document begins with states of 0. A step
takes the states and a token or a chunk, and returns the new states and the outputs.

B sequences of N tokens, G groups of J heads, C tokens of a chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Scanned = tuple[jax.Array, jax.Array]  # outputs [B, N, …], and the states after the last token


class Decays(NamedTuple):
    """What remains of states and inputs between tokens of a chunk; 0 across documents."""

    between_BGJCC: Float[Array, "B G J C C"]  # at each token (row) of the input of each earlier one, and of its own
    from_before_BGJC: Float[Array, "B G J C"]  # at each token of the state before the chunk
    to_end_BGJC: Float[Array, "B G J C"]  # at the end of the chunk of each token's input


def scan_tokens(
    step: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]], tokens: Any, state: jax.Array, document_B: jax.Array
) -> Scanned:
    """Scan token by token: the definition. `document_B` is the document of the token before the first one."""

    def through_token(carry: tuple[jax.Array, jax.Array], token: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        state, before_B = carry
        same_B = (token.document_BN == before_B).reshape(-1, *[1] * (state.ndim - 1))
        state, out = step(jnp.where(same_B, state, 0), token)
        return (state, token.document_BN), out

    in_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    (state, _), out_N = jax.lax.scan(through_token, (state, document_B), in_time)
    return jnp.moveaxis(out_N, 0, 1), state


def scan_chunks(
    step: Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, jax.Array]],
    tokens: Any,
    state: jax.Array,
    document_B: jax.Array,
    chunk: int,
) -> Scanned:
    """Scan chunk by chunk. The step also takes the documents of the tokens before the chunk.

    The last chunk is filled with tokens of zeros, in the last document: they must not change the states.
    """
    length = tokens.document_BN.shape[1]
    chunk = min(chunk, length)
    chunks = -(-length // chunk)

    def cut(x: jax.Array) -> jax.Array:
        """Pad to whole chunks, and put the chunks first."""
        mode = "edge" if jnp.issubdtype(x.dtype, jnp.integer) else "constant"
        x = jnp.pad(x, [(0, 0), (0, chunks * chunk - length)] + [(0, 0)] * (x.ndim - 2), mode=mode)
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, chunk, *x.shape[2:]), 1, 0)

    def through_chunk(carry: tuple[jax.Array, jax.Array], tokens: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        state, before_B = carry
        state, out = step(state, tokens, before_B)
        return (state, tokens.document_BN[:, -1]), out

    (state, _), out = jax.lax.scan(through_chunk, (state, document_B), jax.tree.map(cut, tokens))
    joined = jnp.moveaxis(out, 0, 1).reshape(out.shape[1], chunks * chunk, *out.shape[3:])
    return joined[:, :length], state


def only_first(tokens: Any, count_B: Int[Array, " B"]) -> Any:
    """Return the tokens with zeros in place of all but the first `count_B` of each sequence: they change no states."""
    counts_BN = jnp.arange(tokens.document_BN.shape[1]) < count_B[:, None]

    def kept(x: jax.Array) -> jax.Array:
        return jnp.where(counts_BN.reshape(*counts_BN.shape, *[1] * (x.ndim - 2)), x, 0)

    return jax.tree.map(kept, tokens)._replace(document_BN=tokens.document_BN)


def decays_of(
    log_decay_BCGJ: Float[Array, "B C G J"], document_BC: Int[Array, "B C"], before_B: Int[Array, " B"]
) -> Decays:
    """Return the decays of a chunk from those of its tokens; `before_B` is the document of the token before it."""
    total_BGJC = jnp.moveaxis(jnp.cumsum(log_decay_BCGJ, axis=1), 1, 3)
    sees_BCC = (document_BC[:, :, None] == document_BC[:, None]) & jnp.tri(document_BC.shape[1], dtype=bool)
    return Decays(
        _exp(total_BGJC[..., :, None] - total_BGJC[..., None, :], sees_BCC[:, None, None]),
        _exp(total_BGJC, (document_BC == before_B[:, None])[:, None, None]),
        _exp(total_BGJC[..., -1:] - total_BGJC, (document_BC == document_BC[:, -1:])[:, None, None]),
    )


def _exp(x: jax.Array, where: jax.Array) -> jax.Array:
    """Return exp(x) where a mask is true, and 0 elsewhere, where x may be large."""
    return jnp.where(where, jnp.exp(jnp.where(where, x, 0)), 0)
