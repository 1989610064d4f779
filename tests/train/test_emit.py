"""The step that is emitted from a schedule: the function stays the same, whatever is cut, moved and reordered."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import numpy as np
import pytest

from moe_jax.config import Config, Exchange, Schedule
from moe_jax.models.orders.protocol import Room
from moe_jax.models.transformer import Computation
from moe_jax.parallel.all_to_all import ragged
from moe_jax.train.step import make_trainer
from moe_jax.train.tasks import Tasks
from tests.pairwise import Case, all_pairs
from tests.small import first_params, small_config, tokens_of
from tests.train.gradients import assert_equals_reference, assert_is_reference, mesh_of, sharded_gradients
from tests.train.test_step import run_steps

MESHES = [(1, 1), (8, 1), (2, 4), (1, 8)]

ONE_BLOCK = {"num_layers": 1}
MODELS: dict[str, dict[str, Any]] = {
    "slots": {"every": 1},
    "dropless": {"every": 1, "capacity_factor": None, "normalize_weights": False, "model": ONE_BLOCK},
    "buffered": {
        "every": 1,
        "capacity_factor": None,
        "top_k": 3,
        "exchange": {"buffer_factor": 1.0},
        "model": ONE_BLOCK,
    },
    "one-hot": {"every": 1, "order": "einsum", "capacity_factor": 0.8, "top_k": 1, "model": ONE_BLOCK},
    "tied": {
        "every": 1,
        "num_shared_experts": 1,
        "dense_residual": True,
        "model": ONE_BLOCK | {"tie_embeddings": True, "activation": "gelu"},
    },
    "dense-between": {"every": 2, "gate": "sigmoid", "top_k": 3, "model": {"num_layers": 4, "qk_norm": True}},
    "dense": {"num_experts": 0},
    "by-score": {"every": 1, "gate": "batch_prioritised", "capacity_factor": 0.8, "model": ONE_BLOCK},
}

# A sum of 0.002 MB is 500 elements; the model's matrices have 256 and more.
GRAD_REDUCES: dict[str, dict[str, Any]] = {
    "end": {"grad_reduce": "end"},
    "block": {"grad_reduce": "block"},
    "matrices": {"grad_reduce": "chunked"},
    "chunks": {"grad_reduce": "chunked", "chunk_mb": 0.002},
}

CUTS = [
    {"policy": policy, "microbatches": forward, "backward_microbatches": backward}
    for policy, forward, backward in [
        ("vanilla", 1, None),
        *(("expert_pipeline", forward, backward) for forward, backward in [(2, None), (4, None), (2, 3)]),
        *(("unified", forward, backward) for forward, backward in [(1, None), (2, None), (4, None), (2, 1), (4, 2)]),
    ]
]

FACTORS: dict[str, list[Any]] = {
    "weight_grad": ["inline", "greedy"],
    "grad_reduce": list(GRAD_REDUCES),
    "mesh": MESHES,
    "model": ["slots", "dropless", "one-hot", "tied"],
    "reduction": ["all_reduce", "scatter_gather", "ring", "background"],
    "exchange": ["flat", "ring", "background"],
    "remat": ["none", "dots", "full"],
}
CASES = all_pairs(CUTS, FACTORS)
# What only some cuts or models have, in few cases each.
CASES += all_pairs(
    [cut for cut in CUTS if cut["policy"] == "unified" and cut["microbatches"] == 4],
    {
        "weight_grad": FACTORS["weight_grad"],
        "grad_reduce": ["chunks"],
        "mesh": [(2, 4), (1, 8)],
        "model": ["slots", "tied"],
        "reduction": ["all_reduce"],
        "exchange": ["ragged"],
        "remat": ["none"],
    },
)
USUAL = {
    "weight_grad": "greedy",
    "grad_reduce": "block",
    "reduction": "all_reduce",
    "exchange": "flat",
    "remat": "none",
}
CASES += [
    {"policy": policy, "microbatches": microbatches, "backward_microbatches": None, "mesh": mesh, "model": model}
    | USUAL
    for policy, microbatches, mesh, model in [
        ("unified", 2, (2, 4), "dense-between"),
        ("unified", 2, (8, 1), "dense"),
        ("expert_pipeline", 8, (2, 4), "tied"),  # more parts than slots: some are empty
        ("expert_pipeline", 2, (2, 4), "by-score"),
        ("vanilla", 1, (2, 4), "buffered"),
        ("vanilla", 1, (1, 8), "buffered"),
        ("unified", 4, (2, 4), "buffered"),
        ("unified", 2, (1, 8), "buffered"),
        ("expert_pipeline", 3, (1, 8), "buffered"),
    ]
]


# microbatches whose slots are cut
CASES += [
    {"policy": "unified", "microbatches": forward, "backward_microbatches": backward, "expert_chunks": chunks}
    | {"mesh": (2, 4), "model": model}
    | (USUAL if model == "tied" else USUAL | {"exchange": "background", "grad_reduce": "chunks", "remat": "full"})
    for forward, backward, chunks, model in [
        (1, None, 3, "slots"),
        (2, None, 2, "dropless"),
        (4, 2, 3, "tied"),
        (2, 1, 2, "buffered"),
    ]
]


def config_of(case: Case) -> Config:
    names = {*CUTS[0], "expert_chunks", "weight_grad", "remat"}
    schedule = {name: value for name, value in case.items() if name in names} | GRAD_REDUCES[case["grad_reduce"]]
    model = {"exchange": {"buffer_factor": None}} | MODELS[case["model"]]
    exchange = {"algorithm": case["exchange"], "reduction": case["reduction"], **model.pop("exchange")}
    # 32 sequences: 4 for each of 8 devices
    return small_config(*case["mesh"], schedule=schedule, exchange=exchange, batch_size=32, seq_len=6, **model)


def name_of(case: Case) -> str:
    return "-".join(str(value).replace(" ", "") for value in case.values() if value is not None)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_schedule_computes_what_the_reference_computes(case):
    """Every two settings meet in some case; loss, its parts, counts and all gradients."""
    assert_equals_reference(config_of(case))


UNIFIED = {"policy": "unified", "microbatches": 4, "weight_grad": "greedy", "grad_reduce": "block"}


def test_without_capacity_passing_the_result_is_another(monkeypatch):
    """Each microbatch would fill all slots anew and drop less; the invariant above must notice."""
    config = small_config(2, 4, schedule=UNIFIED, batch_size=32, seq_len=6, **MODELS["tied"])
    passed = sharded_gradients(config, first_params(config.model), tokens_of(config))
    assert_is_reference(config, passed)
    room_of = Tasks._room
    monkeypatch.setattr(Tasks, "_room", lambda *where: forget(room_of(*where)))
    forgotten = sharded_gradients(config, first_params(config.model), tokens_of(config))
    with pytest.raises(AssertionError):
        assert_is_reference(config, forgotten)
    assert forgotten.parts.num_dropped_M.sum() < passed.parts.num_dropped_M.sum()
    assert abs(forgotten.loss - passed.loss) > 1e-4


def forget(room: Room) -> Room:
    return room._replace(used_E=0 * room.used_E)


@pytest.mark.parametrize(("algorithm", "weight_grad"), [("auto", "greedy"), ("ragged", "inline")])
def test_half_precision_is_as_exact_as_without_a_schedule(algorithm, weight_grad):
    exact = small_config(2, 4, batch_size=32, seq_len=6, every=1, model=ONE_BLOCK)
    plain = dataclasses.replace(exact, train=dataclasses.replace(exact.train, compute_dtype="bfloat16"))
    scheduled = dataclasses.replace(
        plain,
        schedule=Schedule(**UNIFIED | {"weight_grad": weight_grad}),
        exchange=Exchange(algorithm=algorithm),
    )
    params, token_BN1 = first_params(exact.model), tokens_of(exact)
    expected, *results = (sharded_gradients(each, params, token_BN1) for each in (exact, plain, scheduled))
    errors = [norm(jax.tree.map(np.subtract, result.grads, expected.grads)) for result in results]
    assert errors[1] < 1.2 * errors[0]
    assert errors[0] < 0.2 * expected.norm
    np.testing.assert_allclose(results[1].loss, expected.loss, rtol=0.01)
    assert {leaf.dtype for leaf in jax.tree.leaves(results[1].grads)} == {np.dtype("float32")}


def norm(tree: Any) -> float:
    return float(np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(tree))))


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_what_other_platforms_run_computes_the_same(platform, monkeypatch):
    """All but the irregular collective itself, which CPUs do not have."""
    of, move = Computation.of, ragged._move
    monkeypatch.setattr(Computation, "of", lambda *given: dataclasses.replace(of(*given), platform=platform))
    monkeypatch.setattr(ragged, "_move", lambda *given: move(*given[:-1], "cpu"))
    config = small_config(2, 4, schedule=UNIFIED, batch_size=32, seq_len=6, **MODELS["slots"])
    assert_equals_reference(dataclasses.replace(config, exchange=Exchange(algorithm="ragged")))


def test_validation_knows_irregular_exchanges_as_padded_ones():
    """Whole batches are evaluated, which no such exchange sends."""
    losses = []
    for algorithm in ("flat", "ragged"):
        config = small_config(1, 2, schedule=UNIFIED, exchange={"algorithm": algorithm})
        trainer = make_trainer(config, mesh_of(config))
        losses.append(trainer.evaluate(first_params(config.model), tokens_of(config)))
    assert losses[0] == losses[1]


def test_a_scheduled_run_learns_what_a_plain_one_learns():
    """Through the trainer: optimiser, metrics, and gradients of a first part that are summed with the last part's."""
    plain = small_config(2, 4, batch_size=64, seq_len=6, every=1, model=ONE_BLOCK)
    plain = dataclasses.replace(plain, train=dataclasses.replace(plain.train, grad_accumulation=2))
    scheduled = dataclasses.replace(plain, schedule=Schedule(**UNIFIED))
    assert plain.is_plain
    assert not scheduled.is_plain
    (state, records), (expected, expected_records) = (run_steps(each, steps=2) for each in (scheduled, plain))
    chex.assert_trees_all_close(records, expected_records, rtol=1e-5, atol=1e-7)
    chex.assert_trees_all_close(state["optimizer"], expected["optimizer"], rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(
    "schedule",
    [
        {"policy": "vanilla", "weight_grad": "greedy"},
        {"policy": "unified", "microbatches": 1, "weight_grad": "greedy"},
        {"policy": "unified", "microbatches": 4, "weight_grad": "greedy", "grad_reduce": "chunked"},
        {"policy": "expert_pipeline", "microbatches": 2, "backward_microbatches": 3},
    ],
    ids=lambda schedule: f"{schedule['policy']}-{schedule.get('microbatches', 1)}",
)
def test_a_schedule_adds_no_arithmetic(schedule):
    """Weight gradients that wait must not compute anything again, nor may cutting a batch pad it.

    With C = T slots a quarter of the batch sends a quarter of the rows. In the plain program the scan over blocks is
    unrolled, or the compiler counts one turn of it.
    """
    model = {"d_model": 64, "hidden_dim": 64, "num_layers": 2, "vocab_size": 64}
    base = small_config(
        1, 2, seq_len=128, model=model, every=1, num_experts=4, hidden_dim=64, capacity_factor=2.0, top_k=2
    )
    plain, scheduled = (dataclasses.replace(base, schedule=Schedule(**each)) for each in ({"unroll": 2}, schedule))
    assert flops_of(scheduled) <= 1.01 * flops_of(plain)


@functools.cache
def flops_of(config: Config) -> float:
    trainer = make_trainer(config, mesh_of(config))
    compiled = trainer.step.lower(trainer.state_shapes, tokens_of(config)).compile()
    return float(compiled.cost_analysis()["flops"])
