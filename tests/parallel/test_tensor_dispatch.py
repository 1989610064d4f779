"""Every form of exchange over tensor ranks against the first one, on eight devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moe_jax.measure.hlo import parse
from moe_jax.measure.traffic import bytes_sent
from moe_jax.parallel.all_to_all import EXCHANGES
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.ranks import Ranks
from moe_jax.parallel.tensor_dispatch import FORMS, DispatchRoute
from tests.parallel.per_device import on_mesh

SPEC = PartitionSpec((Axis.EXPERT, Axis.TENSOR))
EXPERTS = {2: 4, 4: 2}  # by tensor ranks


def run(body, x, tensor, outputs=1):
    specs = (SPEC,) * outputs if outputs > 1 else SPEC
    return on_mesh(body, SPEC, specs, data=1, expert=EXPERTS[tensor], tensor=tensor)(x)


def carried(x, form, chunks, *, to_experts):
    ranks = Ranks(Axis.EXPERT, "cpu")
    return DispatchRoute("flat", ranks, form, chunks).all_to_all(
        x, EXCHANGES["flat"].bind(ranks), to_experts=to_experts
    )


@pytest.mark.parametrize("tensor", EXPERTS)
@pytest.mark.parametrize("form", FORMS)
def test_every_row_reaches_all_tensor_ranks_of_its_expert_rank_and_the_sum_comes_back(form, tensor):
    """Rows are stamped with the device that sends them and the expert rank they are for."""
    experts = EXPERTS[tensor]

    def body(_):
        me = jax.lax.axis_index(Axis.EXPERT) * tensor + jax.lax.axis_index(Axis.TENSOR)
        sent = jnp.stack([jnp.full((3, 5), 10.0 * me + to) for to in range(experts)])
        received = carried(sent, form, 2, to_experts=True)
        return received[None], carried(received, form, 2, to_experts=False)[None]

    received, back = run(body, jnp.zeros(8), tensor, outputs=2)
    for device in range(8):
        to = device // tensor
        sources = [10 * (expert * tensor + rank) + to for rank in range(tensor) for expert in range(experts)]
        np.testing.assert_array_equal(received[device][:, 0, 0], sources)
        np.testing.assert_array_equal(back[device][:, 0, 0], [tensor * (10 * device + to) for to in range(experts)])


@pytest.mark.parametrize("tensor", EXPERTS)
@pytest.mark.parametrize("chunks", [1, 3, 9])
@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 3), (1, 0, 4)])
def test_all_forms_give_the_same_bits_and_gradients(shape, chunks, tensor):
    x = np.random.default_rng(chunks).normal(size=(8 * EXPERTS[tensor], *shape)).astype(np.float32)
    weight = np.random.default_rng(9).normal(size=(tensor * EXPERTS[tensor], *shape)).astype(np.float32)

    def body(x, form):
        def loss(x):
            received = jnp.sin(carried(x, form, chunks, to_experts=True)) * weight
            back = carried(received, form, chunks, to_experts=False)
            return jnp.sum(back * x), (received, back)

        grad, (received, back) = jax.grad(loss, has_aux=True)(x)
        return received, back, grad

    expected = run(partial(body, form="replicated"), x, tensor, outputs=3)
    for form in FORMS:
        found = run(partial(body, form=form), x, tensor, outputs=3)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=form)


@pytest.mark.parametrize("tensor", EXPERTS)
@pytest.mark.parametrize("form", FORMS)
def test_the_compiled_all_to_all_sends_a_part_of_the_rows(form, tensor):
    experts, rows, width = EXPERTS[tensor], 6, 16

    def body(x):
        return carried(2 * x, form, 2, to_experts=True) + 1

    x = jax.ShapeDtypeStruct((8 * experts, rows, width), jnp.float32)
    lowered = on_mesh(body, SPEC, SPEC, data=1, expert=experts, tensor=tensor).lower(x)
    own = 4 * rows * width * (experts - 1)
    sent = bytes_sent(parse(lowered.compile().as_text()), "all-to-all", 8)
    assert sent == (own * tensor if form == "replicated" else own)
