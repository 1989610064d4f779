"""The text after a prompt, while its tokens arrive."""

import itertools
import unicodedata
from collections.abc import Sequence

from moe_jax.data.tokenizer import Tokenizer

_INCOMPLETE = ("\ufffd", "\r")  # the begin of a character, or of a line break


class TextStream:
    """Turns the tokens after a prompt into text, piece by piece, up to the first stop string."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], stops: Sequence[str] = ()):
        """`before` are the tokens of the prompt."""
        self._tokenizer, self._before, self._stops = tokenizer, list(before), [stop for stop in stops if stop]
        self._shown = 0  # characters that `update` has returned
        self.text = ""  # the text so far, without a stop string
        self.is_stopped = False  # whether there was a stop string

    def update(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """Return the text that is new, given all tokens so far.

        Characters that a later token may still change are held back, unless these tokens are the last ones.
        """
        self.text = continuation(self._tokenizer, self._before, list(tokens))
        found = [place for stop in self._stops if (place := self.text.find(stop)) >= 0]
        self.is_stopped = bool(found)
        held = 0 if is_last else self._held_back()
        if found:
            self.text, held = self.text[: min(found)], 0
        end = max(len(self.text) - held, self._shown)
        new, self._shown = self.text[self._shown : end], end
        return new

    def _held_back(self) -> int:
        """Return the number of last characters that are incomplete, or that may begin a stop string."""
        incomplete = len(self.text) - len(self.text.rstrip("".join(_INCOMPLETE)))
        begun = (n for stop in self._stops for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
        return max(incomplete, *begun, 0)


def continuation(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> str:
    """The text of `tokens` that follow the tokens `before`.

    Decoding `tokens` alone could lose a space, since a tokenizer may remove the space before the first token.
    """
    known, whole = tokenizer.decode(before), tokenizer.decode([*before, *tokens])
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, whole, strict=False))
    return whole[len(list(shared)) :]


def printable(text: str) -> str:
    """The text with control characters, which a terminal would obey, replaced by U+FFFD.

    A model of bytes can sample such characters. Tabs and line breaks stay.
    """
    text = text.replace("\r\n", "\n")
    return "".join("\ufffd" if unicodedata.category(each) == "Cc" and each not in "\n\t" else each for each in text)
