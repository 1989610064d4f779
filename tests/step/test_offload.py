"""Moments in host memory: updates as without, where the arrays are, and how many are on the device at a time."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax.checkpoint.checksums import digest_program
from moe_jax.config import Config, OptimizerConfig
from moe_jax.config.yaml_io import load_config
from moe_jax.errors import ConfigError
from moe_jax.parallel.host_memory import PINNED
from moe_jax.parallel.p2p_copy import p2p_copy_shards
from moe_jax.plan.memory import step_memory
from moe_jax.step import offload
from moe_jax.step.optimizers import OPTIMIZERS
from moe_jax.step.optimizers.protocol import Parameter
from moe_jax.step.trainer import Trainer, make_trainer
from tests.compiled import run_checked
from tests.small import small_config, tokens_of
from tests.step.gradients import first_state, mesh_of
from tests.step.test_optimizers import config_with, trained, trained_once

BLOCKS = small_config(1, 1, moe_layer_freq=1, model={"num_layers": 4})
ROUNDED = {"moments_dtype": "bfloat16"}


@pytest.mark.parametrize("at_once", [offload.BYTES_AT_ONCE, 1], ids=["in as few pieces as can be", "a block at a time"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, {}) for name in OPTIMIZERS), ("adamw", ROUNDED), ("muon", ROUNDED)],
    ids=str,
)
def test_updates_are_those_of_moments_on_the_device(
    name: str, settings: dict[str, Any], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments bit for bit, and parameters but for a fused multiplication and addition; products and sums over matrices
    are added up in another order.
    """
    monkeypatch.setattr(offload, "BYTES_AT_ONCE", at_once)
    expected = trained_once(config_with(name, BLOCKS, **settings))
    found = trained(config_with(name, BLOCKS, offload_moments=True, **settings))
    if name in ("adamw", "lion"):
        chex.assert_trees_all_equal(found[1], expected[1])
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=2e-7 if name in ("adamw", "lion") else 1e-6)


def test_arrays_are_cut_into_as_few_equal_pieces_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked, single = Parameter(("layers", "model", "hidden")), Parameter(("vocab", "model"))
    block_bytes = 4 * 8 * 16
    assert offload._pieces(stacked, (1, 8, 16)) == 1
    for blocks_at_once, pieces in ((100, 2), (6, 2), (5, 3), (4, 3), (1, 12), (0.5, 12)):
        monkeypatch.setattr(offload, "BYTES_AT_ONCE", int(blocks_at_once * block_bytes))
        assert offload._pieces(stacked, (12, 8, 16)) == pieces
        assert offload._pieces(single, (12, 16)) == 1


def offloaded(**optimizer: Any) -> Config:
    config = small_config(2, 2, moe_layer_freq=2, batch_size=8, model={"num_layers": 2})
    return dataclasses.replace(config, optimizer=OptimizerConfig(offload_moments=True, **optimizer))


@pytest.mark.parametrize("zero", [0, 3])
def test_moments_of_matrices_are_in_host_memory_before_and_after_a_step(zero: Any) -> None:
    config = offloaded(zero=zero, ema_decay=0.5)
    trainer = make_trainer(config, mesh_of(config))
    tokens = jnp.zeros((config.train.batch_size, config.data.seq_len + 1), jnp.int32)
    after, _ = jax.eval_shape(trainer.step, trainer.state_shapes, tokens)
    layouts = trainer.state_shapes, trainer.step.lower(trainer.state_shapes, tokens).compile().output_shardings[0]
    for state in layouts:
        for path, leaf in jax.tree.leaves_with_path(state):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            sharding = leaf if isinstance(leaf, jax.sharding.Sharding) else leaf.sharding
            is_vector = name.endswith((".count", "norm")) or "norm" in name.rpartition(".")[2]
            is_host = name.startswith("optimizer.") and not is_vector
            assert (sharding.memory_kind == PINNED) == is_host, name
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, trainer.state_shapes)


def test_a_run_goes_on_with_and_without() -> None:
    """A bad step changes nothing, and each takes the other's state."""
    config = offloaded(zero=3, learning_rate=0.05, warmup_steps=0)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, skip_spikes=True, spike_factor=3.0))
    plain = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, offload_moments=False))
    trainers = [make_trainer(each, mesh_of(each)) for each in (config, plain)]
    states = [first_state(each, trainer) for each, trainer in zip((config, plain), trainers, strict=True)]
    batch = tokens_of(config)
    for limit in (np.inf, 0.0, np.inf):  # of the loss
        before = jax.device_get(states[0]["optimizer"])
        states = [
            run_checked(trainer.step, jax.device_put(state, _placed(trainer)), batch, np.float32(limit))[0]
            for trainer, state in zip(trainers, states, strict=True)
        ]
        if not limit:
            chex.assert_trees_all_equal(jax.device_get(states[0]["optimizer"]), before)
        chex.assert_trees_all_close(*map(jax.device_get, states), rtol=1e-5, atol=1e-6)
        states.reverse()


def _placed(trainer: Trainer) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, trainer.state_shapes)


def test_an_array_waits_for_the_one_before() -> None:
    """Barriers keep compilers from copying all moments to the device at once. CPUs have one memory."""
    known = {name: Parameter(("layers", "model", "hidden")) for name in ("a", "b", "c")} | {
        "norm": Parameter(("layers", "model"))
    }
    params = {name: jnp.ones((2, 4, 4)[: len(known[name].dims)]) for name in known}
    for platform, count in (("tpu", 3), ("gpu", 3), ("cpu", 0)):
        rule = offload.array_by_array(
            lambda some, platform=platform: OPTIMIZERS["adamw"](OptimizerConfig(), some, platform), known, platform
        )
        traced = jax.make_jaxpr(lambda x, s: rule.update(x, s, x, is_good=jnp.bool_(True)))(params, rule.init(params))  # noqa: B023
        assert sum(each.primitive.name == "optimization_barrier" for each in traced.jaxpr.eqns) == count


def test_digests_are_those_of_arrays_on_the_device() -> None:
    config = offloaded()
    mesh = mesh_of(config)
    moments = make_trainer(config, mesh).state_shapes["optimizer"]

    def filled(shape: Any, kind: str | None) -> jax.Array:
        sharding = shape.sharding if kind is None else shape.sharding.with_memory_kind(kind)
        return jax.device_put(np.arange(shape.size, dtype=np.float32).reshape(shape.shape), sharding)

    state = [filled(leaf, None) for leaf in jax.tree.leaves(moments) if leaf.ndim]
    default = mesh.devices.flat[0].default_memory().kind
    on_device = [filled(leaf, default) for leaf in jax.tree.leaves(moments) if leaf.ndim]
    assert any(leaf.sharding.memory_kind == PINNED for leaf in state)
    np.testing.assert_array_equal(digest_program(state)(state), digest_program(on_device)(on_device))


def test_safety_copies_of_moments_reach_the_other_device() -> None:
    mesh = mesh_of(small_config(2, 1))
    sharding = NamedSharding(mesh, PartitionSpec("data"), memory_kind=PINNED)
    send = p2p_copy_shards([sharding], [[(0, 1)]])
    (found,) = send([jax.device_put(np.arange(4, dtype=np.float32), sharding)])
    np.testing.assert_array_equal(found, [0, 0, 0, 1])


def test_devices_without_host_memory_are_refused() -> None:
    device = SimpleNamespace(addressable_memories=list, device_kind="abacus")
    sharding = SimpleNamespace(mesh=SimpleNamespace(devices=np.array([device])))
    with pytest.raises(ConfigError, match=r"^optimizer.offload_moments=true needs .* knows none of abacus: use opt"):
        offload.in_host_memory({"mu": {"up": sharding}}, {"up": Parameter(("model", "hidden"))})


PIPELINE = "mesh.pipeline=2 mesh.data=1 schedule.policy=vanilla schedule.microbatches=1 schedule.weight_grad=inline "
PIPELINE += "schedule.grad_reduce=end schedule.bucket_cap_mb=null"


@pytest.mark.parametrize("settings", ["mesh.data=2", PIPELINE], ids=["blocks", "pipeline"])
def test_memory_of_a_device_is_less_by_the_moments(settings: str) -> None:
    """On CPUs, whose memory is the host's, it is the same."""
    overrides = ["optimizer.zero=1", "mesh.expert=4", *settings.split()]
    config = load_config("configs/bench/fine_grained.yaml", overrides)
    moved = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, offload_moments=True))
    whole, less = step_memory(config, "tpu"), step_memory(moved, "tpu")
    assert less.optimizer == 0
    assert less.on_host == whole.optimizer
    assert less.total <= whole.total - 0.8 * whole.optimizer
    assert step_memory(moved, "cpu") == step_memory(config, "cpu")
