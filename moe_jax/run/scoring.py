"""Log-probabilities of tokens in sequences of many lengths, in batches of similar lengths, on one device."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from moe_jax.run.generation import Decoder, shape_above


class Span(NamedTuple):
    """The last tokens of a sequence, which are predicted from those before them."""

    tokens: Sequence[int]  # at least one more than those predicted
    predicted: int


class Score(NamedTuple):
    """The probability of the tokens of a span."""

    log_prob: float  # nats, summed over tokens
    is_greedy: bool  # whether each token is the likeliest one


def spans_of(tokens: Sequence[int], first: int, context: int) -> Iterator[Span]:
    """Yield spans that predict each token of a text once, with as many tokens before it as `context` allows.

    `first` is the token before the text. All spans but the last one are as long as the context, and predict all of its
    tokens; the last one is as long, and predicts what is left.
    """
    whole = [first, *tokens]
    for begin in range(0, len(tokens), context):
        end = min(begin + context, len(tokens))
        yield Span(whole[max(0, end - context) : end + 1], end - begin)


def scores(decoder: Decoder, spans: Sequence[Span], batch_size: int) -> list[Score]:
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


def _score_batch(decoder: Decoder, spans: Sequence[Span], length: int, batch_size: int) -> Iterator[Score]:
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
