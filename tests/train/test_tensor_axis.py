"""The training step over tensor ranks: heads and hidden widths cut, tokens shared, the function stays the same."""

import dataclasses
import itertools

import chex
import numpy as np
import pytest

from moe_jax.config import Config
from moe_jax.errors import ConfigError
from moe_jax.parallel.all_to_all import EXCHANGES
from moe_jax.parallel.over_tensor import FORMS
from moe_jax.train.emit import make_plan
from moe_jax.train.step import make_trainer
from moe_jax.train.ties import Ties
from tests.small import first_params, small_config, tokens_of
from tests.train.gradients import assert_equals_reference, mesh_of, sharded_gradients
from tests.train.test_step import run_steps

MESHES = [(1, 1, 2), (2, 2, 2), (1, 4, 2), (1, 2, 4)]
UNIFIED = {"policy": "unified", "microbatches": 2, "weight_grad": "greedy", "grad_reduce": "chunked", "chunk_mb": 0.002}
SCHEDULES = {
    "vanilla": {"policy": "vanilla", "grad_reduce": "block"},
    "expert_pipeline": {"policy": "expert_pipeline", "microbatches": 2, "backward_microbatches": 3},
    "unified": UNIFIED,
}
# gradients are summed over tensor ranks, too
REDUCTIONS_OF = {"replicated": "all_reduce", "o1": "ring", "o2": "scatter_gather", "o3": "background"}


def tensor_config(data: int, expert: int, tensor: int, **settings) -> Config:
    model = {"num_heads": 8, "num_kv_heads": 4} | settings.pop("model", {})
    return small_config(data, expert, tensor=tensor, model=model, **settings)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("capacity_factor", [0.8, None])
def test_loss_and_gradients_equal_the_reference(mesh, capacity_factor):
    """With slots each device fills its own; without, each part of a sequence its buffer."""
    assert_equals_reference(
        tensor_config(
            *mesh,
            capacity_factor=capacity_factor,
            num_shared_experts=1,
            dense_residual=True,
            exchange={"buffer_factor": 1.5},
        )
    )


@pytest.mark.parametrize(
    ("model", "moe"),
    [
        (
            {"activation": "gelu", "tie_embeddings": True, "qk_norm": True, "head_dim": 6},
            {"gate": "sigmoid", "top_k": 3},
        ),
        ({}, {"order": "einsum"}),
        ({}, {"gate": "batch_prioritised", "capacity_factor": 0.7}),
        ({}, {"num_experts": 0}),
    ],
    ids=["gelu-tied-qknorm", "one-hot", "by-score", "dense"],
)
def test_model_variants_equal_the_reference(model, moe):
    expert = 1 if moe.get("num_experts") == 0 else 2
    assert_equals_reference(tensor_config(4 // expert, expert, 2, model=model, **moe))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_scheduled_steps_equal_the_reference(schedule, form):
    capacity = None if schedule == "expert_pipeline" else 1.0  # without: counts of rows travel, too
    config = tensor_config(
        *(1, 2, 4) if form in ("o2", "replicated") else (2, 2, 2),
        schedule=SCHEDULES[schedule],
        exchange={"tensor_form": form, "tensor_chunks": 3, "reduction": REDUCTIONS_OF[form]},
        every=1,
        capacity_factor=capacity,
    )
    assert_equals_reference(config)


@pytest.mark.parametrize(
    ("algorithm", "schedule"),
    [(name, "unified") for name in sorted(EXCHANGES.keys() - {"flat", "ragged"})]
    + [(name, None) for name in ("ring", "halo")],  # hop by hop, and in two halves under autodiff
)
def test_every_exchange_carries_the_rows_of_tensor_ranks(algorithm, schedule):
    config = tensor_config(
        *(1, 4, 2),
        schedule=SCHEDULES.get(schedule),
        exchange={"algorithm": algorithm, "ranks_per_node": 2},
        every=1,
        model={"num_layers": 1},
    )
    assert_equals_reference(config)


@pytest.mark.parametrize(
    ("form", "schedule", "capacity_factor"),
    [("replicated", "unified", 1.0), ("o1", "expert_pipeline", None), ("o2", "unified", 1.0)],
)
def test_rows_in_the_background_are_those_of_the_reference(form, schedule, capacity_factor):
    exchange = {"algorithm": "background", "reduction": "background", "tensor_form": form, "tensor_chunks": 2}
    assert_equals_reference(
        tensor_config(
            *(2, 2, 2),
            schedule=SCHEDULES[schedule],
            exchange=exchange,
            every=1,
            model={"num_layers": 1},
            capacity_factor=capacity_factor,
        )
    )


@pytest.mark.parametrize(("form", "under_way"), [("replicated", True), ("o1", True), ("o2", False), ("o3", False)])
def test_tasks_run_while_whole_exchanges_are_under_way_in_the_background(form, under_way, monkeypatch):
    """Chunks are gathered, or summed, as soon as each has arrived; what is whole ends where compute needs it."""
    events: list[str] = []

    def noting(event, function):
        def noted(*arguments):
            events.append(event)
            return function(*arguments)

        return noted

    whole = EXCHANGES["background"]
    halves = {name: noting(name, getattr(whole, name)) for name in ("start", "finish")}
    monkeypatch.setitem(EXCHANGES, "background", whole._replace(**halves))
    monkeypatch.setattr(Ties, "computed", noting("compute", Ties.computed))
    config = tensor_config(
        *(1, 2, 2),
        schedule=UNIFIED,
        exchange={"algorithm": "background", "tensor_form": form},
        every=1,
        model={"num_layers": 1},
    )
    trainer = make_trainer(config, mesh_of(config))
    trainer.step.lower(trainer.state_shapes, tokens_of(config))
    assert events.count("start") == events.count("finish") >= 8
    assert (("start", "compute") in itertools.pairwise(events)) == under_way


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_turns_of_a_loop_make_heads_and_hidden_widths_again(schedule, remat):
    config = tensor_config(2, 2, 2, schedule=SCHEDULES[schedule] | {"remat": remat}, every=1, model={"num_layers": 4})
    assert make_plan(config, mesh_of(config)).looped
    assert_equals_reference(config)


def test_a_batch_in_parts_and_bfloat16_train_as_without_tensor_ranks():
    moe = {"capacity_factor": None, "load_balance_weight": 0.0}  # whose counts are those of a part
    whole, exact = run_steps(tensor_config(2, 2, 1, **moe))
    config = tensor_config(2, 2, 2, **moe)
    cut = dataclasses.replace(config, train=dataclasses.replace(config.train, grad_accumulation=2))
    parts, records = run_steps(cut)
    chex.assert_trees_all_close(parts["params"], whole["params"], rtol=1e-4, atol=1e-6)
    half = dataclasses.replace(config, train=dataclasses.replace(config.train, compute_dtype="bfloat16"))
    expected = [record["loss"] for record in exact]
    np.testing.assert_allclose([record["loss"] for record in records], expected, rtol=1e-5)
    np.testing.assert_allclose([record["loss"] for record in run_steps(half)[1]], expected, rtol=0.02)


@pytest.mark.parametrize(("schedule", "hooks"), [("plain", "none"), ("unified", "fp8")])
def test_all_forms_compute_the_same_bits(schedule, hooks):
    results = {}
    for form in FORMS:
        config = tensor_config(
            *(1, 2, 4 if hooks == "none" else 2),
            hooks=hooks,
            model={"num_layers": 1},
            every=1,
            schedule=SCHEDULES.get(schedule),
            exchange={"tensor_form": form, "tensor_chunks": 2},
        )
        results[form] = sharded_gradients(config, first_params(config.model), tokens_of(config))
    if hooks != "none":
        del results["replicated"]  # rounds what it sends back before it adds it up
    for form, result in results.items():
        chex.assert_trees_all_equal(result, results["o1"], custom_message=form)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model": {"num_heads": 6, "num_kv_heads": 3, "head_dim": 4}},
            r"model\.num_heads=6 is not divisible by mesh\.tensor=4: use",
        ),
        ({"model": {"num_kv_heads": 2}}, r"model\.num_kv_heads=2 is not divisible by mesh\.tensor=4: use 4"),
        ({"seq_len": 10}, r"data\.seq_len=10 is not divisible by mesh\.tensor=4: use 8 or 12"),
        ({"hidden_dim": 10}, r"model\.moe\.hidden_dim=10 is not divisible by mesh\.tensor=4: use 8 or 12"),
        ({"exchange": {"algorithm": "ragged"}, "schedule": UNIFIED}, r"exchange\.algorithm=ragged knows no tensor"),
    ],
)
def test_what_does_not_divide_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        tensor_config(1, 2, 4, **settings)


def test_one_rank_compiles_to_the_program_without_tensor_ranks():
    """Whatever the form: it is about several."""

    def program(**exchange) -> str:
        config = tensor_config(1, 2, 1, exchange=exchange)
        trainer = make_trainer(config, mesh_of(config))
        return trainer.step.lower(trainer.state_shapes, tokens_of(config)).as_text()

    expected = program()
    assert "reduce_scatter" not in expected
    for form in FORMS:
        assert program(tensor_form=form, tensor_chunks=3) == expected, form
