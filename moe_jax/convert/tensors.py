"""Where a Hugging Face tensor lies among our parameters: a table row, and how numbers go from one to the other.

A row gives the tensor's axes in the names of our dimensions (`heads.head model`: rows are heads times their width), so
transpositions and stacks follow by themselves. Part of a tensor, such as the rows of keys among those of keys and
values, is given by ranges along one of the dimensions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

Sizes = Mapping[str, int]  # of our dimensions
Index = Mapping[str, range]  # a part of one of our arrays, by its dimensions


class Readable(Protocol):
    """A tensor on disk."""

    def __getitem__(self, index: tuple[slice, ...], /) -> NDArray[Any]: ...


@dataclass(frozen=True)
class TensorRange:
    """What of one dimension of a tensor is ours: ranges, one behind the other."""

    dim: str
    size: int  # of the whole tensor's dimension
    ranges: tuple[range, ...]

    def within(self, index: range) -> Iterator[tuple[slice, range]]:
        """Which numbers of the tensor's dimension are those of ours at `index`, and where in them."""
        below = 0
        for each in self.ranges:
            low, high = max(index.start, below), min(index.stop, below + len(each))
            if low < high:
                yield slice(low - index.start, high - index.start), each[low - below : high - below]
            below += len(each)


def halves(width: int, first: int = 0) -> tuple[range, range]:
    """Neighbours, which are rotated as pairs there, as the two halves that are rotated here."""
    return range(first, first + width, 2), range(first + 1, first + width, 2)


@dataclass(frozen=True)
class Tensor:
    """A row of a family's table."""

    name: str  # on disk, with {expert} where each expert has a tensor of its own
    path: str  # of our array, below its block or below all parameters
    axes: str  # of the tensor: each one of our dimensions, or several
    part: TensorRange | None = None
    float32: bool = False  # written as such whatever the others are

    @property
    def dims(self) -> list[str]:
        """Of all axes."""
        return self.axes.replace(".", " ").split()

    def shape(self, ours: Sizes) -> tuple[int, ...]:
        """Of the tensor."""
        sizes = self._sizes(ours)
        return tuple(math.prod(sizes[dim] for dim in axis) for axis in self._axes())

    def copy_in(self, tensor: Readable, out: NDArray[Any], dims: Sequence[str], index: Index, ours: Sizes) -> None:
        """Fill `out`, the part at `index` of our array [dims]. Dimensions that the tensor has not get copies.

        Of the first dimension of each axis the numbers that are needed are read, of others all.
        """
        sizes = self._sizes(ours)
        for own, there in self._pieces(index):
            read = {dim: range(sizes[dim]) for dim in self.dims}
            rows = []
            for first, *rest in self._axes():
                read[first] = range(there[first].start, there[first][-1] + 1)
                inner = math.prod(sizes[dim] for dim in rest)
                rows.append(slice(read[first].start * inner, read[first].stop * inner))
            block = tensor[tuple(rows)].reshape([len(read[dim]) for dim in self.dims])
            wanted = block[tuple(_slice(there[dim], read[dim].start) for dim in self.dims)]
            order = [self.dims.index(dim) for dim in dims if dim in self.dims]
            out[tuple(own.get(dim, slice(None)) for dim in dims)] = wanted.transpose(order)

    def copy_out(self, array: NDArray[Any], dims: Sequence[str], out: NDArray[Any]) -> None:
        """Put our whole array [dims] where it belongs in `out`, the whole tensor."""
        ours = dict(zip(dims, array.shape, strict=True))
        sizes = self._sizes(ours)
        view = out.reshape([sizes[dim] for dim in self.dims])
        for own, there in self._pieces({dim: range(size) for dim, size in ours.items()}):
            piece = array[tuple(own.get(dim, slice(None)) for dim in dims)]
            view[tuple(_slice(there[dim]) for dim in self.dims)] = piece.transpose(
                [list(dims).index(dim) for dim in self.dims]
            )

    def _axes(self) -> list[list[str]]:
        return [axis.split(".") for axis in self.axes.split()]

    def _sizes(self, ours: Sizes) -> dict[str, int]:
        """Of the tensor's dimensions."""
        return {dim: self.part.size if self.part and dim == self.part.dim else ours[dim] for dim in self.dims}

    def _pieces(self, index: Index) -> Iterator[tuple[dict[str, slice], dict[str, range]]]:
        """Places in the part at `index` of ours, if not all of it, and numbers of the tensor's dimensions."""
        there = {dim: index[dim] for dim in self.dims}
        if self.part is None:
            yield {}, there
            return
        for own, numbers in self.part.within(index[self.part.dim]):
            yield {self.part.dim: own}, there | {self.part.dim: numbers}


def _slice(numbers: range, start: int = 0) -> slice:
    return slice(numbers.start - start, numbers.stop - start, numbers.step)
