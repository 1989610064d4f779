"""Parts from elsewhere, named `package.module:name`, take the place of the project's own."""

import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.config import MoE
from moe_jax.models.gates import gate_of, softmax
from moe_jax.models.hooks.protocol import Hooks
from moe_jax.models.orders import ORDERS
from tests.small import first_params, small_config, tokens_of
from tests.train.gradients import sharded_gradients

DOCS = Path(__file__).parents[2] / "docs" / "parts.md"


def not_a_choice(logit_TE, moe):
    return tuple(softmax.choose(logit_TE, moe))


def one_expert(logit_TE, moe):
    choice = softmax.choose(logit_TE, moe)
    return choice._replace(expert_Tk=choice.expert_Tk[:, :1])


def test_the_gate_of_the_documentation(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (name,) = re.findall(r"model\.moe\.gate=(sharp:choose)", DOCS.read_text())
    (tmp_path / "sharp.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)

    moe = MoE(gate=name, normalize_weights=False)
    logit_TE = jax.random.normal(jax.random.key(0), (5, moe.num_experts))
    router = {"router": jnp.eye(moe.num_experts)}
    decision = gate_of(moe)(router, logit_TE, None, moe).decision
    for found, expected in zip(decision, softmax.choose(2 * logit_TE, moe), strict=True):
        np.testing.assert_array_equal(found, expected)

    config = small_config(2, 2, gate=name)
    result = sharded_gradients(config, first_params(config.model), tokens_of(config))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(result.grads))


DROPLESS = ORDERS["dropless"]
TRIPLE = Hooks(after_layer=lambda y_TD: 3 * y_TD)


def test_an_order_and_hooks_from_elsewhere():
    parts = {"order": f"{__name__}:DROPLESS", "hooks": f"{__name__}:TRIPLE"}
    own, others = (small_config(2, 2, capacity_factor=None, **moe) for moe in ({"routed_scale": 3.0}, parts))
    expected, result = (sharded_gradients(c, first_params(c.model), tokens_of(c)) for c in (own, others))
    np.testing.assert_allclose(result.loss, expected.loss, rtol=2e-6)
    chex.assert_trees_all_close(result.grads, expected.grads, rtol=1e-4, atol=2e-6)
