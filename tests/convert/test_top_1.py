"""One expert of each token: its weight is 1 where transformers divides by the sum of weights, else its score."""

import dataclasses

import numpy as np
import pytest

from moe_jax.config import AttentionConfig, ModelConfig, MoEConfig
from moe_jax.convert.families import FAMILIES, differences, family_that_holds
from moe_jax.convert.hf_config import ConvertError, HfConfig, read_config
from tests.convert.golden import changed, logits_in, of_transformers

SWITCH = ModelConfig(
    qk_norm=True, moe=MoEConfig(top_k=1, capacity_factor=None)
)  # the settings that a run has by default


def test_logits_are_those_of_transformers(tmp_path):
    found = logits_in(changed("mixtral", tmp_path, num_experts_per_tok=1))
    expected = of_transformers("mixtral_top_1")
    np.testing.assert_allclose(found[:, -expected.shape[1] :], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe", "qwen2_moe", "deepseek_v3"])
def test_one_weight_is_divided_by_itself_where_the_family_does(name, tmp_path):
    """And exported as it was imported."""
    for normalized in (True,) if name == "mixtral" else (True, False):
        folder = changed(name, tmp_path / str(normalized), num_experts_per_tok=1, norm_topk_prob=normalized)
        model = FAMILIES[name].model(read_config(folder))
        assert model.moe.divides_by_sum == normalized
        assert family_that_holds(model).model_type == name
        assert FAMILIES[name].model(HfConfig(FAMILIES[name].settings(model), name)) == model


def test_a_model_trained_with_scores_as_weights_is_no_mixtral():
    """It is a Qwen3-MoE or an OLMoE, if its norms are theirs."""
    for settings, family in (({}, "qwen3_moe"), ({"qk_norm_over": "projection"}, "olmoe")):
        model = dataclasses.replace(SWITCH, **settings)
        assert family_that_holds(model).model_type == family
        assert FAMILIES[family].settings(model)["norm_topk_prob"] is False
    plain = dataclasses.replace(SWITCH, qk_norm=False)
    with pytest.raises(ConvertError, match=r"nearest are those of qwen3_moe, which have no model.qk_norm=False: "):
        family_that_holds(plain)
    with pytest.raises(ConvertError, match=r"which have no model.moe.norm_top1_prob=False: "):
        family_that_holds(plain, "mixtral")
    one = dataclasses.replace(plain, moe=dataclasses.replace(plain.moe, norm_top1_prob=True))
    assert family_that_holds(one).model_type == "mixtral"
    assert differences(plain, one) == {"model.moe.norm_top1_prob": (False, True)}


def test_settings_that_a_gate_does_not_read_are_no_difference():
    """A softmax over one logit is 1 whatever they say."""
    moe = MoEConfig(top_k=1, gate="gpt_oss", bias=True, capacity_factor=None)
    model = ModelConfig(activation="clipped_swiglu", attention=AttentionConfig(bias=True, sinks=True), moe=moe)
    for settings in ({"norm_top1_prob": True}, {"norm_topk_prob": False}):
        own = dataclasses.replace(model, moe=dataclasses.replace(moe, **settings))
        assert family_that_holds(own).model_type == "gpt_oss"
