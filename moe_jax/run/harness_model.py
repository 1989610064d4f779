"""A run with the methods of a model of lm-eval (EleutherAI's evaluation harness): text in, text or log-likelihoods out.

Requests are objects with `args`, as lm-eval makes them; this module does not need the package. Log-likelihoods are
computed in batches of sequences of similar lengths, on the devices that generate text.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from moe_jax.config import Config
from moe_jax.data.chat_template import ChatTemplate, Message
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.errors import ConfigError
from moe_jax.models.sampling import Sampling
from moe_jax.parallel.trees import Params
from moe_jax.run.generation import Decoder, shape_above
from moe_jax.run.sample import check_prompt
from moe_jax.run.sampling_mesh import SamplingMesh
from moe_jax.run.text_generation import TextGenerator, TextSettings


class ScoredSpan(NamedTuple):
    """The last tokens of a sequence, which are predicted from those before them."""

    tokens: Sequence[int]  # at least one more than those predicted
    predicted: int


class Score(NamedTuple):
    """The probability of the tokens of a span."""

    log_prob: float  # nats, summed over tokens
    is_greedy: bool  # whether each token is the likeliest one


def spans_of(tokens: Sequence[int], first: int, context: int) -> Iterator[ScoredSpan]:
    """Yield spans that predict each token of a text once, with as many tokens before it as `context` allows.

    `first` is the token before the text. All spans but the last one are as long as the context, and predict all of its
    tokens; the last one is as long, and predicts what is left.
    """
    whole = [first, *tokens]
    for begin in range(0, len(tokens), context):
        end = min(begin + context, len(tokens))
        yield ScoredSpan(whole[max(0, end - context) : end + 1], end - begin)


def scores(decoder: Decoder, spans: Sequence[ScoredSpan], batch_size: int) -> list[Score]:
    """Return the score of each span, in order.

    Batches have `batch_size` sequences, of which the last one may be repeated, so that few programs are compiled.
    """
    found: dict[int, Score] = {}
    longest_first = sorted(range(len(spans)), key=lambda number: -len(spans[number].tokens))
    with tqdm(total=len(spans), unit="sequence", desc="scores", disable=None, leave=False) as bar:
        while longest_first:
            length = shape_above(len(spans[longest_first[0]].tokens) - 1)
            own = [n for n in longest_first[:batch_size] if shape_above(len(spans[n].tokens) - 1) == length]
            longest_first = longest_first[len(own) :]
            batch = [spans[number] for number in own]
            found |= dict(zip(own, _score_batch(decoder, batch, length, batch_size), strict=True))
            bar.update(len(own))
    return [found[number] for number in range(len(spans))]


def _score_batch(decoder: Decoder, spans: Sequence[ScoredSpan], length: int, batch_size: int) -> Iterator[Score]:
    inputs, targets = (np.zeros((batch_size, length), np.int32) for _ in range(2))
    filled = [*spans, *[spans[-1]] * (batch_size - len(spans))]
    for own_inputs, own_targets, (tokens, _) in zip(inputs, targets, filled, strict=True):
        own_inputs[: len(tokens) - 1], own_targets[: len(tokens) - 1] = tokens[:-1], tokens[1:]
    log_prob_BN, is_likeliest_BN = decoder.score(inputs, targets)
    for (tokens, predicted), log_prob_N, is_likeliest_N in zip(spans, log_prob_BN, is_likeliest_BN, strict=False):
        yield _score_of(log_prob_N[: len(tokens) - 1], is_likeliest_N[: len(tokens) - 1], predicted)


def _score_of(log_prob_n: NDArray[np.float32], is_likeliest_n: NDArray[np.bool], predicted: int) -> Score:
    own = slice(len(log_prob_n) - predicted, None)
    return Score(float(log_prob_n[own].astype(np.float64).sum()), bool(is_likeliest_n[own].all()))


def _report_cut(lengths: Sequence[int], room: int) -> None:
    """Warn of texts that are longer than there is room for, whose results are those of other texts."""
    if cut := sum(length > room for length in lengths):
        text = f"{cut} of {len(lengths)} contexts lose their beginning, as there is room for {room} tokens"
        print(f"warning: {text}: use fewer examples (--fewshot), or another task", file=sys.stderr, flush=True)


_TOKENS = 256  # the most that are generated, if a task does not say
_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p"}


class Request(Protocol):
    """A request of lm-eval."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class _Ending(NamedTuple):
    """How a text is generated and where it ends."""

    sampling: Sampling
    most_tokens: int
    stops: tuple[str, ...]


class HarnessModel:
    """A model with its tokenizer.

    A text begins with the tokens that begin a document of the run's data. No token is dropped, whatever capacity the
    model was trained with. With a `template`, contexts are what it has rendered: special tokens in them are themselves,
    and no tokens are added before.
    """

    def __init__(
        self,
        config: Config,
        where: SamplingMesh,
        params: Params,
        tokenizer: Tokenizer,
        ends: frozenset[int],
        batch_size: int,
        seed: int = 0,
        template: ChatTemplate | None = None,
    ):
        """`params` are those that `where` has loaded or placed. `ends` are the tokens that end a generated text."""
        self._config, self._tokenizer = config, tokenizer
        self._where, self._params = where, params
        self._ends, self._batch_size, self._seed = ends, batch_size, seed
        self.template = template
        self._decoders: dict[Sampling, Decoder] = {}

    def loglikelihood(self, requests: Sequence[Request]) -> list[Score]:
        """Return the log-likelihood of each continuation after its context, and whether it is the greedy one.

        `args` are the context, which may be empty, and the continuation. A context that is too long loses its
        beginning. Raises ConfigError for a continuation that is longer than a context.
        """
        spans = [self._continuation(*request.args) for request in requests]
        most = self._config.data.seq_len
        _report_cut([len(span.tokens) for span in spans], most + 1)
        spans = [ScoredSpan(span.tokens[-(most + 1) :], span.predicted) for span in spans]
        known = [span for span in spans if span.predicted]
        found = iter(scores(self._decoder(Sampling()), known, self._batch_size))
        return [next(found) if span.predicted else Score(0.0, True) for span in spans]

    def loglikelihood_rolling(self, requests: Sequence[Request]) -> list[float]:
        """Return the log-likelihood of each whole text, whose `args` are the text alone.

        Each token is predicted once, in windows as long as the context; the last window has its full length, too.
        """
        spans_by_text = [
            list(spans_of(self._encode(text), self._first_token, self._config.data.seq_len))
            for (text,) in (request.args for request in requests)
        ]
        spans = [span for own in spans_by_text for span in own]
        found = iter(scores(self._decoder(Sampling()), spans, self._batch_size))
        return [sum(next(found).log_prob for _ in own) for own in spans_by_text]

    def generate_until(self, requests: Sequence[Request]) -> list[str]:
        """Return the text after each context, up to the first of the strings of `until`, which is not part of it.

        `args` are the context and a mapping with `until`, `max_gen_toks`, and how tokens are drawn. Raises ConfigError
        for others. A context that leaves no room for so many tokens loses its beginning, but never more than what
        exceeds half of `data.seq_len`: the window moves on once it is full.
        """
        groups = defaultdict(list)
        for number, request in enumerate(requests):
            groups[self._ending(request.args[1])].append(number)
        texts: dict[int, str] = {}
        for (sampling, count, stops), numbers in groups.items():
            settings = TextSettings(sampling, count, self._seed, self._ends, stops)
            generator = TextGenerator(self._config, self._decoder(sampling), self._tokenizer, settings)
            most = self._config.data.seq_len
            room = max(most - count, most // 2, 1)
            contexts = {number: self._context(requests[number].args[0]) for number in numbers}
            _report_cut([len(each) for each in contexts.values()], room)
            contexts = {number: each[-room:] for number, each in contexts.items()}
            by_length = sorted(numbers, key=lambda number: -len(contexts[number]))
            found = generator.texts_after([contexts[number] for number in by_length], self._batch_size)
            texts |= dict(zip(by_length, found, strict=True))
        return [texts[number] for number in range(len(requests))]

    def rendered(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the template renders it, for a context. Raises DataError.

        Without `add_generation_prompt`, it ends with the text of the last message, which the model continues.
        """
        assert self.template is not None, "messages are for a chat"
        text = self.template.render(messages, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = str(messages[-1]["content"]).strip()
        return text[: text.rindex(last) + len(last)] if last in text else text

    def _decoder(self, sampling: Sampling) -> Decoder:
        if sampling not in self._decoders:
            self._decoders[sampling] = Decoder(self._where, self._params, sampling)
        return self._decoders[sampling]

    @property
    def _first_token(self) -> int:
        """The token before a text: the last of those that begin one, or that which ends the text before it."""
        return [self._tokenizer.end_of_text, *self._tokenizer.begin_of_text][-1]

    def _encode(self, text: str) -> list[int]:
        return self._checked(self._tokenizer.encode(text))

    def _encode_prompt(self, text: str) -> list[int]:
        """The tokens of a context, or of one with its continuation."""
        return self._checked(self._tokenizer.encode_markup(text)) if self.template else self._encode(text)

    def _checked(self, tokens: list[int]) -> list[int]:
        if tokens:
            check_prompt(self._config, tokens)
        return tokens

    def _context(self, text: str) -> list[int]:
        begin = [] if self.template else self._tokenizer.begin_of_text
        return [*begin, *self._encode_prompt(text)] or [self._first_token]

    def _continuation(self, context: str, continuation: str) -> ScoredSpan:
        """The tokens of both. Spaces at the end of a context belong to the continuation, as tokenizers expect."""
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        before, whole = self._context(context), self._encode_prompt(context + continuation)
        after = whole[len(self._encode_prompt(context)) :]
        most = self._config.data.seq_len
        if len(after) > most:
            raise ConfigError(
                f"a continuation of {len(after)} tokens is longer than data.seq_len={most}: set "
                f"data.seq_len={len(after)}"
            )
        return ScoredSpan([*before, *after], len(after))

    def _ending(self, options: Mapping[str, Any]) -> _Ending:
        if unknown := options.keys() - _OPTIONS:
            raise ConfigError(
                f"generation_kwargs of a task has {min(unknown)}={options[min(unknown)]}, which is not known here: use "
                f"{', '.join(sorted(_OPTIONS))}"
            )
        until = options.get("until") or ()
        stops = (until,) if isinstance(until, str) else tuple(until)
        draws = options.get("do_sample", options.get("temperature", 0) > 0)
        temperature = float(options.get("temperature", 1.0)) if draws else 0.0
        limits = (options.get(name) for name in ("top_k", "top_p", "min_p")) if draws else ()
        return _Ending(Sampling(temperature, *limits), int(options.get("max_gen_toks", _TOKENS)), stops)
