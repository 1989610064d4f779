"""Steps whose experts multiply 8-bit operands: what is rounded, and what is not."""

import numpy as np

from tests.small import first_params, small_config, tokens_of
from tests.step.gradients import sharded_gradients
from tests.step.test_hooks import distance


def test_shared_experts_and_dense_blocks_are_not_rounded_and_experts_are():
    def gradients(**moe):
        config = small_config(1, 2, seq_len=6, num_shared_experts=1, **moe)
        return sharded_gradients(config, first_params(config.model), tokens_of(config))

    assert 0.01 < distance(gradients(expert_matmuls="fp8").grads, gradients().grads) < 0.1
    alone = {"routed_scaling_factor": 1e-30}
    np.testing.assert_allclose(gradients(expert_matmuls="fp8", **alone).loss, gradients(**alone).loss, rtol=1e-7)
