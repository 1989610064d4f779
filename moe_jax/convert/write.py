"""Writing parameters as a Hugging Face folder, which transformers can load, with the model's companion files.

Companion files are not converted: tokenizer, chat templates, ids of special tokens. An import copies them into the run,
a run that starts from a model copies them into its own folder, and an export copies them from there.
"""

import dataclasses
import json
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
from moe_jax.convert.hf_config import FILE, ConvertError, HfConfig
from moe_jax.convert.table import ArraySlice, array_slices
from moe_jax.errors import is_full_disk
from moe_jax.files.atomic import write_folder_atomically, write_together

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "tiktoken.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def copy_companion_files(source: Path, target: Path) -> None:
    """Copy the companion files that exist, all of them or none. Raises OSError."""
    if source.resolve() == target.resolve():
        return
    found = [file for pattern in _FILES for file in source.glob(pattern) if file.is_file()]
    write_together({target / file.relative_to(source): file.read_bytes() for file in found})


def special_tokens(hf: HfConfig) -> dict[str, Any]:
    """Return the ids of special tokens in a config.json, null included. Raises ConvertError.

    transformers has defaults for missing ones.
    """
    return hf.token_ids(*SPECIAL_TOKENS)


MOST_BYTES = 5 * 10**9  # the most bytes of a file


def check_is_free(folder: Path) -> None:
    """Raise ConvertError unless the folder is missing or empty, so that a model can be written there."""
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
    others: Mapping[str, bytes] | None = None,
) -> None:
    """Write config.json and the weights `params` into a new `folder`.

    `params` has blocks in order, as arrays of the host or of one device. Numbers are rounded to `dtype`, except those
    that the family stores in float32. `tokens` are settings of special tokens. The companion files in the folder
    `source` are copied, and `others` are further files by their names. Raises ConvertError; then the folder is not
    created.
    """
    check_is_free(folder)
    by_name: dict[str, list[tuple[ArraySlice, int, int]]] = {}
    for group in array_slices(model, family, copies=True).values():
        for period, piece in enumerate(group):
            for expert, name in enumerate(piece.names()):
                by_name.setdefault(name, []).append((piece, period, expert))
    shapes = {name: parts[0][0].shape for name, parts in by_name.items()}
    types = {name: DTYPES["float32" if parts[0][0].row.float32 else dtype] for name, parts in by_name.items()}

    def tensors() -> Iterator[tuple[str, NDArray[Any]]]:
        for name, parts in by_name.items():
            out = np.empty(shapes[name], types[name])
            with np.errstate(over="ignore"):
                for piece, period, expert in parts:
                    _put(params, piece, period, expert, out)
            if out.dtype != np.float32 and np.isinf(out).any():
                largest = float(jnp.finfo(out.dtype).max)
                raise ConvertError(f"--dtype={dtype}: {name} has numbers beyond its {largest:g}: use --dtype float32")
            yield name, out

    settings = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.settings(dataclasses.replace(model, num_nextn_predict_layers=0)),
        **({"num_nextn_predict_layers": model.num_nextn_predict_layers} if family.holds_mtp else {}),
        "max_position_embeddings": longest_sequence,
        **(tokens or {}),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    try:
        with write_folder_atomically(folder) as made:
            write_weights(made, shapes, types, tensors(), most_bytes)
            (made / FILE).write_text(json.dumps(settings, indent=2) + "\n")
            copy_companion_files(source, made)
            for name, content in (others or {}).items():
                (made / name).write_bytes(content)
    except (OSError, SafetensorError) as error:
        if is_full_disk(error):
            raise ConvertError(f"{folder}: no room on that disk: free some space, or name another folder") from None
        file, reason = (error.filename, error.strerror) if isinstance(error, OSError) else (None, None)
        raise ConvertError(f"{file or folder}: {reason or error}: name another folder") from None


def _put(params: Any, piece: ArraySlice, period: int, expert: int, out: NDArray[Any]) -> None:
    array = params
    for key in piece.path:
        array = array[key]
    is_per_expert = "{expert}" in piece.row.name
    index = ((period,) if piece.path[0] == "segments" else ()) + ((expert,) if is_per_expert else ())
    piece.row.copy_out(np.asarray(array[index]), piece.dims[is_per_expert:], out)
