"""Predicted traffic against the collectives of a traced step."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from moe_jax.config import Config
from moe_jax.config.yaml_io import load_config
from moe_jax.parallel.mesh import make_mesh
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.collective_costs import CollectiveCosts
from moe_jax.plan.estimate import update_seconds
from moe_jax.plan.traffic import traffic
from moe_jax.step.trainer import make_trainer

SMALL = [
    *(
        "model.hidden_size=64",
        "model.num_layers=2",
        "model.num_attention_heads=4",
        "model.vocab_size=32",
        "model.intermediate_size=96",
    ),
    *("model.moe.num_experts=8", "model.moe.intermediate_size=48", "data.seq_len=64", "train.batch_size=16"),
    *("train.compute_dtype=float32", "schedule.policy=unified", "exchange.algorithm=flat"),
]
LATENT = "model.latent.kv_lora_rank=24 model.latent.q_lora_rank=40 model.latent.qk_rope_head_dim=8 " + (
    "model.latent.qk_nope_head_dim=16 model.latent.v_head_dim=16"
)
# of the bytes that a device holds: what leaves it, with n ranks
LEAVING = {
    "all_to_all": lambda n: 1 - 1 / n,
    "ppermute": lambda n: 1,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: 1 - 1 / n,
    "psum": lambda n: 2 * (1 - 1 / n),
    "psum_invariant": lambda n: 2 * (1 - 1 / n),
}


def sent(jaxpr: Jaxpr | ClosedJaxpr, sizes: Mapping[str, int]) -> Counter[str]:
    """Bytes that leave a device along each axis; all sums are of gradients."""
    found: Counter[str] = Counter()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, options = equation.primitive.name, equation.params
        if name in LEAVING:
            axes = options.get("axes", options.get("axis_name"))
            names = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes) if sizes[axis] > 1)
            held = sum(math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in equation.invars)
            what = {"psum": "gradients", "psum_invariant": "gradients", "all_to_all": "expert"}.get(
                name, "".join(names)
            )
            found[what] += held * LEAVING[name](math.prod(sizes[axis] for axis in names))
        for inner in _inside(options):
            for what, num_bytes in sent(inner, sizes).items():
                found[what] += num_bytes * (options["length"] if name == "scan" else 1)
    return found


def _inside(options: Mapping[str, Any]) -> Iterator[Jaxpr | ClosedJaxpr]:
    is_program = lambda x: isinstance(x, Jaxpr | ClosedJaxpr)  # noqa: E731
    return (value for value in jax.tree.leaves(list(options.values()), is_leaf=is_program) if is_program(value))


def traced(config: Config) -> Counter[str]:
    mesh = make_mesh(config.mesh, jax.devices()[: math.prod(config.mesh.sizes.values())])
    trainer = make_trainer(config, mesh)
    tokens = jax.ShapeDtypeStruct((config.train.batch_size, config.data.seq_len + 1), jnp.int32)
    return sent(trainer.step.trace(trainer.state_shapes, tokens).jaxpr, mesh.shape)


@pytest.mark.parametrize(
    "settings",
    [
        "mesh.data=2 mesh.expert=4",
        "mesh.data=2 mesh.expert=2 mesh.tensor=2",
        "mesh.data=2 mesh.expert=2 mesh.tensor=2 mesh.experts_over_tensor=true",
        "mesh.data=2 mesh.expert=2 mesh.tensor=2 exchange.tensor_form=replicated",
        "mesh.data=2 mesh.expert=2 mesh.tensor=2 model.moe.moe_layer_freq=2",
        "mesh.data=4 mesh.expert=1 mesh.tensor=2 model.moe.num_shared_experts=1",
        f"mesh.data=2 mesh.expert=2 mesh.tensor=2 {LATENT}",
        f"mesh.data=2 mesh.expert=2 mesh.tensor=2 {LATENT} model.latent.q_lora_rank=null",
        "mesh.data=1 mesh.expert=2 mesh.context=4",
        f"mesh.data=1 mesh.expert=2 mesh.context=4 {LATENT}",
        "mesh.data=1 mesh.expert=2 mesh.context=4 mesh.experts_over_context=true",
        "mesh.data=1 mesh.expert=2 mesh.context=4 exchange.context_form=all_gather",
    ],
)
def test_traffic_is_that_of_a_traced_step(settings: str) -> None:
    config = load_config(None, [*SMALL, *settings.split()])
    found, expected = traffic(config, find_cluster("cpux8")), traced(config)
    for axis in ("expert", "tensor", "context", "gradients"):
        assert found.get(axis, 0.0) == pytest.approx(expected[axis], rel=1e-3, abs=500), axis


@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.5), ("float32", 1.0)])
def test_a_pipelined_step_gathers_sharded_parameters_in_the_compute_type(dtype: str, share: float) -> None:
    """All at once before the step; with whole parameters, updated shards are gathered in float32."""
    stages = ["mesh.data=4", "mesh.pipeline=2", "train.grad_accumulation=2", f"train.compute_dtype={dtype}"]
    cluster = find_cluster("h100x8")
    whole, sharded = (load_config(None, [*SMALL, *stages, f"optimizer.zero={zero}"]) for zero in (1, 3))
    sent = [traffic(config, cluster)["parameters"] for config in (whole, sharded)]
    assert sent[1] == pytest.approx(share * sent[0])
    update_s = [update_seconds(config, cluster, CollectiveCosts(cluster)) for config in (whole, sharded)]
    assert (update_s[1] < update_s[0]) == (share < 1)
