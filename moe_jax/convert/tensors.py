"""Table rows that map a Hugging Face tensor to one of our arrays, and copies in both directions.

A row lists the tensor's axes in terms of our dimensions: `heads.head model` has rows of heads times their width. This
determines transpositions and stacks. A row for a part of a tensor, such as the keys in a tensor of keys and values,
has ranges along one of the dimensions, or is a part of the first axis.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

Sizes = Mapping[str, int]  # the sizes of our dimensions
Index = Mapping[str, range]  # a part of one of our arrays, as a range of each dimension


class ReadableTensor(Protocol):
    """A tensor on disk."""

    def __getitem__(self, index: tuple[slice, ...], /) -> NDArray[Any]: ...


@dataclass(frozen=True)
class TensorRange:
    """The part of one tensor dimension that our array contains: the concatenation of several ranges."""

    dim: str
    size: int  # the size of the dimension in the whole tensor
    ranges: tuple[range, ...]

    def within(self, index: range) -> Iterator[tuple[slice, range]]:
        """For the part `index` of our dimension, yield slices of it with the corresponding range of the tensor."""
        below = 0
        for each in self.ranges:
            low, high = max(index.start, below), min(index.stop, below + len(each))
            if low < high:
                yield slice(low - index.start, high - index.start), each[low - below : high - below]
            below += len(each)


class AxisPart(NamedTuple):
    """The rows of a tensor's first axis that our array has; the others are of other arrays."""

    first: int
    total: int  # rows of the whole tensor


def halves(width: int, first: int = 0) -> tuple[range, range]:
    """Return the ranges that reorder rotated pairs: neighbours on disk, the two halves in our arrays."""
    return range(first, first + width, 2), range(first + 1, first + width, 2)


@dataclass(frozen=True)
class Tensor:
    """A row of a family's table."""

    name: str  # the name on disk, with {expert} if each expert has a tensor of its own
    path: str  # the path of our array, in its block or in all parameters
    axes: str  # the tensor's axes: each is one of our dimensions, several joined by dots, or 1 (an axis of size 1)
    part: TensorRange | None = None
    float32: bool = False  # always written in float32
    within: AxisPart | None = None

    @property
    def dims(self) -> list[str]:
        """The dimensions of all axes."""
        return [dim for axis in self._axes() for dim in axis]

    def shape(self, ours: Sizes) -> tuple[int, ...]:
        """Return the tensor's shape for the sizes of our dimensions."""
        first, *rest = self._own_shape(ours)
        return (self.within.total if self.within else first, *rest)

    def copy_in(
        self, tensor: ReadableTensor, out: NDArray[Any], dims: Sequence[str], index: Index, ours: Sizes
    ) -> None:
        """Fill `out`, the part at `index` of our array [dims]. It is repeated along dimensions that the tensor lacks.

        Along the first dimension of each axis only the required range is read, along the others everything.
        """
        sizes = self._sizes(ours)
        for own, there in self._pieces(index):
            read = {dim: range(sizes[dim]) for dim in self.dims}
            rows = []
            for axis in self._axes():
                if not axis:
                    rows.append(slice(0, 1))
                    continue
                first, *rest = axis
                read[first] = range(there[first].start, there[first][-1] + 1)
                inner = math.prod(sizes[dim] for dim in rest)
                rows.append(slice(read[first].start * inner, read[first].stop * inner))
            if self.within:
                rows[0] = slice(self.within.first + rows[0].start, self.within.first + rows[0].stop)
            block = tensor[tuple(rows)].reshape([len(read[dim]) for dim in self.dims])
            wanted = block[tuple(slice_of(there[dim], read[dim].start) for dim in self.dims)]
            order = [self.dims.index(dim) for dim in dims if dim in self.dims]
            out[tuple(own.get(dim, slice(None)) for dim in dims)] = wanted.transpose(order)

    def copy_out(self, array: NDArray[Any], dims: Sequence[str], out: NDArray[Any]) -> None:
        """Copy our whole array [dims] into its part of `out`, the whole tensor."""
        ours = dict(zip(dims, array.shape, strict=True))
        sizes = self._sizes(ours)
        if self.within:
            out = out[self.within.first : self.within.first + self._own_shape(ours)[0]]
        view = out.reshape([sizes[dim] for dim in self.dims])
        for own, there in self._pieces({dim: range(size) for dim, size in ours.items()}):
            piece = array[tuple(own.get(dim, slice(None)) for dim in dims)]
            view[tuple(slice_of(there[dim]) for dim in self.dims)] = piece.transpose(
                [list(dims).index(dim) for dim in self.dims]
            )

    def _own_shape(self, ours: Sizes) -> tuple[int, ...]:
        """Return the shape of the part of the tensor that our array and its neighbours along one dimension make up."""
        sizes = self._sizes(ours)
        return tuple(math.prod(sizes[dim] for dim in axis) for axis in self._axes())

    def _axes(self) -> list[list[str]]:
        return [[] if axis == "1" else axis.split(".") for axis in self.axes.split()]

    def _sizes(self, ours: Sizes) -> dict[str, int]:
        """Return the sizes of the tensor's dimensions."""
        return {dim: self.part.size if self.part and dim == self.part.dim else ours[dim] for dim in self.dims}

    def _pieces(self, index: Index) -> Iterator[tuple[dict[str, slice], dict[str, range]]]:
        """Yield slices of our part at `index` ({} for all of it) with the ranges of the tensor's dimensions."""
        there = {dim: index[dim] for dim in self.dims}
        if self.part is None:
            yield {}, there
            return
        for own, numbers in self.part.within(index[self.part.dim]):
            yield {self.part.dim: own}, there | {self.part.dim: numbers}


def slice_of(numbers: range, start: int = 0) -> slice:
    """Return the slice of an array that has these numbers, if its first one has the number `start`."""
    return slice(numbers.start - start, numbers.stop - start, numbers.step)
