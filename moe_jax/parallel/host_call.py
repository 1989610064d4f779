"""Python functions that a program on CPU calls with its arrays, without a copy.

`jax.pure_callback` first puts the arguments on a device, on a thread of a pool whose threads may all be waiting in such
calls.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

host_call_p = Primitive("host_call")


def call(function: Callable[..., np.ndarray], result: jax.ShapeDtypeStruct, *operands: jax.Array) -> jax.Array:
    """Call `function` with the operands as NumPy arrays when the program reaches this point. It must not store them.

    XLA may call it later, again or not at all, as far as the results of the program allow.
    """
    return host_call_p.bind(*operands, function=function, result=result)


@host_call_p.def_abstract_eval
def _abstract(*_: Any, function: Any, result: jax.ShapeDtypeStruct) -> Any:
    return jax.core.ShapedArray(result.shape, result.dtype)


def _lower(context: Any, *operands: Any, function: Callable[..., np.ndarray], result: Any) -> Any:
    results, _, _ = mlir.emit_python_callback(
        context,
        lambda *arrays: (function(*arrays),),
        None,
        list(operands),
        context.avals_in,
        context.avals_out,
        has_side_effect=False,
        returns_token=False,
    )
    return results


mlir.register_lowering(host_call_p, _lower, platform="cpu")
