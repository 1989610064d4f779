"""The ragged exchange, with rows that name their sender, expert and number.

P ranks, L experts on each, S rows of a sender.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.parallel.all_to_all import ragged
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.sharding import BATCH_SPEC
from tests.parallel.per_device import on_mesh

RANKS, HELD, ROWS = 4, 2, 24
COUNTS = {
    "even": np.full((RANKS, RANKS * HELD), 2, np.int32),
    "random": np.random.default_rng(0).integers(0, 4, (RANKS, RANKS * HELD)).astype(np.int32),
    "one expert wants all": np.eye(1, RANKS * HELD, 5, dtype=np.int32).repeat(RANKS, axis=0) * ROWS,
    "nothing": np.zeros((RANKS, RANKS * HELD), np.int32),
}


def there_and_back(count_PE: np.ndarray, main: int):
    """Lanes [P, L, b + w] and returned rows [P, S] of the names 10000·source + 100·expert + number."""
    experts = RANKS * HELD
    names = np.zeros((RANKS, ROWS), np.float32)
    for source in range(RANKS):
        runs = [10000 * source + 100 * e + np.arange(count_PE[source, e]) + 1 for e in range(experts)]
        flat = np.concatenate(runs)[:ROWS]
        names[source, : len(flat)] = flat
    widths = ragged.Widths(main, RANKS * ROWS - main)

    def body(rows_1S, count_1E):
        count_PE = ragged.gather_sizes(count_1E[0], Axis.EXPERT)
        main, rest = ragged.to_lanes(rows_1S[0, :, None], count_PE, widths, Axis.EXPERT, "cpu")
        back = ragged.from_lanes(main, rest, count_PE, ROWS, Axis.EXPERT, "cpu")
        lanes = jnp.concatenate([main, rest.reshape(HELD, widths.rest, 1)], axis=1)
        return lanes[None, ..., 0], back[None, :, 0], ragged.filled(count_PE, Axis.EXPERT)[None]

    run = on_mesh(body, (BATCH_SPEC, BATCH_SPEC), (BATCH_SPEC,) * 3, data=2, expert=RANKS)
    both = [np.concatenate([x, x]) for x in (names, count_PE)]  # two expert groups, each for itself
    return names, *(np.asarray(x)[RANKS:] for x in run(*both))


@pytest.mark.parametrize("main", [3, 8, RANKS * ROWS])
@pytest.mark.parametrize("counts", COUNTS)
def test_each_expert_finds_its_rows_in_order_and_each_row_comes_back(counts, main):
    count_PE = COUNTS[counts]
    names, lanes_PLR, back_PS, filled_PL = there_and_back(count_PE, main)
    for rank in range(RANKS):
        for held in range(HELD):
            expert = rank * HELD + held
            expected = [10000 * s + 100 * expert + i + 1 for s in range(RANKS) for i in range(count_PE[s, expert])]
            assert filled_PL[rank, held] == len(expected)
            np.testing.assert_array_equal(lanes_PLR[rank, held, : len(expected)], expected)
    for source in range(RANKS):
        sent = count_PE[source].sum()
        np.testing.assert_array_equal(back_PS[source, :sent], names[source, :sent])


def test_the_way_back_is_the_transpose():
    """⟨lanes(x), y⟩ = ⟨x, rows(y)⟩ with made-up cotangents y, summed over all ranks."""
    count_PE = COUNTS["random"]
    widths = ragged.Widths(5, RANKS * ROWS - 5)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(RANKS, ROWS)).astype(np.float32)
    y = rng.normal(size=(RANKS, HELD, RANKS * ROWS)).astype(np.float32)

    def body(x_1S, y_1LR, count_1E):
        count_PE = ragged.gather_sizes(count_1E[0], Axis.EXPERT)
        real = jnp.arange(RANKS * ROWS) < ragged.filled(count_PE, Axis.EXPERT)[:, None]

        def inner(rows_S):
            main, rest = ragged.to_lanes(rows_S[:, None], count_PE, widths, Axis.EXPERT, "cpu")
            lanes = jnp.concatenate([main, rest.reshape(HELD, -1, 1)], axis=1)[..., 0]
            return jnp.sum(jnp.where(real, lanes * y_1LR[0], 0))

        value, gradient = jax.value_and_grad(inner)(x_1S[0])
        sent = jnp.arange(ROWS) < count_1E.sum()
        return value[None], jnp.sum(jnp.where(sent, gradient * x_1S[0], 0))[None]

    run = on_mesh(body, (BATCH_SPEC,) * 3, (BATCH_SPEC,) * 2, data=2, expert=RANKS)
    forward, backward = run(*(np.concatenate([a, a]) for a in (x, y, count_PE)))
    np.testing.assert_allclose(np.sum(forward), np.sum(backward), rtol=1e-5)
