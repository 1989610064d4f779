"""The exchange, with payloads that name their sender, and the sums over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe_jax.parallel.all_to_all import EXCHANGES
from moe_jax.parallel.grad_sync import global_norm, sync_gradients
from moe_jax.parallel.mesh import BATCH_AXES, Axis
from moe_jax.parallel.ranks import Ranks
from moe_jax.parallel.sharding import partition, sharded_axes
from moe_jax.parallel.zero import unsharded_specs
from tests.parallel.per_device import on_mesh


def per_device(function, out_specs, *arguments, data=2, expert=4, in_specs=None):
    return on_mesh(function, in_specs or P(), out_specs, data=data, expert=expert)(*arguments)


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("expert", [1, 2, 8])
def test_block_p_goes_to_rank_p_and_comes_back(name, expert):
    exchange, ranks = EXCHANGES[name], Ranks(Axis.EXPERT, "cpu")

    def body():
        me = jax.lax.axis_index(Axis.EXPERT)
        sent = jnp.stack([jnp.full((3,), 100 * me + to) for to in range(expert)])  # sender, receiver
        received = exchange(sent, ranks)
        return sent[None], received[None], exchange(received, ranks)[None]

    sent, received, back = per_device(body, P(BATCH_AXES), data=8 // expert, expert=expert)
    for device in range(8):
        group, rank = divmod(device, expert)
        for source in range(expert):
            np.testing.assert_array_equal(received[device, source], 100 * source + rank)
            np.testing.assert_array_equal(received[device, source], sent[group * expert + source, rank])
    np.testing.assert_array_equal(back, sent)


@pytest.mark.parametrize("name", EXCHANGES)
def test_gradients_travel_back_to_the_sender(name):
    def body(x):
        def loss(x):
            received = EXCHANGES[name](x, Ranks(Axis.EXPERT, "cpu"))
            return (received * (1.0 + jax.lax.axis_index(Axis.EXPERT))).sum()

        return jax.grad(loss)(x)

    gradient = per_device(body, P(BATCH_AXES), jnp.ones((32, 3)), in_specs=P(BATCH_AXES))
    # row r of a device went to rank r, which weighs it with r + 1
    np.testing.assert_array_equal(gradient, np.tile(np.arange(1.0, 5.0)[:, None], (8, 3)))


def test_replicated_gradients_are_summed_everywhere_and_expert_gradients_over_data():
    def body():
        rank = 1.0 + jax.lax.axis_index(BATCH_AXES)  # 1..8, expert ranks within data ranks
        grads = {"replicated": rank[None], "expert": rank[None]}
        specs = {"replicated": P(), "expert": partition(("experts",))}
        synced = sync_gradients(grads, specs, unsharded_specs(specs), "cpu")
        return synced["replicated"], synced["expert"], global_norm(synced, specs, "cpu")

    replicated, expert, norm = per_device(body, (P(), P(Axis.EXPERT), P()))
    assert replicated == 36
    np.testing.assert_array_equal(expert, [1 + 5, 2 + 6, 3 + 7, 4 + 8])
    np.testing.assert_allclose(norm, np.linalg.norm([36, 6, 8, 10, 12]), rtol=1e-6)


def test_a_mesh_axis_cuts_an_array_only_once():
    assert sharded_axes(partition(("layers", "experts", "model"))) == {"pipeline", "expert"}
    with pytest.raises(ValueError, match="twice"):
        partition(("batch", "experts"))
