"""The settings of a training step, factor by factor, and which of them do not go together.

The first value of each factor is the default. What the config refuses is named with `refused`; what it takes, and what
changes nothing, with `idle`. Numbers that are rounded to fewer digits than float32 has can only be compared roughly, so
`ARRAY` has none; in `ROUNDED` they meet all other settings.
"""

from itertools import chain

from tests.pairwise import Case
from tests.step.arrays import Array, Pairs

FACTORS: dict[str, dict[str, str]] = {
    "cut": {
        "plain": "",
        "whole": "",  # with weight gradients that are scheduled
        "slots2": "schedule.policy=expert_pipeline schedule.microbatches=2",
        "slots2b3": "schedule.policy=expert_pipeline schedule.microbatches=2 schedule.backward_microbatches=3",
        "unified1": "schedule.policy=unified",
        "unified2": "schedule.policy=unified schedule.microbatches=2",
        "unified4": "schedule.policy=unified schedule.microbatches=4",
        "unified4b2": "schedule.policy=unified schedule.microbatches=4 schedule.backward_microbatches=2",
        "unified1x2": "schedule.policy=unified schedule.expert_chunks=2",
        "unified2x3": "schedule.policy=unified schedule.microbatches=2 schedule.expert_chunks=3",
    },
    "weight_grad": {"inline": "", "greedy": "schedule.weight_grad=greedy"},
    # a sum of 0.002 MB is 500 elements; the model's matrices have 256 and more
    "when": {
        "end": "",
        "block": "schedule.grad_reduce=block",
        "matrices": "schedule.grad_reduce=bucketed",
        "chunks": "schedule.grad_reduce=bucketed schedule.bucket_cap_mb=0.002",
    },
    "sums": {
        "all_reduce": "",
        "scatter": "exchange.reduction=scatter_gather",
        "ringsum": "exchange.reduction=ring",
        "backsum": "exchange.reduction=background",
    },
    "exchange": {
        "flat": "exchange.algorithm=flat",
        "ring": "exchange.algorithm=ring",
        "background": "exchange.algorithm=background",
        "ragged": "exchange.algorithm=ragged",
        "hier_1d": "exchange.algorithm=hier_1d exchange.ranks_per_node=2",
        "hier_2d": "exchange.algorithm=hier_2d exchange.ranks_per_node=2",
        "halo": "exchange.algorithm=halo exchange.ranks_per_node=2",
    },
    "mesh": {
        "d2e2": "mesh.data=2 mesh.expert=2",
        "e4": "mesh.data=1 mesh.expert=4",
        "e2t2": "mesh.data=1 mesh.expert=2 mesh.tensor=2",
        "e2t2_chunked": "mesh.data=1 mesh.expert=2 mesh.tensor=2 "
        "exchange.tensor_form=sharded_chunked exchange.tensor_chunks=3",
        "e2t2_scheduled": "mesh.data=1 mesh.expert=2 mesh.tensor=2 exchange.tensor_form=sharded_scheduled",
        "e2t2_whole": "mesh.data=1 mesh.expert=2 mesh.tensor=2 mesh.experts_over_tensor=true",
        "c2e2": "mesh.data=1 mesh.context=2 mesh.expert=2",
        "c2e2_shared": "mesh.data=1 mesh.context=2 mesh.expert=2 mesh.experts_over_context=true",
        "c2t2": "mesh.data=1 mesh.context=2 mesh.tensor=2",
    },
    "remat": {"keep": "", "dots": "schedule.remat=dots", "full": "schedule.remat=full"},
    "gate": {
        "softmax": "",
        "noisy": "model.moe.gate=noisy model.moe.top_k=3",
        # with the norms and the head of Phi-3.5-MoE
        "sparsemixer": "model.moe.gate=sparsemixer model.moe.router_jitter_noise=0.3 model.normalization=layernorm "
        "model.head_bias=true",
        # with the attention of Llama 4; 12 tokens are two and a half chunks
        "on_input": "model.moe.gate=sigmoid model.moe.top_k=1 model.moe.apply_probs_on_input=true "
        "model.attention.chunk_size=5 model.attention.full_every=2 model.attention.nope_every=2 "
        "model.attention.attn_scale=0.3 model.attention.floor_scale=3 model.qk_l2_norm=true",
        "xmoe": "model.moe.gate=xmoe model.moe.router_rank=5",
        "v3": "model.moe.gate=deepseek_v3 model.moe.n_group=4 model.moe.topk_group=2 model.moe.top_k=3 "
        "model.moe.routed_scaling_factor=2.0",
        "hash": "model.moe.gate=hash",
        "by_score": "model.moe.gate=batch_prioritised",
        "expert_choice": "model.moe.gate=expert_choice",
        "softmoe": "model.moe.gate=softmoe model.moe.slots_per_expert=2",
    },
    "order": {"sort": "", "einsum": "model.moe.dispatcher=einsum"},
    "room": {
        "slots": "model.moe.capacity_factor=1.0",
        "few": "model.moe.capacity_factor=0.7",
        "dropless": "model.moe.capacity_factor=null exchange.rank_capacity_factor=null",
        "buffer": "model.moe.capacity_factor=null exchange.rank_capacity_factor=1.5",
    },
    "attention": {
        "grouped": "",
        "latent": "model.num_key_value_heads=null model.latent.kv_lora_rank=6 model.latent.q_lora_rank=5 "
        "model.latent.qk_nope_head_dim=4 model.latent.qk_rope_head_dim=2 model.latent.v_head_dim=3",
        "sinks": "model.attention.sinks=true model.attention.sliding_window=3 model.attention.full_every=2 "
        "model.attention.bias=true",
        "normed": "model.qk_norm=true model.attention.nope_every=2 model.partial_rotary_factor=0.5",
        # the second and the last of four blocks have attention; for the epsilon see test_attention.py
        "delta_nets": "model.delta_net.num_value_heads=4 model.delta_net.num_key_heads=2 "
        "model.delta_net.key_head_dim=4 model.delta_net.value_head_dim=3 model.delta_net.full_attention_interval=2 "
        "model.attention.output_gate=true model.rms_norm_zero_centered=true model.rms_norm_eps=0.01",
        # the third of four blocks has attention, and the fourth Mamba-2 alone; without other MLPs, those of Nemotron-H
        "mamba": "model.mamba.num_heads=4 model.mamba.head_dim=3 model.mamba.d_state=4 "
        "model.mamba.attn_layer_period=4 model.mamba.attn_layer_offsets=[2] model.mamba.mixer_only_offsets=[3] "
        "model.attention.nope_every=1 model.rms_norm_eps=0.01 model.activation=squared_relu",
    },
    "zero": {
        "zero0": "",
        "zero1": "optimizer.zero=1",
        "zero2": "optimizer.zero=2",
        "zero3": "optimizer.zero=3",
        "zero3_block": "optimizer.zero=3 schedule.param_gather=block",
    },
    "head": {"whole_loss": "", "loss_chunks": "train.loss_chunk=5"},
    "experts": {
        "fixed": "",
        "moved": "migration.enabled=true migration.payback_steps=null",
        "copied": "migration.enabled=true migration.payback_steps=null migration.replicas=1",
        "hot": "exchange.hot_experts=3",
    },
    "blocks": {
        "one": "model.num_layers=1 model.moe.moe_layer_freq=1",
        "dense_below": "model.num_layers=2 model.moe.moe_layer_freq=2",
        "loop": "model.num_layers=4 model.moe.moe_layer_freq=1",
    },
    "parts": {"one_part": "", "two_parts": "train.grad_accumulation=2"},
    "mlps": {
        "swiglu": "",
        "gelu": "model.activation=gelu model.tie_word_embeddings=true model.moe.num_shared_experts=1 "
        "model.embedding_multiplier=3 model.residual_multiplier=0.5 model.attention_multiplier=0.3 "
        "model.logits_scaling=1.5",
        "clipped": "model.activation=clipped_swiglu model.moe.bias=true model.moe.dense_residual=true",
    },
    "balance": {
        "batch": "",
        "pooled": "model.moe.load_balancing_type=pooled",
        "sequence": "model.moe.load_balancing_type=sequence",
    },
    "mtp": {
        "next_token": "",
        "mtp": "model.num_nextn_predict_layers=1 train.mtp_loss_scaling_factor=0.2 "
        "train.mtp_loss_schedule=[[3,0.7],[6,0.4],[7,0.1]]",
    },
    "optimizer": {"adamw": "", "muonclip": "optimizer.name=muon optimizer.qk_clip=1"},
    "routing": {"chosen": "", "replayed": "train.replay_routing=record"},
}
ROUNDING_FACTORS: dict[str, dict[str, str]] = {
    "products": {"whole_products": "", "fp8_products": "model.moe.expert_matmuls=fp8"},
    "hooks": {"bare": "", "bf16": "model.moe.hooks=bf16", "fp8": "model.moe.hooks=fp8"},
    "dtype": {"float32": "", "bfloat16": "train.compute_dtype=bfloat16"},
}

NODES = ("hier_1d", "hier_2d", "halo")
FOUR_RANKS = ("e4", "c2e2_shared", "e2t2_whole")
ONE_RANK = "c2t2"
WITH_TENSOR = ("e2t2", "e2t2_chunked", "e2t2_scheduled", "c2t2")
WHOLE_BATCH = ("by_score", "expert_choice", "softmoe")  # gates that compare all tokens of a device
FILLING = ("expert_choice", "softmoe")
UNCUT_BATCH = ("plain", "whole", "slots2", "slots2b3", "unified1", "unified1x2")
CHUNKED_SLOTS = ("unified1x2", "unified2x3")
UNLIMITED = ("dropless", "buffer")


def but(name: str, *values: str) -> tuple[str, ...]:
    """All values of a factor without these."""
    return tuple(value for value in FACTORS[name] if value not in values)


# pairs that the config refuses
REFUSED: Pairs = [
    {"exchange": "ragged", "cut": ("plain", "whole", "slots2", "slots2b3", *CHUNKED_SLOTS)},
    {"exchange": "ragged", "mesh": WITH_TENSOR},
    {"exchange": "ragged", "gate": FILLING},
    {"exchange": "ragged", "room": UNLIMITED},
    {"exchange": "ragged", "order": "einsum"},
    {"exchange": NODES, "mesh": ONE_RANK},
    {"mesh": "e2t2_scheduled", "cut": "plain"},
    {"gate": WHOLE_BATCH, "cut": but("cut", *UNCUT_BATCH)},
    {"gate": WHOLE_BATCH, "order": "einsum"},
    {"gate": ("by_score", "expert_choice"), "room": UNLIMITED},
    {"gate": FILLING, "balance": "sequence"},
    {"gate": FILLING, "experts": ("moved", "copied", "hot")},
    {"experts": ("moved", "copied", "hot"), "order": "einsum"},
    {"experts": ("moved", "copied", "hot"), "mesh": ONE_RANK},
    {"experts": "hot", "mesh": tuple(mesh for mesh in WITH_TENSOR if mesh != ONE_RANK)},
    {"experts": "copied", "zero": but("zero", "zero0")},
    {"experts": ("copied", "hot"), "room": ("slots", "few")},
    {"gate": "sparsemixer", "attention": "delta_nets"},  # norms with weights around 0
    {"gate": "sparsemixer", "mtp": "mtp"},
    {"gate": "on_input", "attention": ("latent", "sinks", "normed")},
    {"attention": ("delta_nets", "mamba"), "mesh": ("c2e2", "c2e2_shared", "c2t2")},
    {"attention": ("normed", "delta_nets", "mamba"), "optimizer": "muonclip"},
    {"gate": "on_input", "optimizer": "muonclip"},
    {"routing": "replayed", "gate": but("gate", "softmax", "on_input", "v3")},
    {"routing": "replayed", "mtp": "mtp"},
]
ROUNDED_REFUSED: Pairs = [
    {"exchange": "ragged", "hooks": ("bf16", "fp8")},
    {"experts": "hot", "hooks": ("bf16", "fp8")},
]
# pairs of which one setting changes nothing
IDLE: Pairs = [
    # not idle, but what makes a plain step a scheduled one
    {"cut": "plain", "weight_grad": "greedy"},
    {"cut": "whole", "weight_grad": "inline"},
    {"cut": "plain", "when": but("when", "end")},
    {"cut": "plain", "sums": but("sums", "all_reduce")},
    {"cut": "plain", "zero": "zero3_block"},
    {"exchange": but("exchange", "flat", *NODES), "mesh": ONE_RANK},
    {"exchange": NODES, "mesh": but("mesh", *FOUR_RANKS, ONE_RANK)},  # one node
    {"gate": "softmoe", "room": but("room", "slots")},
    {"order": "einsum", "room": "buffer"},  # which holds sorted rows
    # not idle: what a rank has room for depends on the experts that it has, which the reference does not know
    {"experts": ("moved", "copied"), "room": "buffer"},
    {"experts": "hot", "room": "buffer"},  # in which copies' rows need no room
]
# pairs that the config refuses whatever a third factor has
REFUSED_BY_ALL: Pairs = [
    # rooms without and with a limit
    *(
        {"experts": copies, **other}
        for copies in ("copied", "hot")
        for other in ({"exchange": "ragged"}, {"gate": "by_score"})
    ),
]
# of values that need others to be taken at all, the values that take these
COMPANIONS: dict[str, Case] = {
    "ragged": {"cut": "unified2", "room": "slots"},
    "copied": {"room": "dropless"},
    "hot": {"room": "dropless"},
    "e2t2_scheduled": {"cut": "unified1"},
}
ARRAY = Array(FACTORS, REFUSED, IDLE, REFUSED_BY_ALL, COMPANIONS, table="step_cases.txt")
ROUNDING = {"hooks": {"bf16": 1.0, "fp8": 1.0}, "dtype": {"bfloat16": 1.0}, "products": {"fp8_products": 0.05}}
ROUNDED = Array(
    FACTORS | ROUNDING_FACTORS,
    [*REFUSED, *ROUNDED_REFUSED],
    IDLE,
    REFUSED_BY_ALL,
    COMPANIONS,
    needs=lambda pair: not set(chain(*ROUNDING.values())).isdisjoint(pair.values()),
    rounding=ROUNDING,
    table="rounded_cases.txt",
)
