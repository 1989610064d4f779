"""Checks that a model's data and prompts are encoded with the model's own tokenizer."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from moe_jax.config import Config, DataConfig
from moe_jax.config.yaml_io import load_config
from moe_jax.convert.source import is_imported, origin_of
from moe_jax.data.byte_level import is_byte_level
from moe_jax.data.sources import source_tokenizer, tokenizer_file
from moe_jax.data.tokenizer import ByteTokenizer, Tokenizer, load_model_tokenizer, same_tokens
from moe_jax.data.tokens import BPE_FILE, META_FILE, is_text, read_meta
from moe_jax.distributed.processes import is_main_process
from moe_jax.errors import ConfigError, DataError
from moe_jax.files.local_copy import local_outline
from moe_jax.files.untrusted import read_json

_BYTES = None  # stands for the byte tokenizer, which has no file


def check_tokens(config: Config, new: bool) -> None:
    """Raise UserError if a run would read tokens of several tokenizers, or a new one of another tokenizer than that of
    `train.init_from`.

    Prints a warning if the two cannot be compared, or if the tokens were made by an older version.
    """
    paths = [local_outline(source.path) for source in config.data.mixture]
    names = [f"{setting}={path}" for setting, path in zip(config.data.path_names, paths, strict=True)]
    files = [tokenizer_file(config.data, number) for number in range(len(paths))]
    data, file, name = paths[0], files[0], names[0]
    for path, own_name, own in zip(paths, names, files, strict=True):
        if own and path.is_dir() and not is_text(path) and read_meta(path).begin_of_text is None:
            _check_older(path, own_name, own, new)
        if own != file and not (own and file and same_tokens(own, file)):
            raise ConfigError(
                f"{own_name} has {_kind_of(own)}, and {name} has {_kind_of(file)}: prepare all sources with one "
                f"tokenizer, e.g. by scripts/prepare_text.py TEXT FOLDER --tokenizer {file.parent if file else 'bytes'}"
            )
    begun = config.train.init_from
    if not new or begun is None:
        return
    try:
        found = _file_of_model(config, local_outline(begun))
    except ConfigError as error:
        _warn(f"whether {name} has the tokens of train.init_from={begun} cannot be checked: {error}")
        return
    if found is _BYTES and file is not _BYTES:
        raise ConfigError(
            f"{name} has the tokens of its {BPE_FILE}, and train.init_from={begun} was trained with bytes: "
            "prepare the text by scripts/prepare_text.py TEXT FOLDER --tokenizer bytes"
        )
    if found is _BYTES:
        return
    text = "TEXT" if data.is_dir() else data
    cure = f"prepare a folder by scripts/prepare_text.py {text} FOLDER --tokenizer {found.parent}"
    if is_text(data):
        cure = f"set data.tokenizer={found.parent}"
    if file is _BYTES:
        read = "holds bytes" if data.is_dir() and not is_text(data) else "is read as bytes"
        raise ConfigError(f"{name} {read}, and train.init_from={begun} has a {BPE_FILE}: {cure}")
    if not same_tokens(file, found):
        raise ConfigError(
            f"{name} has tokens of another tokenizer than {found}, that of train.init_from={begun}: {cure}"
        )


def tokenizer_of_run(config: Config, run: Path) -> Tokenizer:
    """The tokenizer for a run's prompts: that of its own tokenizer.json, or else that of its first source.

    Raises DataError.
    """
    own, first = run / BPE_FILE, config.data.mixture[0]
    origin = local_outline(config.data.tokenizer if is_text(first.path) else first.path)
    if not own.is_file():
        known = origin.exists() or not is_imported(config, run)
        tokenizer = source_tokenizer(config.data) if known else ByteTokenizer()
        if isinstance(tokenizer, ByteTokenizer) and is_imported(config, run):
            raise DataError(
                f"{run} has no {BPE_FILE}, and its model was not trained here: put the model's there, or name a "
                "folder that was prepared with it by data.path"
            )
        return tokenizer
    if not origin.exists() or not (file := tokenizer_file(config.data)):
        return ByteTokenizer() if is_byte_level(own) else load_model_tokenizer(run)[1]
    if not same_tokens(file, own):
        raise DataError(
            f"{own} and {file} are different tokenizers: name by data.path the folder that was prepared with the first "
            "one, or remove the first one, if the run was trained with the second"
        )
    return source_tokenizer(config.data)


def check_tokens_of_run(config: Config, run: Path, data: DataConfig, names: Sequence[str] | None = None) -> Tokenizer:
    """Return what `tokenizer_of_run` does. Raises DataError unless all sources of `data` have tokens of that kind.

    `names` are those of the sources' paths in messages, by default the settings.
    """
    tokenizer, own = tokenizer_of_run(config, run), run / BPE_FILE
    is_bytes = isinstance(tokenizer, ByteTokenizer)
    for number, source in enumerate(data.mixture):
        file = tokenizer_file(data, number)
        if (file is _BYTES) != is_bytes or (file and own.is_file() and not same_tokens(file, own)):
            setting = (names or data.path_names)[number]
            raise DataError(
                f"{setting}={source.path} has {_kind_of(file)}, and run {run} was trained on "
                f"{'bytes' if is_bytes else 'those of another tokenizer'}: name a text that was prepared with the run's"
            )
    return tokenizer


def end_tokens(run: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a text: the tokenizer's, and those of generation_config.json. Raises DataError."""
    found = set()
    with contextlib.suppress(DataError):  # a tokenizer may have none
        found.add(tokenizer.end_of_text)
    file = run / "generation_config.json"
    try:
        settings = read_json(file) if file.exists() else {}
        ends = settings.get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{file} cannot be read ({error}): fetch it again") from None
    for end in ends if isinstance(ends, list) else [ends]:
        if isinstance(end, int) and not isinstance(end, bool):
            found.add(end)
    return frozenset(found)


def _file_of_model(config: Config, begun: Path) -> Path | None:
    """The tokenizer.json of the model that a run begins with; None for bytes. Raises ConfigError if it is missing."""
    if origin := origin_of(config):
        if not (origin.parent / BPE_FILE).is_file():
            raise ConfigError(f"it has no {BPE_FILE}")
        begun = origin.parent
    if (own := begun / BPE_FILE).is_file():
        return _BYTES if is_byte_level(own) else own
    data = load_config(begun).data
    try:
        return tokenizer_file(data)
    except DataError:
        raise ConfigError(f"the data that it was trained with, {data.mixture[0].path}, is not here") from None


def _kind_of(file: Path | None) -> str:
    """The kind of tokens that a tokenizer.json makes, for messages; None stands for bytes."""
    return "bytes" if file is _BYTES else f"tokens of its own {BPE_FILE}"


def _check_older(data: Path, name: str, file: Path, new: bool) -> None:
    """Warn about data of an older version, or raise DataError if a new run would use it with truncation or padding.

    Older versions obeyed these settings of tokenizer.json, and encoded long texts in pieces.
    """
    again = f"make the folder again with scripts/prepare_text.py TEXT FOLDER --tokenizer {data}"
    try:
        saved = read_json(file)
        obeyed = [name for name in ("truncation", "padding") if saved.get(name)]
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{file} cannot be read ({error}): {again}") from None
    if obeyed:
        problem = f"{name} was made by an older version, which obeyed the {' and '.join(obeyed)} in {file}"
        if new:
            raise DataError(f"{problem}: {again}")
        _warn(f"{problem}: text is missing, or padding is in between")
    else:
        _warn(
            f"{name} was made by an older version, which encoded long .txt files in pieces: tokens where two "
            f"pieces meet may be other ones ({META_FILE} has no begin_of_text); {again}"
        )


def _warn(text: str) -> None:
    if is_main_process():
        print(f"warning: {text}", flush=True)
