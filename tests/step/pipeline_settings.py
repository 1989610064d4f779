"""The settings of a pipelined training step, factor by factor, and which of them do not go together.

Those of any step are in `step_settings.py`.
"""

from tests.pairwise import Case
from tests.step.arrays import Array, Pairs

FACTORS: dict[str, dict[str, str]] = {
    "order": {
        "1f1b": "schedule.pipeline=1f1b",
        "gpipe": "schedule.pipeline=gpipe",
        "zero_bubble": "schedule.pipeline=zero_bubble",
        "coscheduled": "schedule.pipeline=coscheduled",
        "coscheduled_split": "schedule.pipeline=coscheduled_split",
    },
    "chunks": {"one_chunk": "", "two_chunks": "schedule.virtual_stages=2"},  # 1f1b of two is interleaved
    "mesh": {
        "p2e2": "mesh.data=1 mesh.pipeline=2 mesh.expert=2",
        "p2c2": "mesh.data=1 mesh.pipeline=2 mesh.context=2 mesh.experts_over_context=true "
        "exchange.context_form=all_gather",
        "p2e2t2": "mesh.data=1 mesh.pipeline=2 mesh.expert=2 mesh.tensor=2",
        "p2d2": "mesh.data=2 mesh.pipeline=2",
        "no_stages": "mesh.data=2 mesh.expert=2",  # but concurrent passes
    },
    "cut": {
        "whole": "",
        "slots2": "schedule.policy=expert_pipeline schedule.microbatches=2",
        "unified2": "schedule.policy=unified schedule.microbatches=2",
        "unified2b1": "schedule.policy=unified schedule.microbatches=2 schedule.backward_microbatches=1",
    },
    "weight_grad": {"inline": "", "greedy": "schedule.weight_grad=greedy"},
    "remat": {"keep": "", "dots": "schedule.remat=dots", "full": "schedule.remat=full"},
    "exchange": {"flat": "exchange.algorithm=flat", "background": "exchange.algorithm=background"},
    "blocks": {
        "even": "",
        "dense_below": "model.moe.first_k_dense_replace=1",
        "tied": "model.tie_word_embeddings=true",
        # for the epsilon see test_attention.py; nine blocks of them enlarge round-off more than one
        "delta_nets": "model.delta_net.num_value_heads=4 model.delta_net.num_key_heads=2 "
        "model.delta_net.key_head_dim=4 model.delta_net.value_head_dim=3 model.delta_net.full_attention_interval=null "
        "model.rms_norm_eps=0.1",
    },
    "parts": {"few_parts": "", "more_parts": ""},
    "gate": {
        "softmax": "",
        "noisy": "model.moe.gate=noisy model.moe.top_k=3",
        "hash": "model.moe.gate=hash",
        "by_score": "model.moe.gate=batch_prioritised",
    },
    "experts": {
        "fixed": "",
        "moved": "migration.enabled=true migration.payback_steps=null",
        "copied": "migration.enabled=true migration.payback_steps=null migration.replicas=1 "
        "model.moe.capacity_factor=null exchange.rank_capacity_factor=null",
        "hot": "exchange.hot_experts=3 model.moe.capacity_factor=null exchange.rank_capacity_factor=null",
    },
    "zero": {"zero0": "", "zero1": "optimizer.zero=1", "zero3": "optimizer.zero=3"},
    "dtype": {"float32": "", "bfloat16": "train.compute_dtype=bfloat16"},
    "head": {
        "whole_loss": "",
        "loss_chunks": "train.loss_chunk=5",
        "mtp": "model.num_nextn_predict_layers=1 train.mtp_loss_scaling_factor=0.3",
    },
    "optimizer": {"adamw": "", "muonclip": "optimizer.name=muon optimizer.qk_clip=1"},
}


UNEVEN = ("dense_below", "tied")


def of_several(case: Case) -> str:
    """Blocks and parts of the batch depend on stages and chunks; uneven blocks are one more than chunks.

    Delta nets, whose programs are the largest, are even ones.
    """
    stages, chunks = 1 if case["mesh"] == "no_stages" else 2, 2 if case["chunks"] == "two_chunks" else 1
    few = max(stages, 2)
    parts = few if case["parts"] == "few_parts" else 2 * few if chunks > 1 else few + 1
    name = "interleaved" if chunks > 1 and case["order"] == "1f1b" else None
    return (
        f"model.num_layers={stages * chunks + (case['blocks'] in UNEVEN)} model.moe.moe_layer_freq=1 "
        f"train.grad_accumulation={parts}{f' schedule.pipeline={name}' if name else ''}"
    )


# pairs that the config refuses
REFUSED: Pairs = [
    {"order": ("gpipe", "zero_bubble"), "chunks": "two_chunks"},
    {"mesh": "no_stages", "order": ("gpipe", "zero_bubble", "coscheduled_split")},
    {"mesh": "no_stages", "chunks": "two_chunks"},
    {"mesh": "p2c2", "blocks": "delta_nets"},
    {"optimizer": "muonclip", "blocks": "delta_nets"},
    {"mesh": "p2d2", "experts": ("moved", "copied", "hot")},
    {"mesh": "p2e2t2", "experts": "hot"},
    {"gate": "by_score", "cut": ("unified2", "unified2b1")},
    {"gate": "by_score", "experts": ("copied", "hot")},
    {"experts": "copied", "zero": ("zero1", "zero3")},
]
# pairs of which one setting changes nothing
IDLE: Pairs = [
    {"mesh": "no_stages", "order": "1f1b"},  # no pipeline at all
    # not idle: rounded scores choose other experts, and nothing is near the reference any more
    {"dtype": "bfloat16", "gate": ("softmax", "noisy", "by_score")},
]
ARRAY = Array(
    FACTORS,
    REFUSED,
    IDLE,
    companions={"no_stages": {"order": "coscheduled"}},
    rounding={"dtype": {"bfloat16": 0.2}},
    table="pipeline_cases.txt",
    further=of_several,
)
