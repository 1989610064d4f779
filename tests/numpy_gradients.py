"""Gradients of the slow references: autograd differentiates numpy, in float64. Nothing is compiled, jax takes no part.

References call `autograd.numpy` where gradients pass, and numpy where they decide.
"""

from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import jax
import numpy as np
from autograd.core import make_vjp
from autograd.tracer import getval


def value_and_grad(function: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[tuple[float, Any], Any]]:
    """Return a function of a tree of arrays, and more: (value, the rest of what `function` returns), gradients."""

    def run(tree: Any, *more: Any) -> tuple[tuple[float, Any], Any]:
        leaves, structure = jax.tree.flatten(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree))
        rest = None

        def of_leaves(leaves: Any) -> Any:
            nonlocal rest
            value, rest = function(structure.unflatten([leaves[n] for n in range(structure.num_leaves)]), *more)
            return value

        back, value = make_vjp(of_leaves, tuple(leaves))
        return (value, jax.tree.map(fixed, rest)), structure.unflatten(back(1.0))

    return run


def fixed(x: Any) -> np.ndarray:
    """As numbers that nothing is differentiated through."""
    return np.asarray(getval(x))


def softmax(x: Any, axis: int = -1) -> Any:
    exp = anp.exp(x - fixed(x).max(axis, keepdims=True))
    return exp / exp.sum(axis, keepdims=True)


def log_softmax(x: Any) -> Any:
    shifted = x - fixed(x).max(-1, keepdims=True)
    return shifted - anp.log(anp.exp(shifted).sum(-1, keepdims=True))


def sigmoid(x: Any) -> Any:
    return 1 / (1 + anp.exp(-x))


def silu(x: Any) -> Any:
    return x * sigmoid(x)


def gelu(x: Any) -> Any:
    """Its approximation by tanh."""
    return x / 2 * (1 + anp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
