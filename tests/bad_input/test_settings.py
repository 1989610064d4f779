"""Settings that are wrong by themselves or together: of the config, the schedule and the mesh."""

import pytest

from moe_jax.run import memory_check
from tests.bad_input.cases import Refusal, cases

CONFIG = [
    ("an unknown key", "train.stpes=4", "unknown setting train.stpes: did you mean train.steps?"),
    ("a key of another section", "train.lr=1", "unknown setting train.lr: did you mean optimizer.learning_rate?"),
    (
        "three tokens",
        "model.num_nextn_predict_layers=2",
        "model.num_nextn_predict_layers=2 must be at most 1",
    ),
    ("no key", "train", "override 'train' is not of the form section.key=value, e.g. train.steps=100"),
    ("a wrong type", "train.steps=many", "train.steps='many' must be a whole number, not text"),
    ("a fraction of a step", "train.steps=0.5", "train.steps=0.5 must be a whole number"),
    (
        "no YAML",
        "'train.steps=]'",
        "override 'train.steps=]': expected the node content, but found ']' at line 1, column 1",
    ),
    ("out of range", "train.batch_size=0", "train.batch_size=0 must be at least 1"),
    ("more than jax counts", "train.seed=3_000_000_000", "train.seed=3000000000 must be at most 2147483647"),
    (
        "copies in what is no folder",
        "checkpoint.safety_copies_every=1 checkpoint.safety_copies_dir=tiny.yaml",
        "checkpoint.safety_copies_dir=tiny.yaml is no folder: name one in memory, or use "
        "checkpoint.safety_copies_every=0",
    ),
    ("a trace of the start-up", "log.trace_step=1", "log.trace_step=1 must be at least 2 (or null)"),
    (
        "a trace that ends before it begins",
        "log.trace_step=[3,2]",
        "log.trace_step=[3, 2] must be a step, or the first and the last of several, e.g. [10, 13] (or null)",
    ),
    ("no step", "log.trace_step=soon", "log.trace_step='soon' must be a whole number, not text"),
    (
        "a trace after the end",
        "log.trace_step=5",
        "log.trace_step=5 is never reached with train.steps=4: use 5 steps or more, or null",
    ),
    ("not a number", "optimizer.learning_rate=.nan", "optimizer.learning_rate=nan must be a finite number"),
    (
        "no record to replay",
        "train.replay_routing=full",
        "train.replay_routing=full has no routing.json: name a folder that a run with train.record_routing has written",
    ),
    ("no bad steps", "train.bad_in_a_row=0", "train.bad_in_a_row=0 must be at least 1 (or null)"),
    ("a spike below the median", "train.spike_factor=0.9", "train.spike_factor=0.9 must be at least 1 (or null)"),
    (
        "several lines",
        "'model.moe.gate=\"a\\nb\"'",
        "model.moe.gate=a b must be softmax, sigmoid, gpt_oss, noisy, sparsemixer, xmoe, deepseek_v2, deepseek_v3, "
        "hash, random, batch_prioritised, expert_choice, softmoe or balanced, or package.module:name",
    ),
    (
        "no mesh axis to shard over",
        "optimizer.zero=3 optimizer.zero_axes=[node]",
        "optimizer.zero_axes=node must be data or expert or context or tensor",
    ),
    ("a yes for a stage", "optimizer.zero=true", "optimizer.zero=true must be 0 or 1 or 2 or 3"),
    (
        "sums of each part after all ticks",
        "optimizer.zero=2 mesh.pipeline=2 train.grad_accumulation=2",
        "optimizer.zero=2 sums each part of a batch, which is not for the ticks of schedule.pipeline=1f1b, after "
        "which gradients are summed: use optimizer.zero=1",
    ),
    (
        "an unknown choice",
        "schedule.remat=ful",
        "schedule.remat=ful must be none or dots or full or chunk: did you mean full?",
    ),
    (
        "an unknown product",
        "train.grouped_product=palas",
        "train.grouped_product=palas must be auto or blocks or ragged or pallas or hopper or blackwell or megablox or "
        "tokamax: did you mean pallas?",
    ),
    (
        "a product of other devices",
        "train.grouped_product=pallas",
        "train.grouped_product=pallas is not for these devices, which are cpu: use train.grouped_product=auto, or "
        "blocks",
    ),
    (
        "a choice that nothing makes",
        "train.steps=auto",
        "train.steps=auto: nothing chooses it, so give a value (auto is for exchange.context_form, "
        "exchange.tensor_chunks, exchange.tensor_form, mesh.context, mesh.data, mesh.expert, "
        "mesh.experts_over_context, mesh.experts_over_tensor, mesh.pipeline, mesh.tensor, optimizer.zero, "
        "schedule.backward_microbatches, schedule.bucket_cap_mb, schedule.expert_chunks, schedule.grad_reduce, "
        "schedule.head_blocks, schedule.microbatches, "
        "schedule.pipeline, "
        "schedule.policy, schedule.remat, schedule.virtual_stages, "
        "schedule.weight_grad, train.grad_accumulation)",
    ),
    (
        "a plan for other devices",
        "schedule.policy=auto plan.cluster=h100x16",
        "plan.cluster=h100x16 has 16 devices, and this run has 8: name a cluster of as many, or use plan.cluster=null",
    ),
    (
        "a plan for no known devices",
        "schedule.policy=auto plan.cluster=h10x8",
        "plan.cluster=h10x8: cluster 'h10x8' is unknown: did you mean h100-8?",
    ),
    (
        "moves of experts priced for other devices",
        "mesh.expert=2 migration.enabled=true model.moe.capacity_factor=null plan.cluster=h100x16",
        "plan.cluster=h100x16 has 16 devices, and this run has 8: name a cluster of as many, or use plan.cluster=null",
    ),
    (
        "a plan that nothing fits",
        "schedule.policy=auto mesh.tensor=3 mesh.data=auto",
        "nothing trains on cpux8 (mesh.expert=1 × mesh.tensor=3 is no mesh of 8 devices: use mesh.tensor=2)",
    ),
    ("more choices than experts", "model.moe.top_k=5", "model.moe.top_k=5 must be 1..model.moe.num_experts=4"),
    (
        "heads that do not divide the width",
        "model.num_attention_heads=3",
        "model.hidden_size=16 is not divisible by model.num_attention_heads=3: use 1, 2, 4, 8 or 16 heads, or set "
        "model.head_dim",
    ),
]

PIPELINES = (
    "needs a policy that pipelines: use schedule.policy=unified or expert_pipeline "
    "(vanilla runs one microbatch; train.grad_accumulation cuts the batch in time)"
)

SCHEDULE = [
    (
        "an unknown policy",
        "schedule.policy=unifed",
        "schedule.policy=unifed must be vanilla or expert_pipeline or unified or package.module:name: "
        "did you mean unified?",
    ),
    (
        "an unknown place for weight gradients",
        "schedule.weight_grad=late",
        "schedule.weight_grad=late must be inline or greedy",
    ),
    (
        "an unknown place for reductions",
        "schedule.grad_reduce=bucket",
        "schedule.grad_reduce=bucket must be end or block or bucketed: did you mean bucketed?",
    ),
    ("no microbatch", "schedule.microbatches=0", "schedule.microbatches=0 must be at least 1"),
    (
        "no microbatch backward",
        "schedule.policy=unified schedule.backward_microbatches=0",
        "schedule.backward_microbatches=0 must be at least 1 (or null)",
    ),
    ("microbatches without a policy for them", "schedule.microbatches=2", f"schedule.microbatches=2 {PIPELINES}"),
    (
        "microbatches of the backward pass alone",
        "schedule.backward_microbatches=2",
        f"schedule.backward_microbatches=2 {PIPELINES}",
    ),
    (
        "chunks of microbatches that there are not",
        "schedule.policy=expert_pipeline schedule.expert_chunks=2",
        "schedule.expert_chunks=2 cuts microbatches, which schedule.policy=expert_pipeline does not have: "
        "use schedule.policy=unified, or schedule.microbatches, which cuts slots here",
    ),
    (
        "a backward pass cut where the forward pass is not",
        "schedule.policy=unified schedule.microbatches=4 schedule.backward_microbatches=3",
        "schedule.backward_microbatches=3 cannot be made of schedule.microbatches=4: use 1, 2 or 4",
    ),
    (
        "a batch cut before its tokens are compared",
        "schedule.policy=unified schedule.microbatches=2 model.moe.gate=expert_choice",
        "model.moe.gate=expert_choice compares all tokens of a batch, and schedule.microbatches=2 cuts the batch "
        "before: use schedule.policy=expert_pipeline, which cuts after the gate, or another gate",
    ),
    (
        "tokens in the order of their scores without slots",
        "model.moe.gate=batch_prioritised model.moe.capacity_factor=null",
        "model.moe.gate=batch_prioritised chooses who gets one of few slots, and model.moe.capacity_factor=null limits "
        "none: set model.moe.capacity_factor, or another gate",
    ),
    (
        "a batch that does not divide into microbatches",
        "schedule.policy=unified schedule.microbatches=2",
        "train.batch_size=8 is not divisible by train.grad_accumulation=1 × 8 devices (data × expert) "
        "× schedule.microbatches=2 = 16: use 16",
    ),
    (
        "chunks of a reduction that is whole",
        "schedule.grad_reduce=block schedule.bucket_cap_mb=1",
        "schedule.bucket_cap_mb=1.0 cuts nothing with schedule.grad_reduce=block: "
        "set schedule.grad_reduce=bucketed, or schedule.bucket_cap_mb=null",
    ),
    (
        "gathers of whole parameters",
        "schedule.param_gather=block optimizer.zero=1",
        "schedule.param_gather=block gathers nothing with optimizer.zero=1: "
        "set optimizer.zero=3, or schedule.param_gather=prefetch",
    ),
    (
        "chunks of nothing",
        "schedule.grad_reduce=bucketed schedule.bucket_cap_mb=0",
        "schedule.bucket_cap_mb=0.0 must be at least 0.0001 (or null)",
    ),
    (
        "chunks of less than a number",
        "schedule.grad_reduce=bucketed schedule.bucket_cap_mb=1e-9",
        "schedule.bucket_cap_mb=1e-09 must be at least 0.0001 (or null)",
    ),
    (
        "chunks of no size",
        "schedule.grad_reduce=bucketed schedule.bucket_cap_mb=.nan",
        "schedule.bucket_cap_mb=nan must be a finite number",
    ),
    (
        "an unknown all-to-all",
        "exchange.algorithm=rings",
        "exchange.algorithm=rings must be auto, flat, ring, hier_1d, hier_2d, halo, ragged or background, or "
        "package.module:name: did you mean ring?",
    ),
    (
        "an unknown reduction",
        "exchange.reduction=allreduce",
        "exchange.reduction=allreduce must be all_reduce or scatter_gather or ring or background: "
        "did you mean all_reduce?",
    ),
    (
        "nodes that do not divide the expert axis",
        "mesh.expert=4 exchange.algorithm=halo exchange.ranks_per_node=3",
        "exchange.ranks_per_node=3 does not divide mesh.expert=4: use 1, 2 or 4",
    ),
    (
        "nodes that do not divide the rest of the devices",
        "mesh.data=2 mesh.expert=-1 exchange.ranks_per_node=3",
        "exchange.ranks_per_node=3 does not divide mesh.expert=4: use 1, 2 or 4",
    ),
    ("no rank on a node", "exchange.ranks_per_node=0", "exchange.ranks_per_node=0 must be at least 1 (or null)"),
    (
        "a buffer below an even share",
        "model.moe.capacity_factor=null exchange.rank_capacity_factor=0.5",
        "exchange.rank_capacity_factor=0.5 must be at least 1 (or null)",
    ),
    (
        "an endless buffer",
        "exchange.rank_capacity_factor=.inf",
        "exchange.rank_capacity_factor=inf must be a finite number",
    ),
    (
        "a ragged exchange of a whole batch",
        "exchange.algorithm=ragged",
        "exchange.algorithm=ragged sends microbatches, which schedule.policy=vanilla does not have: "
        "use schedule.policy=unified, or exchange.algorithm=auto",
    ),
    (
        "a ragged exchange without slots",
        "exchange.algorithm=ragged schedule.policy=unified model.moe.capacity_factor=null",
        "exchange.algorithm=ragged needs model.moe.capacity_factor and model.moe.dispatcher=sort: "
        "set them, or exchange.algorithm=auto",
    ),
    (
        "a ragged exchange with hooks",
        "exchange.algorithm=ragged schedule.policy=unified model.moe.hooks=fp8",
        "exchange.algorithm=ragged does not call model.moe.hooks=fp8: "
        "use exchange.algorithm=flat, or model.moe.hooks=none",
    ),
    (
        "products of another precision",
        "model.moe.expert_matmuls=fp4",
        "model.moe.expert_matmuls=fp4 must be compute_dtype or fp8: did you mean fp8?",
    ),
    (
        "products of experts that there are not",
        "model.moe.expert_matmuls=fp8 model.moe.num_experts=0",
        "model.moe.expert_matmuls=fp8, and with model.moe.num_experts=0 there are no experts: "
        "set model.moe.num_experts, or model.moe.expert_matmuls=compute_dtype",
    ),
    (
        "unknown hooks",
        "model.moe.hooks=fp16",
        "model.moe.hooks=fp16 must be none or bf16 or fp8 or package.module:name: did you mean bf16?",
    ),
]

PARTS = [
    (
        "no such module",
        "model.moe.gate=my.gates:choose",
        "model.moe.gate=my.gates:choose: importing my.gates fails with \"No module named 'my'\": "
        "name a module of the folder that the command runs in, or an installed one",
    ),
    (
        "no such function",
        "model.moe.gate=moe_jax.models.gates.softmax:chose",
        "model.moe.gate=moe_jax.models.gates.softmax:chose: moe_jax.models.gates.softmax has no chose: "
        "did you mean choose?",
    ),
    (
        "no function",
        "model.moe.gate=moe_jax.models.gates.sigmoid:__doc__",
        "model.moe.gate=moe_jax.models.gates.sigmoid:__doc__ is of type str: name a function",
    ),
    (
        "another function than a gate",
        "model.moe.gate=tests.models.test_named:not_a_choice",
        "model.moe.gate=tests.models.test_named:not_a_choice returns tuple: "
        "return a moe_jax.models.gates.choice.TopKRouting",
    ),
    (
        "a gate of another shape",
        "model.moe.gate=tests.models.test_named:one_expert",
        "model.moe.gate=tests.models.test_named:one_expert makes expert_Tk int32[5, 1] of 5 tokens' logits: "
        "it must be int32[5, 2]",
    ),
    (
        "no dispatcher",
        "model.moe.dispatcher=moe_jax.models.dispatchers.capacity:permute",
        "model.moe.dispatcher=moe_jax.models.dispatchers.capacity:permute is of type function: "
        "name a moe_jax.models.dispatchers.protocol.TokenDispatcher",
    ),
    (
        "no hooks",
        "model.moe.hooks=moe_jax.models.hooks.fp8:encode",
        "model.moe.hooks=moe_jax.models.hooks.fp8:encode is of type function: "
        "name a moe_jax.models.hooks.protocol.Hooks",
    ),
]

MESH = [
    (
        "experts that do not divide",
        "mesh.expert=8",
        "model.moe.num_experts=4 is not divisible by mesh.expert=8: use 8 experts, or mesh.expert=1, 2 or 4",
    ),
    (
        "experts that do not divide over what is left",
        "mesh.data=1 mesh.expert=-1",
        "model.moe.num_experts=4 is not divisible by mesh.expert=8: use 8 experts, or mesh.expert=1, 2 or 4",
    ),
    (
        "copies of experts that tensor ranks share, of which as many as devices are left",
        "mesh.data=2 mesh.expert=2 mesh.tensor=-1 exchange.hot_experts=1 model.moe.capacity_factor=null",
        "exchange.hot_experts=1 with mesh.tensor=2, whose ranks share each expert: use mesh.experts_over_tensor=true, "
        "mesh.tensor=1, or exchange.hot_experts=0",
    ),
    (
        "experts over context ranks of which there is one",
        "mesh.experts_over_context=true",
        "mesh.experts_over_context=true cuts experts over context ranks, and mesh.context=1: "
        "use mesh.context=2 or more, or mesh.experts_over_context=false",
    ),
    (
        "experts that do not divide over context ranks that are left",
        "mesh.data=1 mesh.context=-1 mesh.experts_over_context=true",
        "model.moe.num_experts=4 is not divisible by mesh.context=8 × mesh.expert=1: "
        "use 8 experts, or mesh.experts_over_context=false",
    ),
    (
        "a product of too few devices",
        "mesh.data=3",
        "mesh: data=3 × expert=1 = 3, but there are 8 devices: use mesh.data=8 or mesh.data=-1",
    ),
    (
        "a product of too many devices",
        "mesh.data=4 mesh.expert=4",
        "mesh: data=4 × expert=4 = 16, but there are 8 devices: use mesh.data=2 or mesh.data=-1",
    ),
    (
        "an axis that does not divide the devices",
        "mesh.expert=5 model.moe.num_experts=5",
        "mesh: expert=5 = 5 does not divide the 8 devices, so mesh.data=-1 has no value: "
        "use mesh.expert=4 with mesh.data=-1",
    ),
    (
        "sharding over what has one rank, as it turns out",
        "mesh.expert=4 mesh.tensor=2 optimizer.zero=1 optimizer.zero_axes=[data]",
        "optimizer.zero_axes=[data] shards over nothing, since this mesh has one rank along it: "
        "use optimizer.zero_axes=[expert, tensor], or null for all axes",
    ),
    (
        "two axes that take the rest",
        "mesh.expert=-1",
        "mesh.data and mesh.expert are both -1, and only one axis can take the remaining devices: set mesh.data=1",
    ),
    (
        "more stages than blocks",
        "mesh.pipeline=8 mesh.data=1",
        "mesh.pipeline=8 needs as many groups of blocks, and model.num_layers=1 has 1 (whole periods of kinds of "
        "blocks): use mesh.pipeline=1, or more blocks",
    ),
    (
        "more model chunks than blocks",
        "mesh.pipeline=2 mesh.data=1 mesh.expert=4 schedule.pipeline=interleaved schedule.virtual_stages=2 "
        "train.grad_accumulation=2 model.num_layers=3",
        "mesh.pipeline=2 × schedule.virtual_stages=2 = 4 needs as many groups of blocks, and model.num_layers=3 has 3 "
        "(whole periods of kinds of blocks): use schedule.virtual_stages=1 schedule.pipeline=1f1b, or more blocks",
    ),
    (
        "tensor ranks that do not divide the heads",
        "mesh.tensor=8",
        "model.num_attention_heads=2 is not divisible by mesh.tensor=8: use 8, or mesh.tensor=1 or 2",
    ),
    (
        "a batch that does not divide",
        "train.batch_size=12",
        "train.batch_size=12 is not divisible by train.grad_accumulation=1 × 8 devices (data × expert) = 8: "
        "use 8 or 16",
    ),
    (
        "simulated devices after jax has started",
        "mesh.cpu_devices=4",
        "mesh.cpu_devices=4 comes too late, jax already runs with 8 cpu devices here: "
        "restart Python, or set mesh.cpu_devices=null",
    ),
    (
        "a coordinator alone",
        "--coordinator=here:8476",
        "--coordinator=here:8476 also needs --num-processes and --process-id: give all three or none",
    ),
    (
        "a coordinator without a port",
        "--coordinator=here --num-processes=2 --process-id=0",
        "--coordinator=here must be HOST:PORT with a port in 1..65535, e.g. 10.0.0.1:8476",
    ),
]


@pytest.mark.parametrize(("words", "message"), cases(CONFIG + SCHEDULE + PARTS + MESH))
def test_settings_that_cannot_be(words: str, message: str, assert_refused: Refusal) -> None:
    assert_refused(f"train --config tiny.yaml {words}", message)


def test_a_model_without_room_in_this_machine_is_not_compiled(
    assert_refused: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("moe_jax.run.loop.compile_programs")
    monkeypatch.setattr(memory_check, "machine_bytes", lambda: 100_000)
    monkeypatch.setattr(memory_check, "size", lambda num_bytes: "MUCH")
    little = "a step takes about MUCH on 8 simulated devices, MUCH of it for parameters and optimizer, and this machine"
    assert_refused(
        "train --config tiny.yaml",
        f"{little} has MUCH: use a smaller model, or cut it into more parts (mesh.expert, optimizer.zero=1) on the "
        "same devices",
    )
    assert_refused(
        "train --config tiny.yaml train.batch_size=64 data.validation_fraction=0.5",
        f"{little} has MUCH: use a smaller train.batch_size or data.seq_len, more train.grad_accumulation, or "
        "schedule.remat=full",
    )
