"""A codec that sends rows and their cotangents as bfloat16."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt16

from moe_jax.config.facts import HooksFacts
from moe_jax.models.hooks.protocol import Hooks, WireCodec

FACTS = HooksFacts(listed=0, row_item_bytes=2)


def encode(rows: Float[Array, "P ... D"]) -> UInt16[Array, "P ... D"]:
    """Return the rows rounded to bfloat16, as bits: XLA:CPU would send the numbers as float32."""
    return jax.lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)


def decode(bits: UInt16[Array, "P ... D"], dtype: jax.typing.DTypeLike) -> Float[Array, "P ... D"]:
    """Return the rounded rows."""
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(dtype)


CODEC: WireCodec = WireCodec(encode, decode)
HOOKS: Hooks = Hooks(dispatch=CODEC, combine=CODEC, dispatch_backward=CODEC, combine_backward=CODEC)
