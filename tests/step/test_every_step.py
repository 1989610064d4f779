"""Every two settings of a training step meet in some program, and each is what the slow reference computes.

A case that fails is tried again with one setting after another as it usually is, and the message names those that are
needed to break it.
"""

import numpy as np
import pytest

from tests.pairwise import Case
from tests.step.arrays import Array, name_of
from tests.step.one_step import assert_is_the_references_step, config_of_settings
from tests.step.step_settings import ARRAY, ROUNDED

UNIFIED = "schedule.policy=unified schedule.microbatches=2"
TILES = "train.attention_kernel=tiled model.attention.sliding_window=4"
DOCUMENTS = "data.mask_documents=true data.seq_len=24 model.vocab_size=8 model.moe.num_shared_experts=1"
MAMBA = "model.mamba.num_heads=4 model.mamba.head_dim=3 model.mamba.d_state=4 model.rms_norm_eps=0.01"
MIXERS = (
    "model.mamba.attn_layer_period=2 model.mamba.attn_layer_offsets=[1] model.mamba.mixer_only_offsets=[0] "
    "model.attention.nope_every=1 model.activation=squared_relu"
)
MTP = "model.num_nextn_predict_layers=1 train.mtp_loss_scaling_factor=0.3"
OTHERS = {
    "tiles of attention in a loop of blocks": f"{UNIFIED} {TILES} mesh.data=1 mesh.expert=4 model.num_layers=4 "
    "model.moe.moe_layer_freq=1 optimizer.qk_clip=1",
    "tiles, recomputed": f"{UNIFIED} {TILES} mesh.data=1 mesh.expert=2 mesh.tensor=2 schedule.remat=full "
    "model.num_layers=2 model.moe.moe_layer_freq=2",
    "z-loss of chunks of logits": f"{UNIFIED} train.loss_chunk=5 train.z_loss_multiplier=0.1 mesh.data=1 "
    "mesh.context=2 mesh.expert=2 model.num_layers=1 model.moe.moe_layer_freq=1",
    "documents in a loop of blocks": f"{UNIFIED} {TILES} {DOCUMENTS} mesh.data=2 mesh.expert=2 model.num_layers=4 "
    "model.moe.moe_layer_freq=1 model.moe.gate=hash",
    "documents and Mamba-2": f"{UNIFIED} {DOCUMENTS} {MAMBA} mesh.data=1 mesh.expert=2 mesh.tensor=2 "
    "model.num_layers=2 model.moe.moe_layer_freq=1",
    "blocks of Mamba-2 alone, in a loop": f"{UNIFIED} {MAMBA} {MIXERS} model.num_layers=4 model.moe.moe_layer_freq=1 "
    "schedule.weight_grad=greedy schedule.grad_reduce=bucketed model.moe.gate=deepseek_v3 "
    "model.moe.num_shared_experts=1 mesh.data=2 mesh.expert=2 optimizer.zero=3",
    "blocks of attention alone, without experts": f"{MAMBA} {MIXERS} model.num_layers=5 model.moe.num_experts=0 "
    "model.mamba.attn_layer_offsets=[0] mesh.data=2 mesh.tensor=2 schedule.remat=full",
    # positions scaled for 24 tokens, of which a context rank has 12
    "documents around a ring": f"{UNIFIED} {DOCUMENTS} model.rope_scaling.rope_type=longrope "
    "model.rope_scaling.original_max_position_embeddings=16 model.rope_scaling.short_factor=[1,2] "
    "model.rope_scaling.long_factor=[1.5,30] model.rope_scaling.attention_factor=1.2 "
    "mesh.data=1 mesh.context=2 mesh.tensor=2 model.num_layers=2 "
    "model.moe.moe_layer_freq=2 train.loss_chunk=5 train.z_loss_multiplier=0.1 schedule.remat=full optimizer.qk_clip=1",
    "documents, and queries scaled by positions in them": f"{UNIFIED} {DOCUMENTS} model.attention.nope_every=1 "
    "model.attention.attn_scale=0.3 model.attention.floor_scale=3 mesh.data=1 mesh.context=2 mesh.expert=2 "
    "model.num_layers=1 model.moe.moe_layer_freq=1",
    "documents over data ranks": f"{DOCUMENTS} mesh.data=4 model.num_layers=2 model.moe.moe_layer_freq=2 "
    "train.grad_accumulation=2",
    "documents over expert ranks": f"{UNIFIED} {DOCUMENTS} mesh.data=1 mesh.expert=4 model.num_layers=2 "
    "model.moe.moe_layer_freq=1 model.attention.sinks=true model.attention.sliding_window=5",
    "documents over data and tensor ranks": f"{UNIFIED} {DOCUMENTS} {TILES} mesh.data=2 mesh.tensor=2 "
    "model.num_layers=1 model.moe.moe_layer_freq=1 optimizer.zero=3",
    "documents of a batch in parts": f"{DOCUMENTS} exchange.context_form=all_gather mesh.data=1 mesh.context=2 "
    "mesh.expert=2 train.grad_accumulation=2 model.num_layers=2 model.moe.moe_layer_freq=1 "
    "model.moe.load_balancing_type=sequence optimizer.qk_clip=1",
    "documents and multi-token prediction, in parts": f"{DOCUMENTS} {MTP} mesh.data=1 mesh.context=2 mesh.expert=2 "
    "train.grad_accumulation=2 model.num_layers=2 model.moe.moe_layer_freq=2 train.z_loss_multiplier=0.1",
    "documents and multi-token prediction in a schedule": f"{UNIFIED} {DOCUMENTS} {MTP} mesh.data=2 mesh.expert=2 "
    "model.num_layers=4 model.moe.moe_layer_freq=1 schedule.weight_grad=greedy train.loss_chunk=5 "
    "train.z_loss_multiplier=0.1 model.tie_word_embeddings=true schedule.grad_reduce=bucketed optimizer.qk_clip=1",
    "sharded parameters of dense blocks above experts": f"{UNIFIED} optimizer.zero=3 mesh.data=2 model.num_layers=5 "
    "model.moe.moe_layer_freq=3",
    "multi-token prediction without experts": f"{UNIFIED} {MTP} mesh.data=4 model.num_layers=2 model.moe.num_experts=0 "
    "optimizer.qk_clip=1",
    "a router of gpt-oss": f"{UNIFIED} model.moe.gate=gpt_oss mesh.data=1 mesh.expert=2 mesh.tensor=2 "
    "exchange.tensor_form=sharded_overlapped model.num_layers=2 model.moe.moe_layer_freq=1 schedule.weight_grad=greedy",
    "a sigmoid router, rows of all tensor ranks": "schedule.policy=expert_pipeline schedule.microbatches=2 "
    "model.moe.gate=sigmoid mesh.data=1 mesh.expert=2 mesh.tensor=2 exchange.tensor_form=replicated "
    "model.num_layers=1 model.moe.moe_layer_freq=1",
    "parameters gathered in the background, of a batch in parts": f"{UNIFIED} exchange.reduction=background "
    "optimizer.zero=3 train.grad_accumulation=2 mesh.data=2 mesh.expert=2 model.num_layers=2 "
    "model.moe.moe_layer_freq=2",
    "norms of queries and keys next to gated delta nets": f"{UNIFIED} model.delta_net.num_value_heads=4 "
    "model.delta_net.num_key_heads=2 model.delta_net.key_head_dim=4 model.delta_net.value_head_dim=3 "
    "model.delta_net.full_attention_interval=2 model.qk_norm=true model.rms_norm_zero_centered=true "
    "model.rms_norm_eps=0.01 mesh.data=1 mesh.expert=2 mesh.tensor=2 model.num_layers=2 model.moe.moe_layer_freq=1",
    "z-loss of a batch in parts": "train.z_loss_multiplier=0.1 train.grad_accumulation=2 mesh.data=2 mesh.expert=2 "
    "model.num_layers=1 model.moe.moe_layer_freq=1",
    "parameters sharded inside groups of data ranks, in a loop": f"{UNIFIED} schedule.weight_grad=greedy "
    "schedule.grad_reduce=bucketed optimizer.zero=3 optimizer.zero_axes=[expert] mesh.data=2 mesh.expert=2 "
    "model.num_layers=4 model.moe.moe_layer_freq=1 optimizer.qk_clip=1",
    "gradients sharded inside groups of ranks, of a batch in parts": "optimizer.zero=2 optimizer.zero_axes=[tensor] "
    "train.grad_accumulation=2 mesh.data=1 mesh.context=2 mesh.tensor=2 model.num_layers=1 "
    "model.moe.moe_layer_freq=1",
    "moments in host memory, in a schedule": f"{UNIFIED} optimizer.offload_moments=true optimizer.zero=3 mesh.data=2 "
    "mesh.expert=2 model.num_layers=2 model.moe.moe_layer_freq=1",
    "moments of muon in host memory": "optimizer.offload_moments=true optimizer.name=muon optimizer.qk_clip=1 "
    "optimizer.zero=1 mesh.data=2 mesh.expert=2 mesh.tensor=2 model.num_layers=2 model.moe.moe_layer_freq=1",
    "parameters sharded over data ranks alone": "optimizer.zero=3 optimizer.zero_axes=[data] mesh.data=2 "
    "mesh.expert=2 schedule.grad_reduce=block model.num_layers=2 model.moe.moe_layer_freq=2",
}


@pytest.mark.parametrize("case", ARRAY.cases, ids=name_of)
def test_a_step_is_the_references(case: Case) -> None:
    ARRAY.check_or_search(case)


@pytest.mark.parametrize("case", ROUNDED.cases, ids=name_of)
def test_a_step_of_rounded_numbers_is_near_the_references(case: Case) -> None:
    ROUNDED.check_or_search(case)


@pytest.mark.parametrize("name", OTHERS)
def test_so_is_what_few_steps_have(name: str) -> None:
    assert_is_the_references_step(config_of_settings(OTHERS[name]))


@pytest.mark.parametrize("array", [ARRAY, ROUNDED], ids=["exact", "rounded"])
def test_all_settings_meet(array: Array) -> None:
    array.assert_all_meet()


def test_what_is_left_out_is_refused() -> None:
    ROUNDED.assert_left_out_is_refused()


def test_exact_numbers_are_compared_exactly_with_a_plain_step_among_the_cuts() -> None:
    assert not any(ARRAY.rounding_of(case) for case in ARRAY.cases)
    assert all((ARRAY.config_of(case).step_kind == "plain") >= (case["cut"] == "plain") for case in ARRAY.cases)


def test_four_devices_are_enough() -> None:
    configs = [array.config_of(case) for array in (ARRAY, ROUNDED) for case in array.cases]
    assert {int(np.prod(list(config.mesh.sizes.values()))) for config in configs} == {4}
