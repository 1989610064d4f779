"""Biases of experts and router: through orders of rows and exchanges they are added, and once."""

import pytest

from tests.small import small_config
from tests.train.gradients import assert_equals_reference
from tests.train.test_tensor_axis import UNIFIED

CASES: dict[str, tuple[tuple[int, int, int], dict]] = {
    "slots-gelu": ((2, 2, 2), {"model": {"activation": "gelu"}}),
    "dropless-replicated": ((1, 2, 2), {"capacity_factor": None, "exchange": {"tensor_form": "replicated"}}),
    "dropless-ring": ((1, 4, 2), {"capacity_factor": None, "exchange": {"algorithm": "ring"}}),
    "scheduled": ((1, 2, 2), {"schedule": UNIFIED, "capacity_factor": None}),
    "scheduled-irregular": ((2, 2, 1), {"schedule": UNIFIED, "exchange": {"algorithm": "ragged"}}),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_the_reference(name):
    (data, expert, tensor), settings = CASES[name][0], dict(CASES[name][1])
    model = {"num_layers": 1} | settings.pop("model", {})
    settings = {"num_experts": 4, "every": 1, "bias": True, "model": model} | settings
    assert_equals_reference(small_config(data, expert, tensor=tensor, **settings))
