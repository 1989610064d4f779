"""Memory that an operation is about to write, allocated no earlier than it is needed."""

from collections.abc import Sequence

import jax
from jaxtyping import Array, Shaped

KERNEL = "uninitialized"  # its name in compiled programs


def uninitialized(shape: Sequence[int], like: Shaped[Array, "..."], platform: str) -> Shaped[Array, "..."]:
    """Return an array of any values, of the type of `like`, that does not exist before `like` does.

    `jax.lax.empty` has no operand, so XLA:TPU allocates it as early as it likes: in a step of four blocks, a dozen
    buffers of exchanges thousands of instructions ahead of these. A kernel that writes nothing is an operation with an
    operand.
    """
    if platform != "tpu":
        return jax.lax.empty(shape, like.dtype)
    from jax.experimental import pallas as pl  # takes a second, which other platforms do not need
    from jax.experimental.pallas import tpu as pltpu

    anywhere = pl.BlockSpec(memory_space=pl.ANY)  # neither the operand nor the result is moved
    allocate = pl.pallas_call(
        lambda like_ref, result_ref: None,
        out_shape=jax.ShapeDtypeStruct(shape, like.dtype),
        in_specs=[anywhere],
        out_specs=anywhere,
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0),
        name=KERNEL,
        compiler_params=pltpu.CompilerParams(has_side_effects=True),  # or two alike are one, which is then copied
    )
    return allocate(jax.lax.stop_gradient(like))
