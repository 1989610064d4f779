"""What only some gates do in a step: random numbers, places, samples. Each gate in each step: `test_every_step.py`."""

from typing import Any

import chex
import jax
import numpy as np
import pytest

from moe_jax.config import Config
from moe_jax.config.registry import GATE_FACTS
from moe_jax.models.gates.inputs import EVALUATION
from moe_jax.models.head import unembed
from moe_jax.models.transformer import ComputeConfig, forward
from moe_jax.parallel.mesh import one_device_mesh
from moe_jax.run.sample import sample_tokens
from tests.models.test_decode import on_one_device
from tests.small import first_params, small_config, tokens_of
from tests.step.gradients import assert_equals_reference, assert_is_reference, sharded_gradients
from tests.step.test_trainer import run_steps

SCHEDULES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "expert_pipeline": {"policy": "expert_pipeline", "microbatches": 2, "weight_grad": "greedy"},
    "unified": {"policy": "unified", "microbatches": 2, "weight_grad": "greedy", "grad_reduce": "block"},
}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 2.0},
    "deepseek_v3": {"n_group": 4, "topk_group": 2, "top_k": 3, "routed_scaling_factor": 2.0},
    "softmoe": {"slots_per_expert": 2},
    "xmoe": {"router_rank": 5, "bias": True},
    "noisy": {"top_k": 3},
    "sparsemixer": {"router_jitter_noise": 0.3},
    "expert_choice": {"capacity_factor": 1.5},
}
STEP = 5


def config_of(gate: str, mesh: tuple[int, int], schedule: str = "vanilla", **more) -> Config:
    """Two sequences on each of eight devices. A gate that does not split is not cut before the layer."""
    cut = SCHEDULES[schedule]
    if schedule == "unified" and not GATE_FACTS[gate].splits:
        cut = cut | {"microbatches": 1, "expert_chunks": 2}
    settings = (
        {"batch_size": 16, "seq_len": 6, "moe_layer_freq": 1, "capacity_factor": 1.0, "model": {"num_layers": 1}}
        | OWN.get(gate, {})
        | more
    )
    return small_config(*mesh, schedule=cut, gate=gate, **settings)


def test_blocks_that_run_in_a_loop_draw_numbers_of_their_own():
    assert_equals_reference(config_of("noisy", (2, 4), "unified", model={"num_layers": 4}), STEP)


@pytest.mark.parametrize("schedule", ["vanilla", "unified"])
def test_a_balanced_step_is_the_references_and_drops_nothing(schedule):
    """Two sequences of six tokens on each of two devices: 24 pairs for eight experts, cut or not."""
    config = config_of("balanced", (1, 2), schedule, batch_size=4)
    result = sharded_gradients(config, first_params(config.model), tokens_of(config), STEP)
    assert_is_reference(config, result, STEP)
    assert (result.parts.count_ME == 6).all()
    assert not result.parts.num_dropped_M.any()


def test_stages_see_tokens_blocks_and_steps_as_a_step_without_stages_does():
    """From the trainer's first state, and in the step after another one."""
    small = {"grad_accumulation": 4, "batch_size": 16, "seq_len": 6, "moe_layer_freq": 1, "gate": "random"}
    small |= {"model": {"num_layers": 4}}
    schedule = {"pipeline": "coscheduled", "virtual_stages": 2, "remat": "full"}
    config, plain = small_config(1, 2, pipeline=2, schedule=schedule, **small), small_config(1, 2, **small)
    (_, records), (_, expected) = run_steps(config, steps=2), run_steps(plain, steps=2)
    chex.assert_trees_all_close(records, expected, rtol=2e-5, atol=1e-7)


def test_sampling_sees_places_and_blocks_as_evaluation_does():
    config = small_config(
        1, 1, gate="random", capacity_factor=None, exchange={"rank_capacity_factor": None}, batch_size=1
    )
    params = jax.tree.map(lambda x: 3 * x, first_params(config.model))
    compute = ComputeConfig.of(config, one_device_mesh())
    text = [3, *sample_tokens(config, params, np.array([3], np.int32), 11, temperature=0, seed=0).tolist()]

    def logits(params: Any, token_BN: jax.Array) -> jax.Array:
        router_inputs = EVALUATION.router_inputs(token_BN, config.model.moe, 0)
        found = forward(params, token_BN, config.model, compute, router_inputs)
        return unembed(params, found.x_BND, config.model)

    best = on_one_device(logits)(params, np.array([text], np.int32)).argmax(axis=-1)
    assert best[0, :-1].tolist() == text[1:]


@pytest.mark.parametrize("gate", ["expert_choice", "softmoe"])
def test_gates_that_compare_tokens_can_be_sampled_from(gate):
    config = config_of(gate, (1, 1))
    tokens = sample_tokens(config, first_params(config.model), np.array([3], np.int32), 4, temperature=0, seed=0)
    assert len(tokens) == 4
