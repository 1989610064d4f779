"""A codec that sends rows as 8-bit floats (e4m3, Micikevicius et al. 2022) with a scale each, and cotangents as
bfloat16.

With s = max |x| / 448 of a row, the error of x is at most max(|x| / 16, s / 1024): half a step of 3 bits of mantissa,
or of the smallest number. A row with a number that is not finite becomes NaN. P expert ranks, D model width, B = D + 4
bytes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from moe_jax.config.facts import HooksFacts
from moe_jax.models.hooks.bf16 import CODEC as BF16
from moe_jax.models.hooks.protocol import Hooks, WireCodec

FACTS = HooksFacts(listed=1, row_item_bytes=1)

_LARGEST = 448.0
_SCALE_BYTES = 4


def encode(rows: Float[Array, "P ... D"]) -> UInt8[Array, "P ... B"]:
    """Return each row's numbers and then its scale, in one array, so that one exchange sends both."""
    x = rows.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / _LARGEST
    scale = jnp.where(scale == 0, 1.0, scale)
    numbers = jax.lax.bitcast_convert_type((x / scale).astype(jnp.float8_e4m3fn), jnp.uint8)
    return jnp.concatenate([numbers, jax.lax.bitcast_convert_type(scale[..., 0], jnp.uint8)], axis=-1)


def decode(packed: UInt8[Array, "P ... B"], dtype: jax.typing.DTypeLike) -> Float[Array, "P ... D"]:
    """Return the rounded rows."""
    numbers, scale = packed[..., :-_SCALE_BYTES], packed[..., -_SCALE_BYTES:]
    x = jax.lax.bitcast_convert_type(numbers, jnp.float8_e4m3fn).astype(jnp.float32)
    return (x * jax.lax.bitcast_convert_type(scale, jnp.float32)[..., None]).astype(dtype)


_ROWS = WireCodec(encode, decode)
HOOKS: Hooks = Hooks(dispatch=_ROWS, combine=_ROWS, dispatch_backward=BF16, combine_backward=BF16)
