"""Newton-Schulz iterations, which make a matrix nearly orthogonal by matrix products alone.

Jordan et al. 2024, Muon. Five iterations move all singular values to between 0.7 and 1.2 or so, except tiny ones.

n matrices [r, c].
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x³ and x⁵, where x is a singular value
_EPS = 1e-7  # added to the norm, so that zeros stay zeros
_NUMBERS_AT_ONCE = 2**26  # of the matrices that are in memory in several copies at a time


def orthogonalized(x_nrc: Float[Array, "n r c"], steps: int) -> Float[Array, "n r c"]:
    """Return the matrices after so many iterations, whose products have operands of the type of the matrices."""
    _, r, c = x_nrc.shape
    if r > c:  # the square matrices of an iteration have the size of the rows
        return orthogonalized(x_nrc.swapaxes(1, 2), steps).swapaxes(1, 2)
    at_once = max(1, _NUMBERS_AT_ONCE // (r * c))
    if len(x_nrc) <= at_once:
        return _orthogonalized(x_nrc, steps)
    return jax.lax.map(lambda x_rc: _orthogonalized(x_rc[None], steps)[0], x_nrc, batch_size=at_once)


def _orthogonalized(x_nrc: jax.Array, steps: int) -> jax.Array:
    a, b, c = COEFFICIENTS
    exact_nrc = x_nrc.astype(jnp.float32)
    norm_n11 = jnp.sqrt(jnp.square(exact_nrc).sum(axis=(1, 2), keepdims=True))
    x_nrc = (exact_nrc / (norm_n11 + _EPS)).astype(x_nrc.dtype)
    for _ in range(steps):
        gram_nrr = _product("nrc,nsc->nrs", x_nrc, x_nrc)
        both_nrr = b * gram_nrr + c * _product("nrs,nst->nrt", gram_nrr, gram_nrr)
        x_nrc = a * x_nrc + _product("nrs,nsc->nrc", both_nrr, x_nrc)
    return x_nrc


def _product(dims: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return a product whose sums are float32, as an array of the type of its operands."""
    precision = "highest" if x.dtype == jnp.float32 else None  # else float32 means fewer bits on TPUs
    return jnp.einsum(dims, x, y, precision=precision, preferred_element_type=jnp.float32).astype(x.dtype)
