"""Tensors in open safetensors files, which are read from disk when they are sliced.

safetensors reads numbers of 8-bit floats only for torch. Here they are read as their bits, in uint8.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import safetensors
from numpy.typing import NDArray

_COMPARED = 2**20  # numbers compared at a time
_FLOAT8 = ("F8_E4M3", "F8_E8M0")


class Slices(Protocol):
    """A tensor on disk, with the interface of safetensors' lazy slices."""

    def get_shape(self) -> Sequence[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Any, /) -> NDArray[Any]: ...


class StoredTensor(NamedTuple):
    """A tensor in an open file."""

    slices: Slices
    file: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.slices.get_shape())

    @property
    def type(self) -> str:
        """safetensors' name of the type of its numbers."""
        return self.slices.get_dtype()


@dataclass(frozen=True)
class _Bits:
    """The bits of a tensor of 8-bit floats, in uint8."""

    array: NDArray[np.uint8]
    dtype: str

    def get_shape(self) -> Sequence[int]:
        return self.array.shape

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, index: Any, /) -> NDArray[Any]:
        return self.array[index]


def open_tensors(file: Path, opening: ExitStack) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a file by name. It is open until `opening` closes. Raises OSError and SafetensorError."""
    handle = opening.enter_context(safetensors.safe_open(file, framework="numpy"))
    slices: dict[str, Slices] = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 – no dict
    if float8 := [name for name, each in slices.items() if each.get_dtype() in _FLOAT8]:
        slices |= _bits(file, float8)
    for name, each in slices.items():
        yield name, StoredTensor(each, file.name)


def _bits(file: Path, names: Collection[str]) -> dict[str, Slices]:
    """Return the bits of tensors of 8-bit floats in a file whose header safetensors has checked.

    The format: the size of the header in 8 bytes, little-endian; the header, a JSON object; the tensors' bytes.
    """
    content = np.memmap(file, np.uint8, "r").view(np.ndarray)  # one for all: the number of mappings is limited
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header: Mapping[str, Mapping[str, Any]] = json.loads(content[8:start].tobytes())
    found: dict[str, Slices] = {}
    for name in names:
        low, high = (start + offset for offset in header[name]["data_offsets"])
        found[name] = _Bits(content[low:high].reshape(header[name]["shape"]), header[name]["dtype"])
    return found


def are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two copies of a tensor are equal, bit for bit. Only a part of each is in memory at a time."""
    if (one.shape, one.type) != (other.shape, other.type):
        return False
    length, rows = one.shape[0], max(_COMPARED // max(math.prod(one.shape[1:]), 1), 1)
    parts = [slice(start, min(start + rows, length)) for start in range(0, length, rows)]
    return all(one.slices[part].tobytes() == other.slices[part].tobytes() for part in parts)
