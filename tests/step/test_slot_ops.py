"""Where a step's routers put the tokens: the same slot of the same expert for each, however the batch is cut.

T tokens, M blocks, E experts, k choices.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.models.parameters import param_dims
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.mesh import expert_axis
from moe_jax.parallel.sequence_shards import local_tokens
from moe_jax.parallel.sharding import BATCH_SPEC, partitions
from moe_jax.step.scheduled.build import make_plan
from moe_jax.step.scheduled.executor import Tasks
from moe_jax.step.scheduled.scan_residuals import BlockConsts
from moe_jax.step.scheduled.step_dims import StepDims
from tests.small import block_params, first_params, small_config, tokens_of
from tests.step.gradients import mesh_of

MESHES = [(1, 1), (2, 4)]


@functools.cache
def slots_of(mesh: tuple[int, int], policy: str, microbatches: int) -> np.ndarray:
    """The slot in which each token is sent to each expert, counted from 1; 0: it is not sent [T, M, E]."""
    schedule = {"policy": policy, "microbatches": microbatches}
    config = small_config(*mesh, schedule=schedule, batch_size=32, seq_len=6, moe_layer_freq=1)
    devices = mesh_of(config)
    plan, compute = make_plan(config, devices), ComputeConfig.of(config, devices)

    def body(params: Any, token_BN1: jax.Array) -> jax.Array:
        tokens = token_BN1[:, 1:].size
        blocks = dict(enumerate(block_params(params, config.model)))
        facts = StepDims(config, compute, plan.schedule.shape, tokens, tokens, tokens)
        tasks = Tasks(facts, params, BlockConsts(blocks), local_tokens(token_BN1))
        found: list[list[jax.Array]] = [[] for _ in blocks]
        for action in plan.schedule.actions:
            if action.direction == "F":
                tasks.forward(action)
                if action.op == "attend":
                    found[action.block].append(slots_in(tasks, action.block, action.part))
        return jnp.stack([jnp.concatenate(parts) for parts in found], axis=1)

    specs = partitions(param_dims(config.model), expert_axis(config.mesh))
    run = jax.shard_map(body, mesh=devices, in_specs=(specs, BATCH_SPEC), out_specs=BATCH_SPEC, check_vma=False)
    return np.asarray(jax.jit(run)(first_params(config.model), tokens_of(config)))


def slots_in(tasks: Tasks, block: int, r: int) -> jax.Array:
    """The same for a microbatch that has just been routed, by the rows of its metadata [T, E]."""
    rows, count_E = tasks.metadata[r].permutation, tasks.stats[block, r].count_E
    used_E = sum((tasks.stats[block, earlier].count_E for earlier in range(r)), start=0 * count_E)
    tokens, experts = len(rows.dest_index_Tk), len(count_E)
    width = len(rows.token_R) // experts
    expert_Tk, rank_Tk = jnp.divmod(rows.dest_index_Tk, width)  # a dropped pair: expert E, which does not exist
    slot_Tk = used_E.at[expert_Tk].get(mode="clip") + rank_Tk + 1
    empty_TE = jnp.zeros((tokens, experts), jnp.int32)
    return empty_TE.at[jnp.arange(tokens)[:, None], expert_Tk].set(slot_Tk, mode="drop")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("policy", "microbatches"),
    [("expert_pipeline", 2), ("expert_pipeline", 4), ("unified", 1), ("unified", 2), ("unified", 4)],
)
def test_every_policy_sends_each_token_to_the_same_slots(policy, microbatches, mesh):
    np.testing.assert_array_equal(slots_of(mesh, policy, microbatches), slots_of(mesh, "vanilla", 1))


@pytest.mark.parametrize("mesh", MESHES)
def test_each_device_fills_slots_in_the_order_of_its_tokens(mesh):
    """Or the maps above could be equal and wrong. C = k·T/E slots of each device: more are dropped, none is skipped."""
    devices = mesh[0] * mesh[1]
    per_device = slots_of(mesh, "vanilla", 1).reshape(devices, 192 // devices, 2, 8)
    fullest = 0
    for slot_T in per_device.transpose(0, 2, 3, 1).reshape(-1, 192 // devices):
        kept = slot_T[slot_T > 0]
        np.testing.assert_array_equal(kept, np.arange(len(kept)) + 1)
        fullest = max(fullest, len(kept))
    assert fullest == 2 * 192 // devices // 8
    assert (per_device > 0).sum() < 2 * 2 * 192, "this case is meant to drop"
