"""The training step over tensor ranks: heads and hidden widths cut, tokens shared, the function stays the same."""

import itertools

import chex
import pytest

from moe_jax.config import Config
from moe_jax.errors import ConfigError
from moe_jax.parallel.all_to_all import EXCHANGES
from moe_jax.parallel.tensor_dispatch import FORMS
from moe_jax.step.scheduled.issue_order import IssueOrder
from moe_jax.step.trainer import make_trainer
from tests.small import first_params, small_config, tokens_of
from tests.step.gradients import assert_equals_reference, mesh_of, sharded_gradients

UNIFIED = {
    "policy": "unified",
    "microbatches": 2,
    "weight_grad": "greedy",
    "grad_reduce": "bucketed",
    "bucket_cap_mb": 0.002,
}
SCHEDULES = {
    "vanilla": {"policy": "vanilla", "grad_reduce": "block"},
    "expert_pipeline": {"policy": "expert_pipeline", "microbatches": 2, "backward_microbatches": 3},
    "unified": UNIFIED,
}


def tensor_config(data: int, expert: int, tensor: int, **settings) -> Config:
    model = {"num_attention_heads": 8, "num_key_value_heads": 4} | settings.pop("model", {})
    return small_config(data, expert, tensor=tensor, model=model, **settings)


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ((1, 2, 4), {"num_shared_experts": 1, "dense_residual": True, "schedule": UNIFIED}),
        (
            (1, 4, 2),
            {"exchange": {"algorithm": "halo", "ranks_per_node": 2}, "moe_layer_freq": 1, "model": {"num_layers": 1}},
        ),
    ],
    ids=["many", "nodes"],
)
def test_loss_and_gradients_equal_the_reference(mesh, settings):
    """Other meshes are in `test_every_step.py`."""
    assert_equals_reference(tensor_config(*mesh, **settings))


@pytest.mark.parametrize(
    ("form", "under_way"),
    [
        ("replicated", True),
        ("sharded", True),
        ("sharded_chunked", False),
        ("sharded_overlapped", False),
        ("sharded_scheduled", True),
    ],
)
def test_tasks_run_while_whole_exchanges_are_under_way_in_the_background(form, under_way, monkeypatch):
    """Chunks are gathered, or summed, as soon as each has arrived; what is whole ends where compute needs it. With
    gathers as tasks, those send on what the exchange brings, and the exchange back sends on their sums.
    """
    events: list[str] = []

    def noting(event, function):
        def noted(*arguments):
            events.append(event)
            return function(*arguments)

        return noted

    whole = EXCHANGES["background"]
    halves = {name: noting(name, getattr(whole, name)) for name in ("start", "finish")}
    monkeypatch.setitem(EXCHANGES, "background", whole._replace(**halves))
    monkeypatch.setattr(IssueOrder, "record_compute", noting("compute", IssueOrder.record_compute))
    config = tensor_config(
        *(1, 2, 2),
        schedule=UNIFIED,
        exchange={"algorithm": "background", "tensor_form": form},
        moe_layer_freq=1,
        model={"num_layers": 1},
    )
    trainer = make_trainer(config, mesh_of(config))
    trainer.step.lower(trainer.state_shapes, tokens_of(config))
    assert events.count("start") == events.count("finish") >= (4 if form == "sharded_scheduled" else 8)
    assert (("start", "compute") in itertools.pairwise(events)) == under_way


def test_all_forms_compute_the_same_bits(exact):
    results = {}
    for form in (*FORMS, "sharded_scheduled"):
        config = tensor_config(
            *(1, 2, 4),
            model={"num_layers": 1},
            moe_layer_freq=1,
            exchange={"tensor_form": form, "tensor_chunks": 2},
            schedule={"weight_grad": "greedy"},  # a plain step has no tasks
        )
        results[form] = sharded_gradients(config, first_params(config.model), tokens_of(config))
    for form, result in results.items():
        chex.assert_trees_all_equal(result, results["sharded"], custom_message=form)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 2, "capacity_factor": None, "model": {"num_layers": 1}, "moe_layer_freq": 1},
        {"hooks": "fp8", "schedule": UNIFIED},
        {"schedule": SCHEDULES["expert_pipeline"]},
    ],
    ids=["sizes", "codec", "chunks"],
)
def test_gathers_in_the_background_compute_the_same_bits(settings, exact):
    """With sizes beside the rows, rows that a codec encodes (which wait in the program), and several chunks."""
    results = []
    for algorithm in ("flat", "background"):
        exchange = {"tensor_form": "sharded_scheduled", "algorithm": algorithm}
        config = tensor_config(1, 2, 2, exchange=exchange, **{"schedule": UNIFIED} | settings)
        results.append(sharded_gradients(config, first_params(config.model), tokens_of(config)))
    chex.assert_trees_all_equal(*results)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4}},
            r"model\.num_attention_heads=6 is not divisible by mesh\.tensor=4: use",
        ),
        (
            {"model": {"num_key_value_heads": 2}},
            r"model\.num_key_value_heads=2 is not divisible by mesh\.tensor=4: use 4",
        ),
        ({"seq_len": 10}, r"data\.seq_len=10 is not divisible by mesh\.tensor=4: use 8 or 12"),
        (
            {"intermediate_size": 10},
            r"model\.moe\.intermediate_size=10 is not divisible by mesh\.tensor=4: use 8 or 12",
        ),
        ({"exchange": {"algorithm": "ragged"}, "schedule": UNIFIED}, r"exchange\.algorithm=ragged knows no tensor"),
    ],
)
def test_what_does_not_divide_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        tensor_config(1, 2, 4, **settings)


def test_one_rank_compiles_to_the_program_without_tensor_ranks():
    """Whatever the form: it is about several."""

    def program(**exchange) -> str:
        config = tensor_config(1, 2, 1, exchange=exchange, schedule=UNIFIED)
        trainer = make_trainer(config, mesh_of(config))
        return trainer.step.lower(trainer.state_shapes, tokens_of(config)).as_text()

    expected = program()
    assert "reduce_scatter" not in expected
    for form in (*FORMS, "sharded_scheduled"):
        assert program(tensor_form=form, tensor_chunks=3) == expected, form
