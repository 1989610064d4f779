"""Datasets that `save_to_disk` of Hugging Face's `datasets` has written, read by pyarrow.

A folder of one split has `state.json`, which names files `data-00000-of-00002.arrow` in their order, and
`dataset_info.json`. Each file is a stream of record batches in Arrow's IPC format, without compression.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_jax.data.tokenizer import optional_package
from moe_jax.data.tokens import DATASET_FILES
from moe_jax.errors import DataError
from moe_jax.files.untrusted import check_regular, read_json

_AGAIN = "save the dataset again"


def arrow_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a saved dataset, in order. Raises DataError."""
    state = folder / DATASET_FILES[0]
    try:
        found = read_json(state)
        names = [each["filename"] for each in found["_data_files"]]
        indices = found.get("_indices_data_files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{state} is not that of a saved dataset ({error!r}): {_AGAIN}") from None
    if wrong := [name for name in names if not isinstance(name, str) or not name or Path(name).name != name]:
        raise DataError(f"{state} names {wrong[0]!r}, which is no file in its folder: {_AGAIN}")
    if indices:  # of old versions
        raise DataError(f"{folder} has its rows in the order of another file: load it with datasets, and {_AGAIN}")
    if not names:
        raise DataError(f"{folder} is a dataset without rows: give some text")
    return [folder / name for name in names]


def arrow_columns(file: Path, text_key: str, check: Callable[[Sequence[str]], None]) -> list[Any]:
    """Return the column with the text in each record batch of an Arrow file, mapped into memory. Raises DataError.

    `check` is called with the names of all columns, and raises if `text_key` is not among them.
    """
    arrow = optional_package("pyarrow")
    try:
        check_regular(file)
        mapped = arrow.memory_map(str(file))
        names = arrow.ipc.open_stream(mapped).schema.names
        check(names)
        mapped.seek(0)
        only = arrow.ipc.IpcReadOptions(included_fields=[names.index(text_key)])
        return [batch.column(0) for batch in arrow.ipc.open_stream(mapped, options=only)]
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise no_arrow(file, error) from None


def no_arrow(file: Path, error: Exception) -> DataError:
    """The error for an Arrow file, or a folder of them, that pyarrow cannot read."""
    reason = str(error).partition("\n")[0]
    return DataError(f"{file} cannot be read as Arrow's streaming format ({reason}): {_AGAIN}")
