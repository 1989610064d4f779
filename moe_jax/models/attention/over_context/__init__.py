"""How the queries of one context rank attend to the tokens of all ranks: one file for each form."""

from collections.abc import Callable

import jax

from moe_jax.models.attention.over_context import all_gather, ring

# query [B, n, H, K], (key [B, n, G, K], value [B, n, G, V]) or what `make` computes them from, weights of `make`,
# sink [H] or None, documents [B, N] of all ranks' tokens or None, make or None, window, scale → outputs [B, n, H, V]
FORMS: dict[str, Callable[..., jax.Array]] = {"ring": ring.values, "all_gather": all_gather.values}
# query [B, n, H, K], what travels, its function that returns keys, documents, window, scale → largest logits [H]
MAX_LOGITS: dict[str, Callable[..., jax.Array]] = {"ring": ring.max_logits, "all_gather": all_gather.max_logits}
