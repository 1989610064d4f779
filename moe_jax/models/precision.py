"""The precision of matrix products."""

from contextlib import AbstractContextManager, nullcontext

import jax


def exact_products(dtype: str, platform: str) -> AbstractContextManager[object]:
    """Return a context in which a program that computes in `dtype` is traced, so that float32 products are exact.

    TPUs would round operands to bfloat16. GPUs round them to TF32, as is usual there.
    """
    if dtype == "float32" and platform == "tpu":
        return jax.default_matmul_precision("highest")
    return nullcontext()
