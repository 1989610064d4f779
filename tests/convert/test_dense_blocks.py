"""Dense blocks of Qwen's models, which `mlp_only_layers` and `decoder_sparse_step` give together."""

import dataclasses

import pytest

from moe_jax.config import Config
from moe_jax.convert.families import FAMILIES, differences, family_that_holds
from moe_jax.convert.hf_config import ConvertError, HfConfig, read_config
from tests.convert.golden import changed, model_of

QWEN3 = FAMILIES["qwen3_moe"]


def kinds_there(settings: dict, layers: int) -> list[str]:
    """As transformers builds the blocks."""
    dense, step = settings["mlp_only_layers"], settings["decoder_sparse_step"]
    return ["moe" if i not in dense and (i + 1) % step == 0 else "dense" for i in range(layers)]


@pytest.mark.parametrize(
    ("layers", "dense", "step", "places"),
    [
        (6, [], 1, (0, 1)),
        (6, [], 2, (0, 2)),
        (6, [0, 1], 1, (2, 1)),
        (6, [1], 2, (2, 2)),  # blocks 3 and 5
        (6, [0, 2, 4], 1, (0, 2)),
        (7, [0, 1, 3, 5], 1, (1, 2)),  # blocks 2, 4 and 6
        (5, [1], 2, (2, 2)),  # block 3, and a dense one above it
        (4, [1], 2, (2, 2)),
        (3, [], 3, (0, 3)),
    ],
)
def test_what_is_imported_is_exported(layers, dense, step, places):
    given = {"num_hidden_layers": layers, "mlp_only_layers": dense, "decoder_sparse_step": step}
    values = {**QWEN3.settings(model_of("qwen3_moe")), **given}
    model = QWEN3.model(HfConfig(values, "config.json"))
    assert list(model.block_kinds) == kinds_there(given, layers)
    Config(model=model)
    assert (model.moe.first_k_dense_replace, model.moe.moe_layer_freq) == places
    settings = family_that_holds(model).settings(model)
    assert list(model.block_kinds) == kinds_there(settings, layers)
    back = QWEN3.model(HfConfig(settings, "config.json"))
    assert back.block_kinds == model.block_kinds
    assert not differences(back, model)


def test_models_of_this_project_are_exported_wherever_their_experts_are():
    """All numbers of the lowest dense blocks, and every n-th above them."""
    golden = model_of("qwen3_moe")
    for layers in range(1, 6):
        for first in range(layers):
            for every in range(1, layers - first + 1):
                moe = dataclasses.replace(golden.moe, first_k_dense_replace=first, moe_layer_freq=every)
                model = dataclasses.replace(golden, num_layers=layers, moe=moe)
                assert list(model.block_kinds) == kinds_there(QWEN3.settings(model), layers)
                assert family_that_holds(model, "qwen3_moe") is QWEN3


def test_a_number_of_blocks_that_no_model_has_is_refused(tmp_path):
    """Before so many are counted."""
    hf = read_config(changed("qwen3_moe", tmp_path, num_hidden_layers=10**9))
    with pytest.raises(ConvertError, match=r"num_hidden_layers=1000000000 must be at most [\d,]+$"):
        QWEN3.model(hf)


@pytest.mark.parametrize("dense", [[1], [0, 1, 2], [1, 2]])
def test_other_orders_are_refused(dense, tmp_path):
    hf = read_config(changed("qwen3_moe", tmp_path, mlp_only_layers=dense))
    with pytest.raises(ConvertError, match=r"dense blocks must be the lowest ones, and above them all but every n-th"):
        QWEN3.model(hf)
