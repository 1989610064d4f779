"""Steps that take experts from a record: on any mesh the experts of the record, and the same loss and gradients."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moe_jax.config import Config, MoEConfig
from moe_jax.config.registry import GATE_FACTS
from moe_jax.models.gates import gate_of
from moe_jax.models.gates.choice import TopKRouting
from moe_jax.models.gates.inputs import RouterInputs
from moe_jax.step.plain import ROUTED
from moe_jax.step.trainer import make_trainer
from tests.compiled import run_checked
from tests.step.gradients import mesh_of
from tests.step.one_step import batch_of, by_path, config_of_settings, first_state, record_of

DROPLESS = "model.moe.capacity_factor=null exchange.rank_capacity_factor=null"
RECORDS = "train.record_routing=record"
REPLAYS = f"{RECORDS} train.replay_routing=replay"
BLOCKS = "model.num_layers=4 model.moe.moe_layer_freq=2"
ALONE = "mesh.data=1 mesh.expert=1"
STEPS = {
    "tensor": "mesh.data=1 mesh.expert=2 mesh.tensor=2 optimizer.zero=3",
    "unified": "mesh.data=1 mesh.expert=4 schedule.policy=unified schedule.microbatches=2 schedule.unroll=1",
}


def config_of(words: str) -> Config:
    return config_of_settings(f"{BLOCKS} {DROPLESS} model.moe.aux_loss_coeff=0 {words} train.batch_size=16")


def step_of(config: Config, *inputs: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metrics, and gradients by the path of a parameter."""
    trainer = make_trainer(config, mesh_of(config))
    state, metrics = run_checked(trainer.step, first_state(config, trainer), batch_of(config), *inputs)
    return metrics, by_path(optax.tree_utils.tree_get(state["optimizer"], "mu"))


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config = config_of(f"{ALONE} {REPLAYS}")
    return step_of(config, None, *record_of(config))


@pytest.mark.parametrize("words", STEPS.values(), ids=STEPS)
def test_a_record_gives_the_same_step_on_other_meshes(words: str, alone: Any) -> None:
    config = config_of(f"{words} {REPLAYS}")
    assert config.train.batch_size == 16
    (record,) = record_of(config)
    metrics, grads = step_of(config, None, record)
    np.testing.assert_array_equal(metrics[ROUTED], record[[1, 3]], "the blocks with experts")
    np.testing.assert_array_equal(alone[0][ROUTED], metrics[ROUTED])
    for name in ("loss", "router_z_loss", "grad_norm"):
        assert metrics[name] == pytest.approx(alone[0][name], rel=1e-5)
    for path, grad in grads.items():
        np.testing.assert_allclose(grad, alone[1][path], rtol=2e-4, atol=2e-6, err_msg=path)
    other, _ = step_of(config, None, *record_of(config, seed=1))
    assert other["loss"] != pytest.approx(metrics["loss"], rel=1e-4), "the record matters"


def test_a_recorded_step_is_the_step_and_its_replay_too() -> None:
    """The gate's own choice, recorded on one mesh and replayed on another one, changes nothing but round-off."""
    plain, grads = step_of(config_of(ALONE))
    recording = config_of(f"{STEPS['unified']} {RECORDS}")
    recorded, _ = step_of(recording)
    assert ROUTED not in plain
    assert recorded["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    replaying = config_of(f"{ALONE} {REPLAYS}")
    replayed_LGk = np.zeros_like(record_of(replaying)[0])
    replayed_LGk[[1, 3]] = recorded[ROUTED]
    again, same = step_of(replaying, None, replayed_LGk)
    np.testing.assert_array_equal(again[ROUTED], recorded[ROUTED])
    assert again["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    for path, grad in same.items():
        np.testing.assert_allclose(grad, grads[path], rtol=2e-4, atol=2e-6, err_msg=path)


def test_padding_is_recorded_as_of_no_expert() -> None:
    config = config_of(f"mesh.data=2 mesh.expert=2 data.mask_documents=true {RECORDS}")
    metrics, _ = step_of(config)
    is_padding_G = (batch_of(config)[:, :-1] < 0).ravel()
    assert is_padding_G.any()
    np.testing.assert_array_equal((metrics[ROUTED] == config.model.moe.num_experts).all(axis=(0, 2)), is_padding_G)


REPLAYING = [name for name, facts in GATE_FACTS.items() if "bias_update_rate" in facts.settings]


@pytest.mark.parametrize("gate", REPLAYING)
def test_weights_are_those_of_the_own_scores_at_the_recorded_experts(gate: str) -> None:
    """Also of a group of experts that the gate would not have chosen, and in spite of its bias."""
    groups = {"n_group": 4, "topk_group": 2} if gate == "deepseek_v3" else {}
    moe = MoEConfig(num_experts=8, top_k=3, gate=gate, bias_update_rate=0.001, routed_scaling_factor=1.5, **groups)
    rng = np.random.default_rng(0)
    x, router = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 4), (4, 8)))
    expert = np.array([[[7, 0, 1]] * 5, [[6, 3, 2], [2, 6, 3], [4, 5, 0], [0, 1, 2], [1, 0, 7]]], np.int32)
    params = {"router": jnp.asarray(router), "score_bias": jnp.full(8, -3.0).at[4].set(100.0)}
    place = jnp.array([1, 0, 2, 4, 3])
    inputs = RouterInputs(place, place, None, jnp.int32(1), replayed_LGk=jnp.asarray(expert))
    decision = gate_of(moe)(params, jnp.asarray(x), inputs, moe).decision
    assert isinstance(decision, TopKRouting)
    np.testing.assert_array_equal(decision.expert_Tk, expert[1][place])
    logits = (x @ router).astype(np.float64)
    score = (
        np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) if gate == "softmax" else 1 / (1 + np.exp(-logits))
    )
    own = np.take_along_axis(score, expert[1][place], axis=1)
    np.testing.assert_allclose(decision.weight_Tk, 1.5 * own / own.sum(axis=1, keepdims=True), rtol=1e-5)
    assert inputs.recorded(decision.expert_Tk) is None
