"""Tokens through each dispatcher and back, with identity experts: rows that name their token show where each pair went.

T tokens, E experts, k choices, P expert ranks with L experts on each.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config import MoEConfig
from moe_jax.models import routing
from moe_jax.models.dispatchers import DISPATCHERS
from moe_jax.models.dispatchers.protocol import Buffer, CapacityState, ExpertRows, buffer_of
from moe_jax.models.gates.choice import TopKRouting
from tests import references

TOKENS, EXPERTS = 24, 8
# What a token carries: its number, counted from 1, so that a row of 0 is empty; and that number squared.
PAYLOAD = np.arange(1, TOKENS + 1, dtype=np.float32)[:, None] ** [1, 2]

every_case = pytest.mark.parametrize(
    ("choices", "ranks", "skewed"), [(1, 1, False), (2, 1, True), (2, 4, False), (3, 4, True)]
)
every_dispatcher = pytest.mark.parametrize("name", DISPATCHERS)


def moe_of(name: str, choices: int) -> MoEConfig:
    factor = None if name == "dropless" else 1.0
    return MoEConfig(num_experts=EXPERTS, top_k=choices, capacity_factor=factor)


def choice_of(choices: int, skewed: bool) -> TopKRouting:
    """Random distinct experts for each token; skewed: two thirds of the tokens all want the last ones."""
    rng = np.random.default_rng(choices)
    expert_Tk = np.stack([rng.permutation(EXPERTS)[:choices] for _ in range(TOKENS)])
    if skewed:
        expert_Tk[::3] = expert_Tk[1::3] = np.arange(EXPERTS - choices, EXPERTS)
    weight_Tk = rng.uniform(0.1, 1, expert_Tk.shape).astype(np.float32)
    prob_TE = np.full((TOKENS, EXPERTS), 1 / EXPERTS, np.float32)
    return TopKRouting(expert_Tk.astype(np.int32), weight_Tk, prob_TE)  # in numpy, which compiles nothing to cut it


class Journey(NamedTuple):
    """What became of the tokens of a device, of all its parts together."""

    places: list[tuple[int, int, int]]  # expert, place among this device's pairs for it, token
    num_dropped: int
    returned_TD: np.ndarray  # what the tokens get back

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return [(expert, token) for expert, _, token in self.places]


@functools.partial(jax.jit, static_argnames=("name", "moe", "ranks", "slots", "parts", "buffer"))
def send_and_return(
    x_TD: jax.Array,
    choice: TopKRouting,
    used_E: jax.Array,
    *,
    name: str,
    moe: MoEConfig,
    ranks: int,
    slots: int,
    parts: int,
    buffer: Buffer | None,
) -> tuple[ExpertRows, jax.Array, jax.Array]:
    """What is sent, how many pairs were dropped, and what identity experts give back."""
    dispatcher = DISPATCHERS[name]
    sent, metadata = dispatcher.permute(x_TD, choice, moe, ranks, CapacityState(slots, used_E, parts, buffer))
    return sent, metadata.num_dropped, dispatcher.unpermute(sent.rows, metadata)


@functools.cache
def there_and_back(
    name: str,
    choices: int,
    ranks: int,
    skewed: bool,
    sizes: tuple[int, ...] = (TOKENS,),
    buffer: Buffer | None = None,
) -> Journey:
    """Tokens in parts of these sizes, each with the slots that the parts before it left."""
    moe, choice = moe_of(name, choices), choice_of(choices, skewed)
    slots = routing.expert_capacity(moe, TOKENS)
    used_E, first = np.zeros(EXPERTS, np.int32), 0
    places, dropped, returned = [], 0, []
    for size in sizes:
        part = slice(first, first + size)
        own = jax.tree.map(lambda leaf, part=part: leaf[part], choice)
        static = {"name": name, "moe": moe, "ranks": ranks, "slots": slots, "parts": len(sizes), "buffer": buffer}
        sent, num_dropped, returned_TD = jax.device_get(send_and_return(PAYLOAD[part], own, used_E, **static))
        places += places_in(ROWS_OF[name](sent, ranks), used_E)
        dropped += int(num_dropped)
        returned.append(returned_TD)
        used_E = used_E + np.bincount(np.ravel(own.expert_Tk), minlength=EXPERTS).astype(np.int32)
        first += size
    return Journey(places, dropped, np.concatenate(returned))


def rows_of_slots(sent: ExpertRows, ranks: int) -> list[np.ndarray]:
    """Each expert's slots, empty ones included."""
    assert sent.rows.shape[:2] == (ranks, EXPERTS // ranks)
    return list(sent.rows.reshape(EXPERTS, -1, 2))


def rows_of_dropless(sent: ExpertRows, ranks: int) -> list[np.ndarray]:
    """Each expert's rows, as many as the sizes say."""
    assert sent.sizes.shape == (ranks, EXPERTS // ranks)
    return [rows for sent_to in zip(sent.rows, sent.sizes, strict=True) for rows in rows_of_counts(*sent_to)]


def rows_of_counts(rows_WD: np.ndarray, count_E: np.ndarray) -> list[np.ndarray]:
    """Rows sorted by expert, as many as the counts say."""
    *experts, rest = np.split(rows_WD, np.cumsum(count_E))
    assert not rest.any(), "rows that belong to no expert are 0"
    assert all(rows.all() for rows in experts), "an empty row is sent"
    return experts


ROWS_OF: dict[str, Callable[..., list[np.ndarray]]] = {
    "capacity": rows_of_slots,
    "one_hot": rows_of_slots,
    "ragged": lambda sent, _: rows_of_counts(sent.rows, sent.sizes),
    "dropless": rows_of_dropless,
}


def places_in(experts: list[np.ndarray], used_E: np.ndarray) -> list[tuple[int, int, int]]:
    """Who sits where, by what the rows carry; places continue where the parts before have ended."""
    places = []
    for expert, rows in enumerate(experts):
        for place in np.flatnonzero(rows[:, 0]):
            token = int(rows[place, 0]) - 1
            np.testing.assert_array_equal(rows[place], PAYLOAD[token], err_msg="a row is one whole token")
            places.append((expert, int(used_E[expert] + place), token))
    return places


def kept_by_definition(name: str, choices: int, skewed: bool) -> np.ndarray:
    """Which pairs find a slot [T, E]."""
    chosen_TE = np.zeros((TOKENS, EXPERTS), bool)
    np.put_along_axis(chosen_TE, np.asarray(choice_of(choices, skewed).expert_Tk), True, axis=1)
    return references.keep(chosen_TE, moe_of(name, choices))


@every_case
@every_dispatcher
def test_each_kept_pair_is_sent_once_and_to_its_expert(name, choices, ranks, skewed):
    journey = there_and_back(name, choices, ranks, skewed)
    pairs, num_dropped = journey.pairs, journey.num_dropped
    assert len(set(pairs)) == len(pairs), "a pair is sent twice"
    assert len(pairs) + num_dropped == TOKENS * choices
    kept_TE = kept_by_definition(name, choices, skewed)
    assert sorted(pairs) == [tuple(pair) for pair in np.argwhere(kept_TE.T).tolist()]
    if name != "dropless":
        assert num_dropped > 0, "this case is meant to drop"


@every_case
@every_dispatcher
def test_each_token_gets_its_own_row_back_times_the_weights_of_its_kept_pairs(name, choices, ranks, skewed):
    returned_TD = there_and_back(name, choices, ranks, skewed).returned_TD
    expert_Tk, weight_Tk, *_ = choice_of(choices, skewed)
    keep_mask_Tk = np.take_along_axis(kept_by_definition(name, choices, skewed), np.asarray(expert_Tk), axis=1)
    total_T = np.where(keep_mask_Tk, weight_Tk, 0).sum(axis=1)
    np.testing.assert_allclose(returned_TD, total_T[:, None] * PAYLOAD, rtol=1e-6)


@every_case
@pytest.mark.parametrize("name", ["one_hot", "ragged"])
def test_every_dispatcher_with_a_capacity_fills_the_same_slots(name, choices, ranks, skewed):
    expected, journey = (there_and_back(each, choices, ranks, skewed) for each in ("capacity", name))
    assert journey.places == expected.places
    assert journey.num_dropped == expected.num_dropped


@every_case
@every_dispatcher
@pytest.mark.parametrize("sizes", [(12, 12), (6, 6, 6, 6), (4, 12, 8)])
def test_parts_of_a_batch_fill_the_slots_that_the_whole_batch_fills(sizes, name, choices, ranks, skewed):
    """Capacity passing: the same pairs are kept, each in the same slot of the same expert, bit for bit."""
    whole, parts = (there_and_back(name, choices, ranks, skewed, each) for each in ((TOKENS,), sizes))
    assert sorted(parts.places) == sorted(whole.places)
    assert parts.num_dropped == whole.num_dropped
    np.testing.assert_allclose(parts.returned_TD, whole.returned_TD, rtol=1e-6)


LENGTH = 6  # of a sequence: TOKENS are four
every_buffer = pytest.mark.parametrize(
    ("choices", "ranks", "skewed", "factor"),
    [(1, 8, True, 1.0), (2, 4, False, 1.0), (3, 4, True, 1.1), (3, 2, True, 1.3)],
)


@every_buffer
@pytest.mark.parametrize("sizes", [(24,), (12, 12), (6, 6, 6, 6), (6, 12, 6)])
def test_a_buffer_keeps_the_first_rows_of_each_sequence_and_counts_the_others(sizes, choices, ranks, skewed, factor):
    """The same ones, however sequences are put together."""
    buffer = buffer_of(moe_of("dropless", choices), factor, LENGTH, ranks)
    journey = there_and_back("dropless", choices, ranks, skewed, sizes, buffer)
    choice = choice_of(choices, skewed)
    moe, sequences = moe_of("dropless", choices), np.split(np.asarray(choice.expert_Tk), TOKENS // LENGTH)
    kept_TE = np.concatenate([references.keep_in_buffer(each, moe, (factor, ranks)) for each in sequences])
    assert sorted(journey.pairs) == [tuple(pair) for pair in np.argwhere(kept_TE.T).tolist()]
    assert journey.num_dropped == TOKENS * choices - kept_TE.sum() > 0
    keep_mask_Tk = np.take_along_axis(kept_TE, np.asarray(choice.expert_Tk), axis=1)
    total_T = np.where(keep_mask_Tk, choice.weight_Tk, 0).sum(axis=1)
    np.testing.assert_allclose(journey.returned_TD, total_T[:, None] * PAYLOAD, rtol=1e-6)


def test_a_buffer_is_a_multiple_of_the_even_share_until_nothing_can_exceed_it():
    moe = moe_of("dropless", 2)
    assert buffer_of(moe, 1.5, 100, 8) == Buffer(rows=38, tokens=100)
    assert buffer_of(moe, 1.1, 100, 4).rows == 55  # as written: floats would give 56
    assert buffer_of(moe, 4.0, 100, 4) is None
    assert buffer_of(moe, None, 100, 8) is None
    assert buffer_of(moe_of("capacity", 2), 1.5, 100, 8) is None


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0])
def test_a_buffer_takes_no_more_memory_than_it_has_rows(factor):
    moe, choice = moe_of("dropless", 2), jax.tree.map(jnp.asarray, choice_of(2, False))
    capacity = CapacityState(TOKENS, jnp.zeros(EXPERTS, jnp.int32), buffer=buffer_of(moe, factor, LENGTH, 4))
    sent, _ = DISPATCHERS["dropless"].permute(jnp.array(PAYLOAD), choice, moe, 4, capacity)
    assert sent.rows.shape[1] == factor * TOKENS * 2 / 4


def sparse_choice(tokens: int, choices: int) -> TopKRouting:
    """Random distinct experts for each token, a third of them left out, first choices too; one token has none."""
    rng = np.random.default_rng(tokens)
    expert_Tk = np.array([rng.permutation(EXPERTS)[:choices] for _ in range(tokens)], np.int32).reshape(-1, choices)
    expert_Tk[rng.random(expert_Tk.shape) < 1 / 3] = EXPERTS
    expert_Tk[1:2] = EXPERTS
    weight_Tk = rng.uniform(0.1, 1, expert_Tk.shape).astype(np.float32)
    return TopKRouting(expert_Tk, weight_Tk, np.full((tokens, EXPERTS), 1 / EXPERTS, np.float32))


@pytest.mark.parametrize(
    ("sequences", "length", "choices", "ranks"),
    [
        *((12, 2, 1, 4), (8, 3, 1, 8), (12, 2, 2, 8), (24, 1, 3, 4)),  # fewer choices in a sequence than ranks
        *((3, 1, 3, 4), (1, 2, 1, 4), (4, 6, 2, 2), (0, 2, 1, 4)),
    ],
)
@pytest.mark.parametrize("name", [*DISPATCHERS, "buffer"])
def test_choices_that_tokens_do_without_take_nobodys_slot(name, sequences, length, choices, ranks):
    tokens, dispatcher = sequences * length, name if name != "buffer" else "dropless"
    moe, choice = moe_of(dispatcher, choices), sparse_choice(tokens, choices)
    buffer = buffer_of(moe, 1.0, length, ranks) if name == "buffer" else None
    capacity = {"slots": routing.expert_capacity(moe, tokens), "parts": 1, "buffer": buffer}
    sent, num_dropped, returned_TD = jax.device_get(
        send_and_return(
            PAYLOAD[:tokens], choice, np.zeros(EXPERTS, np.int32), name=dispatcher, moe=moe, ranks=ranks, **capacity
        )
    )
    expert_Tk = np.asarray(choice.expert_Tk)
    chosen_TE = (expert_Tk[..., None] == np.arange(EXPERTS)).any(1)
    kept_TE = references.keep(chosen_TE, moe)
    if name == "buffer":
        assert buffer is not None, "there is room for all"
        own = np.split(expert_Tk, sequences) if sequences else []
        kept = [references.keep_in_buffer(each, moe, (1.0, ranks)) for each in own]
        kept_TE = np.concatenate([kept_TE[:0], *kept])
    pairs = [
        (expert, token) for expert, _, token in places_in(ROWS_OF[dispatcher](sent, ranks), np.zeros(EXPERTS, int))
    ]
    assert sorted(pairs) == [tuple(pair) for pair in np.argwhere(kept_TE.T).tolist()]
    assert num_dropped == (chosen_TE & ~kept_TE).sum()
    keep_mask_Tk = np.take_along_axis(np.pad(kept_TE, ((0, 0), (0, 1))), expert_Tk, axis=1)
    total_T1 = np.where(keep_mask_Tk, choice.weight_Tk, 0).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(returned_TD, total_T1 * PAYLOAD[:tokens], rtol=1e-6)
