"""A Hugging Face folder of parameters: files that transformers loads."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from moe_jax.config import ModelConfig
from moe_jax.convert.family import Family
from moe_jax.convert.files import DTYPES, write_weights
from moe_jax.convert.hf_config import FILE, ConvertError
from moe_jax.convert.table import ArraySlice, places
from moe_jax.convert.with_model import copy_with_model
from moe_jax.errors import is_full_disk
from moe_jax.files.atomic import all_or_nothing

MOST_BYTES = 5 * 10**9  # of a file


def check_is_free(folder: Path) -> None:
    """Raises ConvertError unless a model can be written there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConvertError(f"{folder} exists and is not an empty folder: name another one, or remove it")


def write_model(
    folder: Path,
    model: ModelConfig,
    family: Family,
    params: Any,
    dtype: str,
    longest_sequence: int,
    source: Path,
    most_bytes: int = MOST_BYTES,
    tokens: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and weights of `params`, blocks in order, host arrays or such of one device, as `folder`.

    Numbers are rounded to `dtype`, but those that the family has in float32. `tokens` are settings of special tokens;
    files of the folder `source` that go with a model are copied. Raises ConvertError; then there is no folder.
    """
    check_is_free(folder)
    by_name: dict[str, list[tuple[ArraySlice, int, int]]] = {}
    for group in places(model, family).values():
        for period, place in enumerate(group):
            for expert, name in enumerate(place.names()):
                by_name.setdefault(name, []).append((place, period, expert))
    shapes = {name: parts[0][0].shape for name, parts in by_name.items()}
    types = {name: DTYPES["float32" if parts[0][0].row.float32 else dtype] for name, parts in by_name.items()}

    def tensors() -> Iterator[tuple[str, NDArray[Any]]]:
        for name, parts in by_name.items():
            out = np.empty(shapes[name], types[name])
            with np.errstate(over="ignore"):
                for place, period, expert in parts:
                    _put(params, place, period, expert, out)
            if out.dtype != np.float32 and np.isinf(out).any():
                largest = float(jnp.finfo(out.dtype).max)
                raise ConvertError(f"--dtype={dtype}: {name} has numbers beyond its {largest:g}: use --dtype float32")
            yield name, out

    settings = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.settings(model),
        "max_position_embeddings": longest_sequence,
        **(tokens or {}),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    try:
        with all_or_nothing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
                made = Path(scratch) / "model"
                made.mkdir()
                write_weights(made, shapes, types, tensors(), most_bytes)
                (made / FILE).write_text(json.dumps(settings, indent=2) + "\n")
                copy_with_model(source, made)
                made.rename(folder)
    except (OSError, SafetensorError) as error:
        if is_full_disk(error):
            raise ConvertError(f"{folder}: no room on that disk: make room, or name another folder") from None
        told = (error.filename, error.strerror) if isinstance(error, OSError) else (None, None)
        raise ConvertError(f"{told[0] or folder}: {told[1] or error}: name another folder") from None


def _put(params: Any, place: ArraySlice, period: int, expert: int, out: NDArray[Any]) -> None:
    array = params
    for key in place.path:
        array = array[key]
    of_experts = "{expert}" in place.row.name
    index = ((period,) if place.path[0] == "segments" else ()) + ((expert,) if of_experts else ())
    place.row.copy_out(np.asarray(array[index]), place.dims[of_experts:], out)
