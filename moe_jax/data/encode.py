"""Encoding of documents, with the tokens that begin and end a text around each."""

from collections.abc import Sequence

from moe_jax.data.tokenizer import Tokenizer

# characters that are encoded in one call; a longer document is encoded in windows (data/long_text.py)
BATCH = 2**20

Document = tuple[str, bool]  # a text, and whether it has its end, and so the token after it


def encode_documents(documents: Sequence[Document], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of each document, with those that begin and end a text."""
    short = [text for text, _ in documents if len(text) <= BATCH]
    encoded = iter(tokenizer.encode_batch(short))
    found = []
    for text, ends in documents:
        tokens = next(encoded) if len(text) <= BATCH else [id for part in tokenizer.encode_long([text]) for id in part]
        found.append([*tokenizer.begin_of_text, *tokens, *([tokenizer.end_of_text] if ends else ())])
    return found
