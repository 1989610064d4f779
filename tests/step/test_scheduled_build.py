"""The step that is built from a schedule: the function stays the same, whatever is cut, moved and reordered."""

import dataclasses
import functools
from typing import Any

import pytest

from moe_jax.config import Config, ExchangeConfig, ScheduleConfig
from moe_jax.models.dispatchers.protocol import CapacityState
from moe_jax.models.transformer import ComputeConfig
from moe_jax.parallel.all_to_all import ragged
from moe_jax.step.scheduled.executor import Tasks
from moe_jax.step.trainer import make_trainer
from tests.small import first_params, small_config, tokens_of
from tests.step.gradients import assert_equals_reference, assert_is_reference, mesh_of, sharded_gradients

ONE_BLOCK = {"num_layers": 1}
SLOTS: dict[str, Any] = {"moe_layer_freq": 1, "model": ONE_BLOCK}


def test_more_parts_than_slots_compute_what_the_reference_computes():
    """On eight devices; `test_every_step.py` has all else."""
    schedule = {"policy": "expert_pipeline", "microbatches": 8, "weight_grad": "greedy"}
    assert_equals_reference(small_config(2, 4, schedule=schedule, batch_size=32, seq_len=6, **SLOTS))


DROPPING: dict[str, Any] = SLOTS | {"num_shared_experts": 1, "dense_residual": True}
UNIFIED = {"policy": "unified", "microbatches": 4, "weight_grad": "greedy", "grad_reduce": "block"}


def test_without_capacity_passing_the_result_is_another(monkeypatch):
    """Each microbatch would fill all slots again and drop less; the invariant above must notice."""
    config = small_config(2, 4, schedule=UNIFIED, batch_size=32, seq_len=6, **DROPPING)
    passed = sharded_gradients(config, first_params(config.model), tokens_of(config))
    assert_is_reference(config, passed)
    capacity_of = Tasks._capacity
    monkeypatch.setattr(Tasks, "_capacity", lambda *where: forget(capacity_of(*where)))
    forgotten = sharded_gradients(config, first_params(config.model), tokens_of(config))
    with pytest.raises(AssertionError):
        assert_is_reference(config, forgotten)
    assert forgotten.parts.num_dropped_M.sum() < passed.parts.num_dropped_M.sum()
    assert abs(forgotten.loss - passed.loss) > 1e-4


def forget(capacity: CapacityState) -> CapacityState:
    return capacity._replace(used_E=0 * capacity.used_E)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_what_other_platforms_run_computes_the_same(platform, monkeypatch):
    """All but the ragged collective itself, which CPUs do not have."""
    of, move = ComputeConfig.of, ragged._move
    monkeypatch.setattr(ComputeConfig, "of", lambda *given: dataclasses.replace(of(*given), platform=platform))
    monkeypatch.setattr(ragged, "_move", lambda *given: move(*given[:-1], "cpu"))
    config = small_config(2, 4, schedule=UNIFIED, batch_size=32, seq_len=6, moe_layer_freq=1)
    assert_equals_reference(dataclasses.replace(config, exchange=ExchangeConfig(algorithm="ragged")))


def test_validation_knows_ragged_exchanges_as_padded_ones():
    """Whole batches are evaluated, which no such exchange sends."""
    losses = []
    for algorithm in ("flat", "ragged"):
        config = small_config(1, 2, schedule=UNIFIED, exchange={"algorithm": algorithm})
        trainer = make_trainer(config, mesh_of(config))
        losses.append(trainer.evaluate(first_params(config.model), tokens_of(config)))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "schedule",
    [
        {"policy": "vanilla", "weight_grad": "greedy"},
        {"policy": "unified", "microbatches": 1, "weight_grad": "greedy"},
        {"policy": "unified", "microbatches": 4, "weight_grad": "greedy", "grad_reduce": "bucketed"},
        {"policy": "expert_pipeline", "microbatches": 2, "backward_microbatches": 3},
    ],
    ids=lambda schedule: f"{schedule['policy']}-{schedule.get('microbatches', 1)}",
)
def test_a_schedule_adds_no_arithmetic(schedule):
    """Weight gradients that wait must not compute anything again, nor may cutting a batch pad it.

    With C = T slots a quarter of the batch sends a quarter of the rows. In the plain program the scan over blocks is
    unrolled, or the compiler counts one turn of it.
    """
    model = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 2, "vocab_size": 64}
    base = small_config(
        1,
        2,
        seq_len=128,
        model=model,
        moe_layer_freq=1,
        num_experts=4,
        intermediate_size=64,
        capacity_factor=2.0,
        top_k=2,
    )
    plain, scheduled = (
        dataclasses.replace(base, schedule=ScheduleConfig(**each)) for each in ({"unroll": 2}, schedule)
    )
    assert flops_of(scheduled) <= 1.01 * flops_of(plain)


@functools.cache
def flops_of(config: Config) -> float:
    trainer = make_trainer(config, mesh_of(config))
    compiled = trainer.step.lower(trainer.state_shapes, tokens_of(config)).compile()
    return float(compiled.cost_analysis()["flops"])
