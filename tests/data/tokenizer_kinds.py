"""Small tokenizers of the kinds that published models have, learnt from a text of a few lines."""

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = [
    "O, what a rogue and peasant slave am I! Is it not monstrous that this player here,",
    "But in a fiction, in a dream of passion,   could force his soul so to his own conceit",
    "the quick brown fox jumps over the lazy dog, 1234567 times; and the dog, and the fox",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|endoftext|>"]


def _bpe(prepend_scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def metaspace_always() -> Tokenizer:
    """A space before every word, the first one included."""
    return _bpe("always")


def metaspace_first() -> Tokenizer:
    """A space before the first word of the text."""
    return _bpe("first")


def unigram() -> Tokenizer:
    """The likeliest of all ways to cut a word."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False, max_piece_length=8
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def llama() -> Tokenizer:
    """Spaces are letters, one is prepended, and nothing cuts words; unknown letters are bytes; <s> begins a text."""
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*SPECIAL, *letters], show_progress=False)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return tokenizer


def byte_level(add_prefix_space: bool = False) -> Tokenizer:
    """Like those that this project learns."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def roberta() -> Tokenizer:
    """A tokenizer of bytes, with a space before the text, and tokens at both ends of it."""
    tokenizer = byte_level(add_prefix_space=True)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("</s>", "<s>")]
    tokenizer.post_processor = processors.RobertaProcessing(*ends, trim_offsets=True, add_prefix_space=True)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    kind.__name__: kind for kind in (metaspace_always, metaspace_first, unigram, llama, byte_level, roberta)
}


def save(tokenizer: Tokenizer, folder: Path) -> Path:
    """As the tokenizer.json of a model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
