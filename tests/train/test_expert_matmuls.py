"""Steps whose experts multiply 8-bit operands: all compute what the slow twin does, however the batch is cut."""

import numpy as np
import pytest

from tests.small import first_params, small_config, tokens_of
from tests.train.gradients import assert_equals_reference, sharded_gradients
from tests.train.test_hooks import distance

GREEDY = {"policy": "unified", "microbatches": 2, "weight_grad": "greedy"}
CASES = {
    "one device": ((1, 1, 1), {}),
    "expert ranks": ((2, 4, 1), {}),
    "tensor ranks": ((1, 2, 2), {}),
    "scheduled": ((1, 4, 1), {"schedule": GREEDY}),
    "remat": ((1, 2, 1), {"schedule": {"remat": "full"}}),
    "hop by hop": ((1, 2, 1), {"exchange": {"algorithm": "ring"}}),
    "dropless": ((1, 2, 1), {"capacity_factor": None}),
    "dropless scheduled": ((1, 2, 1), {"capacity_factor": None, "schedule": GREEDY}),
    "einsum": ((1, 2, 1), {"order": "einsum"}),
    "softmoe": ((1, 2, 1), {"gate": "softmoe"}),
    "irregular": ((1, 2, 1), {"schedule": GREEDY, "exchange": {"algorithm": "ragged"}}),
    "irregular in loops": (
        (1, 2, 1),
        {"schedule": GREEDY, "exchange": {"algorithm": "ragged"}, "every": 1, "model": {"num_layers": 3}},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_step_computes_what_the_twin_does(name):
    (data, expert, tensor), settings = CASES[name]
    assert_equals_reference(small_config(data, expert, tensor=tensor, expert_matmuls="fp8", seq_len=6, **settings))


def test_shared_experts_and_dense_blocks_are_not_rounded_and_experts_are():
    def gradients(**moe):
        config = small_config(1, 2, seq_len=6, num_shared_experts=1, **moe)
        return sharded_gradients(config, first_params(config.model), tokens_of(config))

    assert 0.01 < distance(gradients(expert_matmuls="fp8").grads, gradients().grads) < 0.1
    alone = {"routed_scale": 1e-30}
    np.testing.assert_allclose(gradients(expert_matmuls="fp8", **alone).loss, gradients(**alone).loss, rtol=1e-7)
