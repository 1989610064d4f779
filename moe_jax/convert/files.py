"""The safetensors files of a Hugging Face model. Names and shapes are checked before tensors are read."""

import json
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, final

import jax.numpy as jnp
import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import save_file

from moe_jax.convert.hf_config import ConvertError, read_json
from moe_jax.convert.quantized import FLOATS, Dequantized, Quantization, TensorSpec
from moe_jax.convert.stored import StoredTensor, are_equal, open_tensors
from moe_jax.convert.tensors import ReadableTensor
from moe_jax.files.untrusted import check_regular

SUFFIX = ".safetensors"
_SINGLE = f"model{SUFFIX}"
INDEX = f"{_SINGLE}.index.json"
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(jnp.bfloat16),
    "float16": np.dtype(np.float16),
}
_BLOCK = re.compile(r"(?:model|backbone)\.layers\.\d+\.")
_LANGUAGE = re.compile(r"^(model\.)?language_model\.")  # of a model that also sees images
_DERIVED = "rotary_emb.inv_freq"  # a tensor of older files, which follows from the settings


@final
class Weights:
    """All tensors of a folder, by name, as a context. Raises ConvertError for files that are missing or damaged.

    If several files have a tensor, the one that the index names is used. Quantised tensors have the names and values of
    their dequantised ones; tensors of a language model that is a part of another model have those that they have alone.
    """

    def __init__(self, folder: Path, quantization: Quantization | None = None):
        self._folder, self._quantization, self._open = folder, quantization, ExitStack()
        self._tensors: dict[str, StoredTensor] = {}
        self._copies: dict[str, list[StoredTensor]] = {}  # further copies of tensors whose file the index does not name

    def __enter__(self) -> Self:
        named = self._index()
        stored: dict[str, list[StoredTensor]] = {}
        with ExitStack() as opening:
            for file in sorted(set(named.values())) or [_SINGLE]:
                for name, tensor in self._open_file(file, opening).items():
                    stored.setdefault(name, []).append(tensor)
            self._open = opening.pop_all()
        for name, found in stored.items():
            first, *copies = [each for each in found if each.file == named.get(name)] or found
            self._tensors[name] = first
            if copies:
                self._copies[name] = copies
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def check(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        shared: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        unread: str | None = None,
    ) -> None:
        """Raise ConvertError unless the folder has tensors of these names and shapes, and no others of the same blocks.

        Their types must convert to float32 without rounding, or be those of the quantisation. The keys of `shared` may
        be missing, or must be equal to the tensors that they are mapped to, with a cure for messages. Tensors with
        `unread` in their names may be there, too.
        """
        specs: dict[str, TensorSpec] = {}
        for name, shape in shapes.items():
            specs |= self._specs(name, shape)
        for name, (shape, types) in specs.items():
            if name not in self._tensors:
                raise ConvertError(
                    f"{self._folder} has no tensor {name}: fetch all of its files, or use another config.json"
                )
            found = self._tensors[name]
            if found.shape != shape:
                raise ConvertError(
                    f"{self._folder / found.file}: {name} is {list(found.shape)}, and config.json makes it "
                    f"{list(shape)}: use the files that belong together"
                )
            if found.type not in types:
                cure = "convert it to BF16 first" if types == FLOATS else f"it must be {' or '.join(types)}"
                raise ConvertError(
                    f"{self._folder / found.file}: {name} is of type {found.type}, which is not supported: {cure}"
                )
            for other in self._copies.get(name, ()):
                if not are_equal(found, other):
                    raise ConvertError(
                        f"{self._folder}: {found.file} and {other.file} have different numbers for {name}, and {INDEX} "
                        "names no file that has it: name one there"
                    )

        for copy, (name, cure) in shared.items():
            if copy in self._tensors and not are_equal(self._tensors[copy], self._tensors[name]):
                raise ConvertError(
                    f"{self._folder / self._tensors[copy].file}: {copy} has other numbers than {name}, of "
                    f"which it must be a copy: {cure}"
                )
        blocks = {match[0] for name in specs if (match := _BLOCK.match(name))}
        for name in self._tensors.keys() - specs.keys() - shared.keys():
            match, is_unread = _BLOCK.match(name), unread is not None and unread in name
            if match and match[0] in blocks and not name.endswith(_DERIVED) and not is_unread:
                raise ConvertError(
                    f"{self._folder / self._tensors[name].file}: {name} has no place in a model of config.json's "
                    "settings: use the files that belong together"
                )

    def __getitem__(self, name: str) -> ReadableTensor:
        """Return a tensor, which is read from disk when it is sliced."""
        if self._quantization is not None and (parts := self._quantization.parts(name, self._tensors)):
            codes, scales = (self._tensors[part] for part in parts)
            return Dequantized(self._quantization, codes, scales)
        return self._tensors[name].slices

    def names(self) -> Collection[str]:
        """Return the names of all tensors in the files."""
        return self._tensors.keys()

    def _specs(self, name: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """Return the shape and types of a tensor on disk, or those of its codes and scales, by name."""
        if self._quantization is None or (parts := self._quantization.parts(name, self._tensors)) is None:
            return {name: TensorSpec(shape)}
        return dict(zip(parts, self._quantization.specs(name, shape), strict=True))

    def _index(self) -> dict[str, str]:
        """Return the file of each tensor, checked to be in this folder; an empty dict if all are in one file."""
        index = self._folder / INDEX
        if not index.exists():
            if not (self._folder / _SINGLE).exists():
                raise ConvertError(
                    f"{self._folder} has neither {_SINGLE} nor {INDEX}: name the folder of a model that has"
                )
            return {}
        found = read_json(index).get("weight_map")
        if not isinstance(found, dict) or not found:
            raise ConvertError(f"{index} has no weight_map: fetch it again")
        for name in found.values():
            if not isinstance(name, str) or Path(name).name != name or "\\" in name or not name.endswith(SUFFIX):
                raise ConvertError(
                    f"{index} names {json.dumps(name)[:80]}, no {SUFFIX} file of its own folder: fetch it again"
                )
        if (self._folder / _SINGLE).exists() and _SINGLE not in found.values():
            raise ConvertError(
                f"{self._folder} has {_SINGLE}, which {INDEX} does not name: remove the one that is not of this model"
            )
        return {_alone(tensor): name for tensor, name in found.items()}

    def _open_file(self, name: str, opening: ExitStack) -> dict[str, StoredTensor]:
        try:
            check_regular(self._folder / name)
            found = dict(open_tensors(self._folder / name, opening))
        except FileNotFoundError:
            raise ConvertError(f"{self._folder / name} is missing, and {INDEX} names it: fetch it, too") from None
        except (OSError, safetensors.SafetensorError) as error:
            raise ConvertError(f"{self._folder / name} cannot be read ({error}): fetch it again") from None
        alone = {_alone(tensor): each for tensor, each in found.items()}
        if len(alone) < len(found):
            twice = next(tensor for tensor in found if tensor != _alone(tensor) and _alone(tensor) in found)
            raise ConvertError(
                f"{self._folder / name} has both {twice} and {_alone(twice)}: use the files that belong together"
            )
        return alone


def _alone(name: str) -> str:
    """Return the name that a tensor of a language model has if it is not a part of another model."""
    return _LANGUAGE.sub(r"\1", name)


def write_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    types: Mapping[str, np.dtype[Any]],
    tensors: Iterator[tuple[str, NDArray[Any]]],
    most_bytes: int,
) -> None:
    """Write tensors, which come in the order of `shapes`, to files of at most `most_bytes` or one tensor each.

    One file is in memory at a time. Raises OSError.
    """
    groups = list(
        _files_of({name: int(np.prod(shape)) * types[name].itemsize for name, shape in shapes.items()}, most_bytes)
    )
    index: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = _SINGLE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}{SUFFIX}"
        content = dict(next(tensors) for _ in names)
        (folder / file).touch()
        mode = (folder / file).stat().st_mode  # of any new file here; safetensors gives others no right to read its own
        save_file(content, folder / file, metadata={"format": "pt"})
        if (folder / file).stat().st_mode != mode:
            (folder / file).chmod(stat.S_IMODE(mode))
        index |= dict.fromkeys(content, file)
    if len(groups) > 1:
        total = sum(int(np.prod(shape)) * types[name].itemsize for name, shape in shapes.items())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (folder / INDEX).write_text(text + "\n")


def _files_of(sizes: Mapping[str, int], most_bytes: int) -> Iterator[Sequence[str]]:
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > most_bytes:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names
