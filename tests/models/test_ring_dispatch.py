"""Experts of a ring, which compute block by block, against those that wait for the whole exchange."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Var

from moe_jax.config import MoEConfig
from moe_jax.models.dispatch import dispatch_compute_combine
from moe_jax.models.dispatchers.protocol import ExpertRows
from moe_jax.models.grouped_products import GROUPED_PRODUCTS
from moe_jax.models.moe import run_experts
from moe_jax.parallel.mesh import Axis
from moe_jax.parallel.ranks import Ranks
from moe_jax.parallel.sharding import BATCH_SPEC
from moe_jax.parallel.tensor_dispatch import DispatchRoute
from moe_jax.step.scheduled.jaxpr_utils import variables
from tests.parallel.per_device import on_mesh
from tests.small import first_params, small_config, tokens_of
from tests.step.gradients import assert_equals_reference, sharded_gradients

RING = {"algorithm": "ring"}


@pytest.mark.parametrize(
    ("mesh", "moe"),
    [((1, 2, 2), {}), ((1, 8, 1), {"capacity_factor": None, "top_k": 3}), ((2, 4, 1), {"dispatcher": "einsum"})],
    ids=["slots", "dropless", "one-hot"],
)
def test_loss_and_gradients_equal_the_reference(mesh, moe):
    data, expert, tensor = mesh
    assert_equals_reference(small_config(data, expert, tensor=tensor, exchange=RING, num_shared_experts=1, **moe))


@pytest.mark.parametrize("hooks", ["bf16", "fp8"])
def test_hooks_round_what_travels_as_they_do_around_the_whole_exchange(hooks, exact):
    def grads(algorithm):
        config = small_config(1, 4, exchange={"algorithm": algorithm}, moe_layer_freq=1, hooks=hooks)
        return sharded_gradients(config, first_params(config.model), tokens_of(config))

    found, expected = grads("ring"), grads("flat")
    # measured with fp8, which rounds the loss by 1.3e-3: 3e-8
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-6)
    chex.assert_trees_all_close(found.grads, expected.grads, rtol=1e-4, atol=1e-6)


def test_no_product_waits_for_another_hop():
    route, moe, width = DispatchRoute("ring", Ranks(Axis.EXPERT, "cpu")), MoEConfig(num_experts=8), 4
    matrices = {"gate": (width, 6), "up": (width, 6), "down": (6, width)}
    params = {name: jnp.ones((1, *shape)) for name, shape in matrices.items()}

    def body(x):
        experts = partial(run_experts, params, moe=moe, product=GROUPED_PRODUCTS["cpu"]["blocks"])
        return dispatch_compute_combine(ExpertRows(x), experts, route, moe)

    x = jnp.ones((64, 1, 2, width))
    (program,) = jax.make_jaxpr(on_mesh(body, BATCH_SPEC, BATCH_SPEC, data=1, expert=8))(x).eqns
    (on_devices,) = program.params["jaxpr"].eqns
    hops, products = [], []

    def run(jaxpr, waits):
        """`waits` has the hops that each value came by."""
        for eqn in jaxpr.eqns:
            found = set().union(*(waits.get(var, set()) for var in variables(eqn.invars)))
            called = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
            if called is not None:
                given = (waits.get(var, set()) if isinstance(var, Var) else set() for var in eqn.invars)
                inner = run(called.jaxpr, dict(zip(called.jaxpr.invars, given, strict=True)))
                waits |= dict(zip(eqn.outvars, (inner.get(var, set()) for var in called.jaxpr.outvars), strict=True))
                continue
            if eqn.primitive.name == "ppermute":
                hops.append(eqn)
                found |= {len(hops)}
            if eqn.primitive.name == "dot_general":
                products.append(len(found))
            waits |= dict.fromkeys(eqn.outvars, found)
        return waits

    run(on_devices.params["jaxpr"], {})
    assert len(hops) == 14, "seven there, seven back"
    assert sorted(products) == [0] * 3 + [1] * 21, "three for the own rows, three for each hop"
