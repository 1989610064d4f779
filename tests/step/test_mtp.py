"""Multi-token prediction: which positions count, with what weight, and what only its module has."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config import DataConfig, TrainConfig
from moe_jax.data.token_marks import PADDING, UNCOUNTED, mark_documents
from moe_jax.models.gates.inputs import BatchPart
from moe_jax.models.head import NO_TARGET
from moe_jax.models.mtp import mtp_scale
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.sharding import BATCH_SPEC, REPLICATED
from moe_jax.run.locate_nonfinite import _outputs
from moe_jax.step import fault_injection as faults
from moe_jax.step.context import StepContext, StepInputs
from moe_jax.step.scheduled.step_dims import StepDims
from moe_jax.step.trainer import make_trainer
from tests.small import first_params, small_config, tokens_of
from tests.step.gradients import first_state, mesh_of
from tests.step.one_step import assert_is_the_references_step, config_of_settings

END = 9  # of a document
MODULE = {"num_nextn_predict_layers": 1}


@pytest.mark.parametrize(("steps_done", "scale"), [(0, 0.3), (8, 0.3), (9, 0.2), (10, 0.2), (99, 0.0), (10**6, 0.0)])
def test_the_weight_changes_in_the_step_that_is_given(steps_done: int, scale: float) -> None:
    train = TrainConfig(mtp_loss_scaling_factor=0.3, mtp_loss_schedule=((10.0, 0.2), (100.0, 0.0)))
    np.testing.assert_allclose(jax.jit(lambda step: mtp_scale(train, step))(jnp.int32(steps_done)), scale)


def inputs_of(token_BN1: np.ndarray, marked: bool) -> tuple[np.ndarray, np.ndarray, int]:
    """What the module reads and has to predict on one device, and how many targets there are."""
    config = small_config(1, 1, seq_len=token_BN1.shape[1] - 1, batch_size=len(token_BN1), model=MODULE)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, mask_documents=marked))
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    context = StepContext.of(config, mesh)

    def own(token_BN1: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        mtp = StepInputs.of(token_BN1, context, BatchPart(jnp.int32(0))).mtp(context)
        assert mtp is not None
        return mtp.next_Bn, mtp.target_Bn, jnp.asarray(mtp.divisor)

    run = jax.shard_map(own, mesh=mesh, in_specs=BATCH_SPEC, out_specs=REPLICATED, check_vma=False)
    next_Bn, target_Bn, divisor = jax.device_get(jax.jit(run)(token_BN1))
    return next_Bn, target_Bn, int(divisor)


def test_each_token_but_the_last_predicts_the_second_one_after_it() -> None:
    token_BN1 = np.array([[3, 4, 5, 6, 7]], np.int32)
    next_Bn, target_Bn, divisor = inputs_of(token_BN1, marked=False)
    np.testing.assert_array_equal(next_Bn, [[4, 5, 6, 7]])
    np.testing.assert_array_equal(target_Bn, [[5, 6, 7, NO_TARGET]])
    assert divisor == 3


def test_neither_borders_nor_padding_nor_masked_tokens_count() -> None:
    """By hand: a document of 3 tokens, one of 2, and one of which the second token is masked, then padding."""
    token_BN1 = np.array([[3, 4, END, 5, END, 6, 7, 8, 1, 1]], np.int32)
    mark_documents(token_BN1, END)
    token_BN1[0, 6] |= UNCOUNTED
    token_BN1[0, 8:] |= np.int32(UNCOUNTED - PADDING)
    next_Bn, target_Bn, divisor = inputs_of(token_BN1, marked=True)
    np.testing.assert_array_equal(next_Bn, [[4, END, 5, END, 6, 7, 8, 1, 1]])
    no = NO_TARGET
    #                                      3    4   9   5   9   6  7   8   1
    np.testing.assert_array_equal(target_Bn, [[END, no, no, no, no, 8, no, no, no]])
    assert divisor == 2


def test_validation_is_that_of_the_decoder() -> None:
    """Which has the same parameters without the module."""
    config, losses = small_config(2, 1, model=MODULE | {"num_layers": 1}, batch_size=4, num_experts=0), []
    params = first_params(config.model)
    alone = dataclasses.replace(config, model=dataclasses.replace(config.model, num_nextn_predict_layers=0))
    decoder = {name: leaf for name, leaf in params.items() if name != "mtp_norm"} | {
        "segments": {0: params["segments"][0]}
    }
    for each, own in ((config, params), (alone, decoder)):
        losses.append(make_trainer(each, mesh_of(each)).evaluate(own, tokens_of(config)))
    np.testing.assert_array_equal(*losses)


def test_tasks_may_keep_what_they_keep_on_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepDims, "min_cut_remat", True)
    settings = "schedule.policy=unified schedule.microbatches=2 mesh.data=2 mesh.expert=2 model.num_layers=1 "
    module = "model.num_nextn_predict_layers=1 model.moe.moe_layer_freq=1 schedule.weight_grad=greedy"
    assert_is_the_references_step(config_of_settings(settings + module))


def test_a_number_that_is_not_finite_in_the_module_is_found_there() -> None:
    config = small_config(1, 2, model=MODULE | {"num_layers": 1}, moe_layer_freq=1)
    config = dataclasses.replace(config, data=DataConfig(seq_len=config.data.seq_len))
    mesh = mesh_of(config)
    params = first_state(config, make_trainer(config, mesh))["params"]
    with faults.nan_at(step=1, device=1, parameter="segments.1.0.mtp_input.projection"):
        wrong_WP = _outputs(config, mesh)(params, tokens_of(config), 0, None)
    embedding, block, module, logits = (set(np.flatnonzero(wrong_P).tolist()) for wrong_P in wrong_WP)
    assert (embedding, block, logits) == (set(), set(), set())
    assert module >= {1}, "and of the ranks that its tokens' experts are on"
