"""Memory that an operation is about to write, allocated no earlier than it is needed."""

from collections.abc import Sequence

import jax
from jaxtyping import Array, Shaped


def uninitialized(
    shape: Sequence[int], like: Shaped[Array, "..."], user: Shaped[Array, "..."], platform: str
) -> Shaped[Array, "..."]:
    """Return an array of any values, of the type of `like`, that does not exist before `like` does.

    `jax.lax.empty` has no operand, so XLA:TPU allocates it as early as it likes: in a step of four blocks, a dozen
    buffers of exchanges thousands of instructions ahead of these. A kernel that writes nothing is an operation with an
    operand. `user` is an array of the operation that writes the memory, and of no other one: XLA would take two kernels
    with the same operands for one, and copy its result. (It takes none with side effects for another, but then copies
    whole parameters elsewhere.)
    """
    if platform != "tpu":
        return jax.lax.empty(shape, like.dtype)
    from jax.experimental import pallas as pl  # takes a second, which other platforms do not need

    anywhere = pl.BlockSpec(memory_space=pl.ANY)  # neither the operands nor the result are moved
    allocate = pl.pallas_call(
        lambda like_ref, user_ref, result_ref: None,
        out_shape=jax.ShapeDtypeStruct(shape, like.dtype),
        in_specs=[anywhere, anywhere],
        out_specs=anywhere,
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0),
        name="uninitialized",  # `measure.costs` knows it by this name
    )
    return allocate(jax.lax.stop_gradient(like), user.reshape(1, -1))  # a vector would need a TPU to be lowered
