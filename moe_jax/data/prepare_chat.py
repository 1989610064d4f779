"""Conversion of conversations to a folder of packed sequences, with a loss on what the assistant says alone.

A conversation is a JSON object with "messages", each with "role" and "content", or with "prompt" and "completion".
Whole conversations are packed into sequences of one length, each into the first sequence that has room for it.
"""

import itertools
import json
import shutil
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from moe_jax.data.chat_template import FILE as TEMPLATE_FILE
from moe_jax.data.chat_template import MARKS, CharSpan, ChatTemplate, rendered
from moe_jax.data.chunk_checksums import CHUNK_BYTES, write_checksums
from moe_jax.data.text_files import find_files, has_records, read_records
from moe_jax.data.token_marks import FIRST, PADDING, UNCOUNTED
from moe_jax.data.tokenizer import BpeTokenizer, load_model_tokenizer
from moe_jax.data.tokens import BPE_FILE, META_FILE, PACKED_FORMAT, SPLITS, Meta
from moe_jax.errors import DataError
from moe_jax.files.atomic import write_folder_atomically

OPEN = 256  # sequences that may still receive documents


def pack(documents: Iterable[NDArray[np.uint32]], length: int) -> Iterator[NDArray[np.uint32]]:
    """Yield sequences of `length` tokens made of documents of at most `length` tokens with marks.

    When a document fits into none of OPEN sequences, the fullest one of them is complete. Its rest is filled with
    copies of its documents, the last one cut off, which are marked as padding: the loss does not count them, and
    routers send them nowhere.
    """
    parts: list[list[NDArray[np.uint32]]] = []
    room = np.empty(0, np.int64)  # of each open sequence
    for document in documents:
        assert 0 < len(document) <= length
        fits = np.flatnonzero(room >= len(document))
        if not len(fits):
            if len(parts) == OPEN:
                fullest = int(room.argmin())
                yield _filled(parts.pop(fullest), length)
                room = np.delete(room, fullest)
            parts.append([])
            room = np.append(room, length)
        place = int(fits[0]) if len(fits) else len(parts) - 1
        parts[place].append(document)
        room[place] -= len(document)
    for each in parts:
        yield _filled(each, length)


def _filled(documents: list[NDArray[np.uint32]], length: int) -> NDArray[np.uint32]:
    joined = np.concatenate(documents)
    sequence = np.resize(joined, length)
    sequence[len(joined) :] |= UNCOUNTED | PADDING
    return sequence


class Prepared(NamedTuple):
    """What a folder of conversations has."""

    meta: Meta
    conversations: int
    counted_tokens: int  # that the loss counts
    padding_tokens: int
    too_long: int  # conversations left out, with more tokens than a sequence
    silent: int  # conversations left out, in which the assistant says nothing


def prepare_chat(
    source: Path,
    output: Path,
    *,
    tokenizer: Path,
    seq_len: int,
    template: Path | None = None,
    validation_fraction: float = 0.1,
) -> Prepared:
    """Write the conversations of all JSON files below `source` as the folder `output`, for `data.seq_len=seq_len`.

    The tokens of messages are those of the chat template of the model folder `tokenizer`, or of the file `template`.
    `output` has a copy of it, for the runs that it trains. A prompt with its completion has no template: its tokens are
    those of a document. The last `validation_fraction` of
    the conversations is for validation. Each sequence has whole conversations; one that is longer
    than a sequence is left out, and so is one that has no token to be counted. Raises DataError for bad input, and then
    leaves no `output`.
    """
    if not 0 < validation_fraction < 1:
        raise DataError(f"--validation-fraction={validation_fraction} must lie between 0 and 1")
    if seq_len < 2:
        raise DataError(f"--seq-len={seq_len} must be at least 2")
    if not (tokenizer / BPE_FILE).is_file():
        raise DataError(f"--tokenizer={tokenizer} must be a folder with a {BPE_FILE}")
    tokenizer_file, bpe = load_model_tokenizer(tokenizer)
    _ = bpe.end_of_text  # raises before anything is read
    files, skipped = find_files(source)
    others = [file for file in files if not has_records(file)]
    files = [file for file in files if has_records(file)]
    if not files:
        raise DataError(f"{source} holds no .jsonl or .json file: write one conversation a line")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"{output} exists and is not an empty folder: name another one, or remove it")
    count = sum(1 for file in files for _ in read_records(file))
    num_validation = int(count * validation_fraction)
    if not 0 < num_validation < count:
        raise DataError(f"{source} holds {count} conversations, too few to train and validate: give more")
    encoder = _Encoder(bpe, tokenizer, template)
    try:
        with write_folder_atomically(output) as folder:
            facts = Counter[str]()
            shutil.copyfile(tokenizer_file, folder / BPE_FILE)
            records = itertools.chain.from_iterable(map(read_records, files))
            progress = tqdm(records, total=count, unit="conversation", disable=None)
            sizes: dict[str, int] = {}
            for split, number in zip(SPLITS, (count - num_validation, num_validation), strict=True):
                conversations = encoder.encoded(itertools.islice(progress, number), seq_len + 1, facts)
                sequences = pack(conversations, seq_len + 1)
                sizes |= _write(folder / f"{split}.bin", split, sequences, facts)
            if not all(sizes[f"{split}_tokens"] for split in SPLITS):
                raise DataError(
                    f"{source}: of {count} conversations {facts['too_long']} are longer than --seq-len={seq_len} and "
                    f"in {facts['silent']} the assistant says nothing, too many to train and validate: give more, or "
                    "a larger --seq-len"
                )
            if encoder.template is not None:
                (folder / TEMPLATE_FILE).write_text(encoder.template.source, encoding="utf-8")
            names = [file.name if file == source else file.relative_to(source).as_posix() for file in files]
            meta = Meta(
                tokenizer="bpe",
                vocab_size=bpe.vocab_size,
                begin_of_text=bpe.begin_of_text,
                end_of_text=bpe.end_of_text,
                dtype="uint32",
                sources=names,
                skipped=sorted([*skipped, *(f"{file.name} (holds no JSON objects)" for file in others)]),
                tokenizer_crc32=zlib.crc32((folder / BPE_FILE).read_bytes()),
                chunk_bytes=CHUNK_BYTES,
                seq_len=seq_len,
                **sizes,
            )
            (folder / META_FILE).write_text(json.dumps({"format": PACKED_FORMAT} | asdict(meta), indent=1) + "\n")
    except OSError as error:
        raise DataError(f"{error.filename or output}: {error.strerror or error}") from None
    return Prepared(meta, count, *(facts[name] for name in ("counted", "padding", "too_long", "silent")))


class _Encoder:
    """Encodes conversations as tokens with marks."""

    def __init__(self, tokenizer: BpeTokenizer, folder: Path, template: Path | None) -> None:
        self._tokenizer, self._folder, self._file = tokenizer, folder, template
        self.template: ChatTemplate | None = None  # loaded with the first messages

    def encoded(
        self, records: Iterator[tuple[str, Any]], most: int, facts: Counter[str]
    ) -> Iterator[NDArray[np.uint32]]:
        """Yield the tokens of each conversation of at most `most` tokens, and count those left out."""
        for where, record in records:
            tokens = self._of_record(where, record)
            if len(tokens) > most:
                facts["too_long"] += 1
            elif (tokens[1:] & UNCOUNTED).all():
                facts["silent"] += 1
            else:
                facts["padding"] -= len(tokens)
                yield tokens

    def _of_record(self, where: str, record: Any) -> NDArray[np.uint32]:
        if not isinstance(record, dict) or not ("messages" in record or {"prompt", "completion"} <= record.keys()):
            raise DataError(f'{where} must have "messages", or "prompt" and "completion": repair or remove it')
        if "messages" in record:
            return self._of_messages(where, record["messages"])
        prompt, completion = record["prompt"], record["completion"]
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            raise DataError(f"{where}: prompt and completion must be text: write other turns as messages")
        text = prompt + completion
        ids, span_T2 = self._tokenizer.encode_with_spans(text)
        begin, end = self._tokenizer.begin_of_text, self._tokenizer.end_of_text
        counted = _inside(span_T2, [(len(prompt), len(text))])
        return _marked(
            np.concatenate([np.array(begin, np.int64), ids, [end]]),
            np.concatenate([np.zeros(len(begin), bool), counted, [True]]),
        )

    def _of_messages(self, where: str, messages: Any) -> NDArray[np.uint32]:
        if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
            raise DataError(f'{where}: "messages" must be a list of objects with "role" and "content": repair it')
        messages = [self._with_text(where, number, message) for number, message in enumerate(messages, 1)]
        for text in _texts(messages):
            if name := self._tokenizer.special_token_in(text) or next((mark for mark in MARKS if mark in text), None):
                raise DataError(
                    f"{where} spells out the special token {name!r}, which would end or begin a turn: remove it"
                )
        if self.template is None:
            self.template = ChatTemplate(self._folder, self._file, MARKS, "put the model's there, or use --template")
        try:
            conversation = rendered(self.template, messages)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        ids, span_T2 = self._tokenizer.encode_with_spans(conversation.text, special_tokens=True)
        if not len(ids):
            raise DataError(f"{where} has no text: remove it")
        return _marked(ids, _inside(span_T2, conversation.answers))

    @staticmethod
    def _with_text(where: str, number: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with its content as text, which may be in parts. A template would print anything else as
        Python does.
        """
        content = message["content"]
        if isinstance(content, list) and all(map(_is_text_part, content)):
            return {**message, "content": "".join(part["text"] for part in content)}
        if isinstance(content, str) or (content is None and message.get("tool_calls")):
            return message
        kind = "null" if content is None else "not text"
        raise DataError(f'{where}: the "content" of message {number} is {kind}: write the text, or remove the line')


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _write(file: Path, split: str, sequences: Iterator[NDArray[np.uint32]], facts: Counter[str]) -> dict[str, int]:
    """Write sequences, with their checksums; returns the entries of meta.json about them."""
    count = crc32 = 0
    with file.open("wb") as out:
        for sequence in sequences:
            data = sequence.astype("<u4").tobytes()
            out.write(data)
            count, crc32 = count + len(sequence), zlib.crc32(data, crc32)
            facts["padding"] += len(sequence)  # less the tokens of conversations
            facts["counted"] += int((sequence[1:] & (FIRST | UNCOUNTED) == 0).sum())
    write_checksums(file)
    return {f"{split}_tokens": count, f"{split}_crc32": crc32}


def _marked(ids: NDArray[np.int64], is_counted: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """The tokens of one conversation with their marks."""
    tokens = ids.astype(np.uint32) | np.where(is_counted, 0, UNCOUNTED).astype(np.uint32)
    tokens[0] |= FIRST
    return tokens


def _inside(span_T2: NDArray[np.int64], answers: list[CharSpan]) -> NDArray[np.bool_]:
    """Which tokens have a character of an answer. The first one may begin with a space that ends the prompt."""
    starts, ends = span_T2.T
    ends = np.maximum(ends, starts + 1)
    inside = np.zeros(len(starts), bool)
    for begin, end in answers:
        inside |= (ends > begin) & (starts < end)
    return inside


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message


def _texts(value: Any) -> Iterator[str]:
    """All strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(_texts, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(_texts, value))
