"""Generation of tokens after a batch of prompts.

A context has at most `data.seq_len` tokens, as in training: longer text is generated in windows, each of which begins
with the second half of the preceding one.
"""

import functools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from numpy.typing import NDArray

from moe_jax.models.decode import PREFILL_PIECE, DecodeState, decode, prefill, score
from moe_jax.models.precision import exact_products
from moe_jax.models.sampling import Sampling
from moe_jax.parallel.sharding import BATCH_SPEC, CACHE_SPEC, REPLICATED
from moe_jax.run.sampling_mesh import SamplingMesh

_STEPS = 8  # tokens of each row that one call draws
_FEWEST = 16  # slots
Ending = Literal["end of text", "stop", "length"]


@dataclass
class SequenceRow:
    """A prompt and the tokens after it."""

    tokens: list[int]
    known: int  # tokens of the prompt
    number: int  # among all prompts; with the seed it determines the draws
    start: int = 0  # of the window
    ended: Ending | None = None

    @property
    def new(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.known :]

    @property
    def window(self) -> list[int]:
        """The tokens of the context."""
        return self.tokens[self.start :]


class Decoder:
    """A model on the devices that generate text, with one program for each shape of a batch."""

    def __init__(self, where: SamplingMesh, params: Any, sampling: Sampling):
        """`params` are those that `where` has loaded or placed."""
        self._where, self._params = where, params
        self.context = where.config.data.seq_len
        self.compile_s = 0.0  # seconds spent on compilation so far
        self._settings: dict[str, Any] = {"model": where.config.model, "compute": where.compute, "sampling": sampling}
        self._programs: dict[Any, Callable[..., Any]] = {}

    def prefill(self, rows: Sequence[SequenceRow], slots: int, seed: int) -> DecodeState:
        """Process the windows of all rows, and draw one token for each. The cache has `slots` slots.

        The batch has more rows if these do not divide over the ranks; they come last, and stand for nothing.
        """
        windows = [row.window if row.ended is None else row.window[-1:] for row in rows]
        prompts = np.zeros((self._filled(len(rows)), shape_above(max(map(len, windows)))), np.int32)
        for own, window in zip(prompts, windows, strict=False):
            own[: len(window)] = window
        facts = [(len(window), row.number, len(row.new)) for window, row in zip(windows, rows, strict=True)]
        facts += [(1, 0, 0)] * (len(prompts) - len(rows))
        lengths, numbers, drawn = np.array(facts, np.int32).T
        found: DecodeState = self._run(_prefill, {"slots": slots}, prompts, lengths, drawn, numbers, np.int32(seed))
        return found

    def decode(self, state: DecodeState) -> tuple[np.ndarray, DecodeState]:
        """Draw further tokens [rows of the batch, steps]."""
        tokens, state = self._run(decode, {"steps": _STEPS}, state)
        return np.asarray(tokens), state

    def score(self, input_BN: NDArray[np.int32], target_BN: NDArray[np.int32]) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probability [B, N] of each target, and whether it is the likeliest token."""
        rows = len(input_BN)
        more = ((0, self._filled(rows) - rows), (0, 0))
        found = self._run(_score, {}, np.pad(input_BN, more), np.pad(target_BN, more))
        log_prob_BN, is_likeliest_BN = (np.asarray(each)[:rows] for each in found)
        return log_prob_BN, is_likeliest_BN

    def _filled(self, rows: int) -> int:
        """Return the least number of rows that divides over the ranks with different texts."""
        return -(-rows // self._where.batch_ranks) * self._where.batch_ranks

    def _run(self, function: Callable[..., Any], settings: dict[str, int], *arguments: Any) -> Any:
        in_specs, out_specs = _SPECS[function]
        if function is not decode:
            arguments = tuple(map(self._where.put, arguments, in_specs))
        leaves = jax.tree.leaves(arguments)
        name = (function, *settings.values(), *((leaf.shape, leaf.dtype) for leaf in leaves))
        if name not in self._programs:
            begun = time.perf_counter()
            body = functools.partial(function, **settings, **self._settings)
            specs = {"in_specs": (self._where.specs, *in_specs), "out_specs": out_specs}
            mapped = jax.shard_map(body, mesh=self._where.mesh, **specs, check_vma=False)
            donated = (1,) if function is decode else ()  # its memory is used again
            program = jax.jit(mapped, donate_argnums=donated)
            compute = self._where.compute
            with exact_products(compute.dtype, compute.platform):
                lowered = program.lower(self._params, *arguments)
            self._programs[name] = lowered.compile()
            self.compile_s += time.perf_counter() - begun
        return self._programs[name](self._params, *arguments)


@dataclass
class Generation:
    """The text of some prompts, which each call of `advance` extends."""

    decoder: Decoder
    rows: list[SequenceRow]
    count: int  # tokens after each prompt, at most
    seed: int
    ends: Collection[int] = ()  # tokens that end a text, and do not belong to it
    first_token_s: float | None = None  # seconds to the first tokens, without compilation
    seconds: float = 0.0  # of all calls, without compilation
    _state: DecodeState | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        count: int,
        seed: int,
        first: int = 0,
        ends: Collection[int] = (),
    ) -> "Generation":
        """Return a generation that has not begun. `first` is the number of the first prompt."""
        rows = [SequenceRow(list(prompt), len(prompt), number) for number, prompt in enumerate(prompts, first)]
        return cls(decoder, rows, count, seed, ends)

    @property
    def is_done(self) -> bool:
        """Whether all rows have ended."""
        return all(row.ended for row in self.rows)

    def advance(self) -> None:
        """Extend all rows that have not ended by at least one token. A caller may end rows between two calls."""
        begun, compiled = time.perf_counter(), self.decoder.compile_s
        context = self.decoder.context
        live = [row for row in self.rows if row.ended is None]
        full = [row for row in live if len(row.window) >= context]
        if self._state is None or full:
            for row in full:
                row.start = len(row.tokens) - max(1, context // 2)
            self._state = self.decoder.prefill(self.rows, self._slots(), self.seed)
            tokens = np.asarray(self._state.token_B)[:, None]
        else:
            tokens, self._state = self.decoder.decode(self._state)
        for row, drawn in zip(self.rows, tokens.tolist(), strict=False):
            self._append(row, drawn)
        self.seconds += time.perf_counter() - begun - (self.decoder.compile_s - compiled)
        if self.first_token_s is None:
            self.first_token_s = self.seconds

    def _slots(self) -> int:
        return shape_above(min(self.decoder.context, max(row.known for row in self.rows) + self.count))

    def _append(self, row: SequenceRow, drawn: list[int]) -> None:
        for token in drawn:
            if row.ended is not None or len(row.window) >= self.decoder.context:
                return  # what follows a full window was drawn without a slot
            if token in self.ends:
                row.ended = "end of text"
                return
            row.tokens.append(token)
            if len(row.new) >= self.count:
                row.ended = "length"


def _prefill(
    params: Any,
    prompt_BN: jax.Array,
    length_B: jax.Array,
    drawn_B: jax.Array,
    number_B: jax.Array,
    seed: jax.Array,
    **settings: Any,
) -> DecodeState:
    """Call `prefill` with a key for each prompt, by its number."""
    key_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), number_B)
    return prefill(params, prompt_BN, length_B, key_B, drawn_B, **settings)


def _score(params: Any, input_BN: jax.Array, target_BN: jax.Array, *, sampling: Sampling, **settings: Any) -> Any:
    """Call `score`, which draws nothing."""
    return score(params, input_BN, target_BN, **settings)


_spec_of: Any = DecodeState  # of a field each, instead of arrays
_STATE = _spec_of(CACHE_SPEC, *[BATCH_SPEC] * 4)
_SPECS: dict[Callable[..., Any], tuple[Any, Any]] = {  # of arguments after the parameters, and of results
    _prefill: ((BATCH_SPEC, BATCH_SPEC, BATCH_SPEC, BATCH_SPEC, REPLICATED), _STATE),
    decode: ((_STATE,), (BATCH_SPEC, _STATE)),
    _score: ((BATCH_SPEC, BATCH_SPEC), (BATCH_SPEC, BATCH_SPEC)),
}


def shape_above(tokens: int) -> int:
    """Return the power of 2 from `tokens` on, of which few exist: each is a program of its own."""
    size = max(_FEWEST, 1 << (tokens - 1).bit_length())
    assert size <= PREFILL_PIECE or size % PREFILL_PIECE == 0, "both are powers of 2"
    return size
