"""Every two settings of a pipelined training step meet in some program, and each is what the slow reference computes.

As `test_every_step.py` has it of steps without a pipeline.
"""

from contextlib import nullcontext

import numpy as np
import pytest

from tests.compiled import exact_programs
from tests.pairwise import Case
from tests.step.arrays import name_of
from tests.step.one_step import assert_is_the_references_step, config_of_settings
from tests.step.pipeline_settings import ARRAY

PIECES = "schedule.policy=expert_pipeline schedule.microbatches=8 model.moe.capacity_factor=0.3"  # 3 slots of an expert
TENSOR_TASKS = "model.num_layers=2 mesh.tensor=2 exchange.tensor_form=sharded_scheduled"
MAMBA = (
    "model.mamba.num_heads=4 model.mamba.head_dim=3 model.mamba.n_groups=2 model.mamba.d_state=4 "
    "model.mamba.attn_layer_period=2 model.mamba.attn_layer_offsets=[1] model.rms_norm_eps=0.1"
)
OTHERS = {
    "no experts": "model.num_layers=2 model.moe.num_experts=0 train.loss_chunk=5 mesh.data=2 mesh.expert=1 "
    "optimizer.qk_clip=1",
    "recomputed chunks, moments in host memory": "model.num_layers=4 schedule.virtual_stages=2 "
    "schedule.pipeline=interleaved schedule.remat=chunk model.moe.first_k_dense_replace=1 optimizer.qk_clip=1 "
    "optimizer.offload_moments=true",
    "recomputed chunks, in pairs": "model.num_layers=2 schedule.pipeline=coscheduled schedule.remat=chunk "
    "model.moe.gate=noisy model.moe.top_k=3",
    "z-loss of the logits": "model.num_layers=2 train.loss_chunk=5 train.z_loss_multiplier=0.1 "
    "model.embedding_multiplier=3 model.residual_multiplier=0.5 model.logits_scaling=1.5",
    "documents, in pairs": "model.num_layers=3 schedule.pipeline=coscheduled_split model.moe.first_k_dense_replace=1 "
    "data.mask_documents=true data.seq_len=24 model.vocab_size=8 optimizer.qk_clip=1",
    # delta nets, which meet all settings above, are blocks like them, in stages of as many blocks
    "Mamba-2 in every other block, and documents": f"{MAMBA} model.num_layers=3 schedule.pipeline=zero_bubble "
    "data.mask_documents=true data.seq_len=24 model.vocab_size=8 schedule.remat=dots",
    # the second of six blocks is attention alone, and the fourth Mamba-2
    "blocks of a mixer alone": f"{MAMBA} model.mamba.attn_layer_period=6 model.mamba.mixer_only_offsets=[1,3] "
    "model.num_layers=6 schedule.pipeline=zero_bubble model.activation=squared_relu",
    "a shorter last stage": "model.num_layers=4 schedule.head_blocks=1 optimizer.qk_clip=1",
    "context ranks with all experts": "model.num_layers=3 mesh.context=2 exchange.context_form=all_gather",
    "gathers over tensor ranks as tasks, in pairs": f"{TENSOR_TASKS} schedule.pipeline=coscheduled "
    "schedule.weight_grad=greedy schedule.policy=unified schedule.microbatches=2",
    "gathers over tensor ranks as tasks, in recomputed chunks": f"{TENSOR_TASKS} schedule.remat=chunk "
    "model.moe.capacity_factor=null exchange.rank_capacity_factor=null",
    "four stages": "model.num_layers=5 mesh.data=2 mesh.pipeline=4 mesh.expert=1 train.grad_accumulation=5 "
    "schedule.pipeline=zero_bubble schedule.weight_grad=greedy model.moe.first_k_dense_replace=1 optimizer.zero=3 "
    "optimizer.qk_clip=1 schedule.policy=unified schedule.microbatches=2",
    "empty pieces of slots": f"model.num_layers=2 schedule.pipeline=zero_bubble {PIECES}",
    "empty pieces next to each other": f"model.num_layers=2 schedule.pipeline=coscheduled_split {PIECES}",
}


@pytest.mark.parametrize("case", ARRAY.cases, ids=name_of)
def test_a_pipelined_step_is_the_references(case: Case) -> None:
    with exact_programs() if ARRAY.rounding_of(case) else nullcontext():  # bounds of rounded numbers are narrow here
        ARRAY.check_or_search(case)


@pytest.mark.parametrize("name", OTHERS)
def test_so_is_what_few_steps_have(name: str) -> None:
    stages = "mesh.data=1 mesh.pipeline=2 mesh.expert=2 train.grad_accumulation=2 model.moe.moe_layer_freq=1"
    config = config_of_settings(f"{stages} {OTHERS[name]}")
    assert_is_the_references_step(config)


def test_all_settings_meet() -> None:
    ARRAY.assert_all_meet()


def test_what_is_left_out_is_refused() -> None:
    ARRAY.assert_left_out_is_refused()


def test_programs_are_few_and_small() -> None:
    sizes = [np.prod(list(ARRAY.config_of(case).mesh.sizes.values())) for case in ARRAY.cases]
    assert len(sizes) <= 26
    assert np.mean(sizes) < 5
