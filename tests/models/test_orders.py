"""Tokens through each order and back, with identity experts: rows that name their token show where each pair went.

T tokens, E experts, k choices, P expert ranks with L experts on each.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config import MoE
from moe_jax.models.gates.choice import Choice
from moe_jax.models.orders import ORDERS
from tests import references

TOKENS, EXPERTS = 24, 8
# What a token carries: its number, counted from 1, so that a row of 0 is empty; and that number squared.
PAYLOAD = np.arange(1, TOKENS + 1, dtype=np.float32)[:, None] ** [1, 2]

every_case = pytest.mark.parametrize(
    ("choices", "ranks", "skewed"), [(1, 1, False), (2, 1, True), (2, 4, False), (3, 4, True)]
)
every_order = pytest.mark.parametrize("name", ORDERS)


def moe_of(name: str, choices: int) -> MoE:
    factor = None if name == "dropless" else 1.0
    return MoE(num_experts=EXPERTS, top_k=choices, capacity_factor=factor)


def choice_of(choices: int, skewed: bool) -> Choice:
    """Random distinct experts for each token; skewed: two thirds of the tokens all want the last ones."""
    rng = np.random.default_rng(choices)
    expert_Tk = np.stack([rng.permutation(EXPERTS)[:choices] for _ in range(TOKENS)])
    if skewed:
        expert_Tk[::3] = expert_Tk[1::3] = np.arange(EXPERTS - choices, EXPERTS)
    weight_Tk = rng.uniform(0.1, 1, expert_Tk.shape).astype(np.float32)
    prob_TE = np.full((TOKENS, EXPERTS), 1 / EXPERTS, np.float32)
    return Choice(jnp.array(expert_Tk, jnp.int32), jnp.array(weight_Tk), jnp.array(prob_TE))


@functools.cache
def there_and_back(name: str, choices: int, ranks: int, skewed: bool) -> tuple[list[tuple[int, int]], int, np.ndarray]:
    """(expert, token) of every row sent, how many pairs were dropped, and what the tokens get back [T, D]."""
    order, moe = ORDERS[name], moe_of(name, choices)

    @jax.jit
    def run(x_TD, choice):
        sent, ticket = order.order(x_TD, choice, moe, ranks)
        rows = sent[0] if name == "dropless" else sent
        return sent, ticket.num_dropped, order.inverse(rows, ticket)

    sent, num_dropped, returned_TD = jax.device_get(run(jnp.array(PAYLOAD), choice_of(choices, skewed)))
    rows_of = rows_of_dropless if name == "dropless" else rows_of_slots
    return pairs_in(rows_of(sent, ranks)), int(num_dropped), returned_TD


def rows_of_slots(sent_PLCD: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Each expert's rows that are not empty."""
    assert sent_PLCD.shape[:2] == (ranks, EXPERTS // ranks)
    return [rows[rows[:, 0] != 0] for rows in sent_PLCD.reshape(EXPERTS, -1, 2)]


def rows_of_dropless(sent: tuple[np.ndarray, np.ndarray], ranks: int) -> list[np.ndarray]:
    """Each expert's rows, as many as the counts say."""
    rows_PWD, count_PL = sent
    assert count_PL.shape == (ranks, EXPERTS // ranks)
    experts: list[np.ndarray] = []
    for rows_WD, count_L in zip(rows_PWD, count_PL, strict=True):
        *own, rest = np.split(rows_WD, np.cumsum(count_L))
        assert not rest.any(), "rows that belong to no expert are 0"
        experts += own
    return experts


def pairs_in(experts: list[np.ndarray]) -> list[tuple[int, int]]:
    pairs = []
    for expert, rows in enumerate(experts):
        for row in rows:
            token = int(row[0]) - 1
            np.testing.assert_array_equal(row, PAYLOAD[token], err_msg="a row is one whole token")
            pairs.append((expert, token))
    return pairs


def kept_by_definition(name: str, choices: int, skewed: bool) -> np.ndarray:
    """Which pairs find a slot [T, E]."""
    chosen_TE = np.zeros((TOKENS, EXPERTS), bool)
    np.put_along_axis(chosen_TE, np.asarray(choice_of(choices, skewed).expert_Tk), True, axis=1)
    return references.keep(chosen_TE, moe_of(name, choices))


@every_case
@every_order
def test_each_kept_pair_is_sent_once_and_to_its_expert(name, choices, ranks, skewed):
    pairs, num_dropped, _ = there_and_back(name, choices, ranks, skewed)
    assert len(set(pairs)) == len(pairs), "a pair is sent twice"
    assert len(pairs) + num_dropped == TOKENS * choices
    kept_TE = kept_by_definition(name, choices, skewed)
    assert sorted(pairs) == [tuple(pair) for pair in np.argwhere(kept_TE.T).tolist()]
    if name != "dropless":
        assert num_dropped > 0, "this case is meant to drop"


@every_case
@every_order
def test_each_token_gets_its_own_row_back_times_the_weights_of_its_kept_pairs(name, choices, ranks, skewed):
    _, _, returned_TD = there_and_back(name, choices, ranks, skewed)
    expert_Tk, weight_Tk, _ = choice_of(choices, skewed)
    kept_Tk = np.take_along_axis(kept_by_definition(name, choices, skewed), np.asarray(expert_Tk), axis=1)
    total_T = np.where(kept_Tk, weight_Tk, 0).sum(axis=1)
    np.testing.assert_allclose(returned_TD, total_T[:, None] * PAYLOAD, rtol=1e-6)


@every_case
def test_slots_and_one_hot_fill_the_same_slots(choices, ranks, skewed):
    assert there_and_back("slots", choices, ranks, skewed)[:2] == there_and_back("one_hot", choices, ranks, skewed)[:2]
