"""Parts from elsewhere, named `package.module:name`, take the place of the project's own."""

import chex
import numpy as np

from moe_jax.models.dispatchers import DISPATCHERS
from moe_jax.models.gates import softmax
from moe_jax.models.hooks.protocol import Hooks
from tests.small import first_params, small_config, tokens_of
from tests.step.gradients import sharded_gradients


def not_a_choice(logit_TE, moe):
    return tuple(softmax.choose(logit_TE, moe))


def one_expert(logit_TE, moe):
    choice = softmax.choose(logit_TE, moe)
    return choice._replace(expert_Tk=choice.expert_Tk[:, :1])


DROPLESS = DISPATCHERS["dropless"]
TRIPLE = Hooks(after_layer=lambda y_TD: 3 * y_TD)


def test_a_dispatcher_and_hooks_from_elsewhere():
    parts = {"dispatcher": f"{__name__}:DROPLESS", "hooks": f"{__name__}:TRIPLE"}
    own, others = (small_config(2, 2, capacity_factor=None, **moe) for moe in ({"routed_scaling_factor": 3.0}, parts))
    expected, result = (sharded_gradients(c, first_params(c.model), tokens_of(c)) for c in (own, others))
    np.testing.assert_allclose(result.loss, expected.loss, rtol=2e-6)
    chex.assert_trees_all_close(result.grads, expected.grads, rtol=1e-4, atol=2e-6)
