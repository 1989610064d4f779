"""What every optimizer is made of: a function from gradients to updates, and what it knows of each parameter."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax
import optax
from jax.sharding import PartitionSpec

from moe_jax.config import OptimizerConfig
from moe_jax.parallel.ordering import depend_on
from moe_jax.parallel.sharding import REPLICATED, STACKS, Dims, is_matrix, spaces_of
from moe_jax.parallel.trees import Tree

T = TypeVar("T")


@dataclass(frozen=True)
class Matrix:
    """The dimensions of an array of stacked matrices: which ones count matrices, and which are rows or columns."""

    stacked: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, int]:
        """Return the rows and columns of each matrix of an array of shape `whole`."""
        return math.prod(whole[dim] for dim in self.rows), math.prod(whole[dim] for dim in self.columns)


@dataclass(frozen=True)
class Parameter:
    """What an optimizer knows of one array of parameters, which may stack those of several blocks and experts."""

    dims: Dims
    spec: PartitionSpec = REPLICATED  # how gradients and moments are sharded, by ZeRO too
    is_gate: bool = False  # whether it belongs to a gate

    @cached_property
    def unstacked(self) -> tuple[int, ...]:
        """The dimensions of the array of one block and one expert."""
        return tuple(dim for dim, name in enumerate(self.dims) if name not in STACKS)

    @property
    def is_matrix(self) -> bool:
        """Whether it maps one space to another. The kernels of depthwise convolutions do not."""
        return is_matrix(self.dims)

    @property
    def decays(self) -> bool:
        """Whether it has weight decay: matrices and the kernels of convolutions."""
        return self.is_matrix or "taps" in self.dims

    @cached_property
    def matrix(self) -> Matrix | None:
        """The array as matrices, or None: it has vectors, or more than rows and columns."""
        spaces = spaces_of(self.dims)
        if len(spaces) != 2 or "one" in self.dims:
            return None
        rows, columns = spaces
        return Matrix(rows[0], rows, columns)

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it has matrices between hidden layers: neither a gate's nor those of the embedding and the head."""
        return self.matrix is not None and not self.is_gate and "vocab" not in self.dims


# (settings, a tree of `Parameter`, platform) → the transformation from summed gradients to updates of size 1 or so.
# Decay and the learning rate follow it (`step/optimizer.py`). Its state has a tree like the parameters for each kind of
# moment, with arrays of a parameter's shape, or of size 1 in some dimensions. `update` runs inside `shard_map` on this
# device's shards, and its argument `is_good` is false in a bad step, in which moments stay as they are, bit for bit.
Scale = Callable[[OptimizerConfig, Tree, str], optax.GradientTransformationExtraArgs]


def of_parameter(path: tuple[Any, ...], known: Mapping[Any, T]) -> T | None:
    """Return what `known` has for the parameter whose path ends that of an array in the optimizer's state, if any."""
    return next((known[path[first:]] for first in range(len(path)) if path[first:] in known), None)


def unless_bad(is_good: jax.Array, new: Tree, old: Tree) -> Tree:
    """Return the new tree, or the old one, bit for bit, if the step is bad."""
    return jax.tree.map(lambda n, o: jax.numpy.where(is_good, n, o), new, old)


def all_after(last: jax.Array, updates: Tree, platform: str) -> Tree:
    """Return the updates. On CPUs, where a collective blocks its device, none that uses them starts before `last`."""
    return depend_on(updates, last, platform) if platform == "cpu" else updates
