"""The training step over context ranks: each sequence cut, the function stays the same."""

import jax
import numpy as np
import pytest

from moe_jax.plan.gradients import sums_of
from moe_jax.step.scheduled.build import make_plan
from moe_jax.step.trainer import make_trainer
from tests.small import small_config, tokens_of
from tests.step.gradients import assert_equals_reference, mesh_of

UNIFIED = {
    "policy": "unified",
    "microbatches": 2,
    "weight_grad": "greedy",
    "grad_reduce": "bucketed",
    "bucket_cap_mb": 0.002,
}


def context_config(context: int, expert: int = 1, data: int = 1, **settings):
    """Sequences of 16 tokens, two for each device that has its own."""
    return small_config(data, expert, context=context, **({"seq_len": 16, "batch_size": 4} | settings))


@pytest.mark.parametrize(
    ("context", "settings"),
    [
        (8, {"capacity_factor": 0.8, "gate": "batch_prioritised", "schedule": {"remat": "full"}}),
        (8, {"schedule": UNIFIED | {"grad_reduce": "block", "bucket_cap_mb": None}}),
        (2, {"exchange": {"context_form": "all_gather"}, "schedule": UNIFIED, "tensor": 2}),
    ],
    ids=["many", "many, scheduled", "gathered, scheduled"],
)
def test_loss_and_gradients_equal_the_reference(context, settings):
    """Other meshes are in `test_every_step.py`."""
    assert_equals_reference(context_config(context, **settings))


def test_memory_is_that_of_a_ranks_own_tokens():
    """However many ranks there are, and however long their tokens are."""

    def temporaries(context: int, seq_len: int) -> int:
        config = context_config(context, seq_len=seq_len, batch_size=1, num_experts=0, model={"num_layers": 2})
        trainer = make_trainer(config, mesh_of(config))
        batch = jax.ShapeDtypeStruct((1, seq_len + 1), np.int32)
        return trainer.step.lower(trainer.state_shapes, batch).compile().memory_analysis().temp_size_in_bytes

    of_two, of_eight = temporaries(2, 4096), temporaries(8, 4096)
    assert of_eight < of_two / 3
    assert of_eight < 1.1 * temporaries(4, 2048), "nothing for each hop"
    assert temporaries(2, 8192) < 2 * of_two, "no squares, masks neither"


@pytest.mark.parametrize(("tensor", "data", "shared"), [(2, 1, False), (2, 1, True), (1, 2, True)])
def test_sums_of_gradients_are_planned_as_they_are_made(tensor, data, shared):
    config = context_config(2, 2, data, tensor=tensor, schedule=UNIFIED, moe_layer_freq=1, experts_over_context=shared)
    made = [reduction.sent_bytes(config.mesh.sizes) for reduction in make_plan(config, mesh_of(config)).reductions]
    planned = sums_of(config, config.mesh.sizes, config.schedule.bucket_cap_mb)
    assert [sum(each.sent_bytes for each in owner) for owner in planned] == list(map(sum, made))


def test_one_rank_compiles_to_the_program_without_context_ranks():
    """Whatever the form: it is about several."""

    def program(**exchange) -> str:
        config = context_config(1, 2, exchange=exchange, model={"num_layers": 1}, moe_layer_freq=1)
        trainer = make_trainer(config, mesh_of(config))
        return trainer.step.lower(trainer.state_shapes, tokens_of(config)).as_text()

    expected = program()
    assert "collective_permute" not in expected
    assert program(context_form="all_gather") == expected
