"""Plans of pipelines: ticks take what their passes take, buffers what the table needs, and plans use them."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import pytest

from moe_jax.config import Config, DataConfig, MeshConfig, ModelConfig, MoEConfig, ScheduleConfig, TrainConfig
from moe_jax.config.draft import Draft, open_draft, sections_of
from moe_jax.config.layer_layout import Stages
from moe_jax.config.yaml_io import load_config, load_draft
from moe_jax.parallel.mesh import make_mesh
from moe_jax.plan.candidates import Refused, on_meshes
from moe_jax.plan.clusters import LinkCurve, find_cluster
from moe_jax.plan.collective_costs import DeviceGroup, group_over
from moe_jax.plan.estimate import estimate
from moe_jax.plan.measured import MeasuredTimes
from moe_jax.plan.memory import step_memory
from moe_jax.plan.orthogonalizing import orthogonalizing_bytes
from moe_jax.plan.pass_orders import orders_of
from moe_jax.plan.pass_times import PassTimes
from moe_jax.plan.pipelined import PipelinedStep
from moe_jax.plan.plan_text import facts, table
from moe_jax.plan.planner import PlanError, plan
from moe_jax.plan.resources import parameters_per_device
from moe_jax.plan.search import PlanSearch
from moe_jax.plan.step_times import Step
from moe_jax.schedule.pipelines.build import make_table
from moe_jax.step.trainer import make_trainer
from tests.small import small_config

ROOT = Path(__file__).parents[2]
H100S = find_cluster("h100x8")
# links that take no time, and no loss in small products: what is left is what stages compute
NO_LINKS = dataclasses.replace(
    H100S,
    device=dataclasses.replace(H100S.device, kernel_s=0.0, units=find_cluster("cpu-8").device.units),
    levels=tuple(
        dataclasses.replace(level, bytes_per_s=1e18, ring=LinkCurve(0.0), all_to_all=None) for level in H100S.levels
    ),
)
ALIKE_TICKS = ("gpipe", "coscheduled")
PIPELINES = [
    *(("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1)),
    *(("interleaved", 2), ("coscheduled", 1), ("coscheduled", 2), ("coscheduled_split", 2)),
]


def config_of(
    pipeline: str = "1f1b", chunks: int = 1, stages: int = 4, parts: int = 8, layers: int = 16, vocab: int = 8, **rest
) -> Config:
    """A config with one sequence in each part, on 8 devices."""
    moe = MoEConfig(num_experts=8, top_k=2, intermediate_size=1024)
    expert = 8 // stages
    return Config(
        model=ModelConfig(vocab_size=vocab, hidden_size=1024, num_layers=layers, num_attention_heads=8, moe=moe),
        mesh=MeshConfig(data=1, expert=expert, pipeline=stages),
        schedule=ScheduleConfig(pipeline=pipeline, virtual_stages=chunks, **rest),
        data=DataConfig(seq_len=1024),
        train=TrainConfig(batch_size=expert * parts, grad_accumulation=parts),
    )


@pytest.mark.parametrize("policy", [{}, {"policy": "expert_pipeline", "microbatches": 2}])
def test_one_stage_and_one_part_take_what_a_step_without_ticks_takes(policy) -> None:
    config = config_of(stages=1, parts=1, layers=4, vocab=8192, **policy)
    # sums start together or one by one
    levels = tuple(dataclasses.replace(level, ring=LinkCurve(0.0, level.ring.efficiency)) for level in H100S.levels)
    cluster = dataclasses.replace(H100S, levels=levels)
    step = Step(config, cluster)
    ticks, whole = PipelinedStep(config, cluster, MeasuredTimes({})).seconds, step.seconds
    held = parameters_per_device(config, config.mesh.sizes) - config.model.hidden_size
    added_s = step.adding_s(held)  # to sums of nothing
    assert ticks["compute"] == pytest.approx(whole["compute"] + added_s)
    assert ticks["exchange"] == pytest.approx(whole["exchange"])
    assert ticks["step"] == pytest.approx(whole["step"] + added_s, rel=0.01)
    assert ticks["idle"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("name", "chunks"), [each for each in PIPELINES if each[0] in ALIKE_TICKS])
def test_equal_stages_are_idle_for_as_long_as_the_closed_formula_predicts(name, chunks) -> None:
    """(S-1)(F+B+W)/V, where ticks lose nothing: docs/pipelines.md. Without exchanges nothing can be hidden."""
    busy = estimate(config_of(name, chunks), NO_LINKS).busy
    assert busy.exposed == pytest.approx(0, abs=1e-6)
    assert busy.idle == pytest.approx((4 - 1) * busy.compute / 8 / chunks, rel=0.02)


def test_plans_take_blocks_off_the_stage_of_a_large_head() -> None:
    config = config_of(vocab=100_000)
    best = plan(Draft(**sections_of(config), open=frozenset({"schedule.head_blocks"})), H100S).best
    assert best.config.schedule.head_blocks > 0
    assert best.estimate.step_s < 0.95 * estimate(config, H100S).step_s


@pytest.mark.parametrize("shared", [True, False])
def test_sends_go_after_exchanges_that_want_their_links(shared) -> None:
    """Neighbours in a node share its links; on two nodes only stages' sends leave one."""
    node = 8 if shared else 2
    levels = [
        dataclasses.replace(H100S.levels[0], devices=n, bytes_per_s=1e9, ring=LinkCurve(0.0), all_to_all=None)
        for n in (node, 8)
    ]
    found = PipelinedStep(config_of("gpipe"), dataclasses.replace(H100S, levels=tuple(levels)), MeasuredTimes({}))
    chunk = PassTimes(found.step, split=False, pairs=False).chunk(found.stages.groups[0])
    passes_s = [max(each.seconds, found.send_s + shared * each.exchange) for each in (chunk.forward, chunk.backward)]
    ticks_s = sum(passes_s) + 2 * found.send_s  # in each tick both sends: one has no pass concurrent with it
    assert found.seconds["step"] - found.seconds["sums"] == pytest.approx((8 + 4 - 1) * ticks_s, rel=0.01)


@pytest.mark.parametrize(("name", "chunks"), PIPELINES)
def test_ticks_take_what_the_table_takes_in_lock_step(name, chunks) -> None:
    config = config_of(name, chunks, policy="unified")
    found = PipelinedStep(config, NO_LINKS, MeasuredTimes({}))
    whole = found.seconds
    split, pairs = name in ("zero_bubble", "coscheduled_split"), name in ("coscheduled", "coscheduled_split")
    passes = PassTimes(found.step, split, pairs).chunk(found.stages.groups[0])
    forward_s, backward_s, weight_s, together_s = (each.seconds for each in passes)
    apart_s = {"F": forward_s, "B": backward_s if split else backward_s + weight_s, "W": weight_s}

    def seconds(slot) -> float:
        kinds = {direction for direction, _ in slot.tasks()}
        if together_s and {"F", "B"} <= kinds:
            return together_s + sum(apart_s[kind] for kind in kinds - {"F", "B"})
        return sum(apart_s[kind] for kind in kinds)

    expected_s = sum(max(map(seconds, slots)) for slots in make_table(name, 4, 8, chunks).ticks)
    assert whole["step"] - whole["sums"] == pytest.approx(expected_s, rel=0.02)


def test_multi_token_prediction_takes_the_time_of_a_block_and_a_head_on_the_last_stage() -> None:
    config = config_of()
    with_mtp = dataclasses.replace(config, model=dataclasses.replace(config.model, num_nextn_predict_layers=1))
    plain, more = (PassTimes(Step(each, NO_LINKS), split=False, pairs=False) for each in (config, with_mtp))
    block = plain.chunk(Stages.of(config).groups[-1][:1])
    taken_s = more.ends.head.seconds - plain.ends.head.seconds
    assert taken_s >= 0.99 * (block.forward.seconds + block.backward.seconds + plain.ends.head.seconds)


def test_the_head_and_sends_make_stages_wait() -> None:
    """A stage with a large head takes longer, and all others wait for it; slow links add to every tick."""
    plain, headed = (PipelinedStep(config_of(vocab=vocab), NO_LINKS, MeasuredTimes({})) for vocab in (8, 32768))
    head_s = PassTimes(headed.step, split=False, pairs=False).ends.head.seconds
    assert headed.seconds["step"] - plain.seconds["step"] >= 0.99 * 8 * head_s
    slow = tuple(dataclasses.replace(level, bytes_per_s=1e8) for level in H100S.levels)
    dense = config_of(stages=8)
    late, fast = (
        PipelinedStep(dense, each, MeasuredTimes({})) for each in (dataclasses.replace(H100S, levels=slow), H100S)
    )
    assert late.send_s > 100 * fast.send_s > 0
    num_ticks = len(make_table("1f1b", 8, 8).ticks)
    assert late.seconds["step"] - fast.seconds["step"] >= num_ticks * late.send_s


def test_exchanges_of_a_coscheduled_tick_take_turns() -> None:
    """So that each overlaps with compute of the other pass: nothing that is not in every chunk comes into it."""
    config = config_of("coscheduled", layers=8)
    kinds = ["moe", "moe"]
    orders = orders_of(kinds, config, config.mesh.sizes, "gpu", split=False, pairs=True, measured={})
    exchanges = [side for side, action in orders.together if action.op in ("dispatch", "combine")]
    assert exchanges == ["B", "F"] * (2 * len(kinds))


def test_groups_of_a_stage_leave_out_the_other_stages() -> None:
    mesh = {"data": 2, "pipeline": 4, "context": 1, "expert": 3, "tensor": 5}
    assert group_over(("context", "expert", "tensor"), mesh) == DeviceGroup(30, 1, 2, 60)
    assert group_over(("context",), mesh) == DeviceGroup(2, 60)
    assert group_over(("context", "expert"), mesh | {"pipeline": 1}) == DeviceGroup(6, 5)
    assert group_over(("context", "expert"), mesh | {"data": 1}) == DeviceGroup(3, 5)


def test_activations_of_one_forward_one_backward_do_not_grow_with_the_parts() -> None:
    def activations(name: str, parts: int) -> int:
        return step_memory(config_of(name, parts=parts), "gpu").activations

    assert activations("1f1b", 8) == activations("1f1b", 64)
    assert activations("gpipe", 64) == pytest.approx(8 * activations("gpipe", 8), rel=0.02)
    assert activations("coscheduled", 64) == pytest.approx(2 * activations("1f1b", 64), rel=0.15)


def test_chunks_that_are_run_again_store_their_ends_and_take_a_forward_pass_more() -> None:
    kept, again = (config_of(remat=remat) for remat in ("none", "chunk"))
    memory, whole = (step_memory(config, "gpu") for config in (again, kept))
    tokens, width = 1024, again.model.hidden_size
    ends, others = 2 * 4 * 2 * tokens * width, 4 * 2 * tokens * width  # of four parts; received and sent
    assert memory.activations == ends + others
    residuals = (whole.activations - others) / 4
    assert memory.working - whole.working == pytest.approx(residuals, rel=1e-6)
    times = [PassTimes(Step(each, H100S), split=False, pairs=False) for each in (kept, again)]
    before, after = (each.chunk(Stages.of(kept).groups[0]) for each in times)
    assert after.forward == before.forward
    for name in ("seconds", "compute", "exchange"):
        both = getattr(before.forward, name) + getattr(before.backward, name)
        assert getattr(after.backward, name) == pytest.approx(both)


def test_the_published_mesh_of_deepseek_v3_fits() -> None:
    """2,048 H800 with 80 GB in 16 stages of 64 expert ranks, balanced, with both orders of its passes."""
    given = [
        "mesh.data=2",
        "mesh.expert=64",
        "mesh.pipeline=16",
        "train.batch_size=15360",
        "train.grad_accumulation=120",
    ]
    for order in ("1f1b", "coscheduled"):
        settings = [*given, f"schedule.pipeline={order}", "optimizer.zero=1", "exchange.rank_capacity_factor=1.0"]
        config = load_config(str(ROOT / "configs/models/deepseek_v3.yaml"), [*settings, "schedule.remat=chunk"])
        assert PlanSearch(open_draft(config), find_cluster("h800x2048"), 1.0).fitting.memory.fits(config)


@pytest.mark.parametrize("layers", [4, 5])
def test_the_state_of_a_stage_is_exact(layers: int) -> None:
    """Stages that have fewer blocks have rows for as many as the longest."""
    moe = {"moe_layer_freq": 1, "gate": "deepseek_v3"}  # whose biases have no moments
    config = small_config(2, 2, pipeline=2, grad_accumulation=2, model={"num_layers": layers}, **moe)
    state = jax.tree.leaves(make_trainer(config, make_mesh(config.mesh)).state_shapes)
    arrays = [leaf.sharding.shard_shape(leaf.shape) for leaf in state if leaf.ndim]
    assert step_memory(config, "cpu").state == sum(4 * math.prod(shape) for shape in arrays)


@pytest.mark.parametrize(("target", "platform", "high"), [("h100_1x1x8", "gpu", 0.08), ("v5p_2x2x2", "tpu", 0.13)])
def test_what_a_compiler_allocated_is_predicted(target: str, platform: str, high: float) -> None:
    """Temporaries of each schedule on 8 devices at most 8 % too low, and buffers that outlive a tick within 1 %."""
    found = json.loads((ROOT / f"profiling/results/pipeline_hlo_{target}.json").read_text())["schedules"]
    assert len(found) == 6
    for case in found.values():
        config = load_config(str(ROOT / "configs/bench/fine_grained.yaml"), case["settings"].split())
        memory = step_memory(config, platform)
        assert memory.activations == pytest.approx(case["in_flight_bytes"], rel=0.01)
        assert memory.gradients == pytest.approx(case["gradient_bytes"], rel=0.001)
        temporaries = memory.total - memory.state - memory.batch
        assert -0.08 <= temporaries / case["temporary_bytes"] - 1 <= high


def large(**mesh: int) -> Draft:
    """13 billion parameters of which no device can hold all."""
    model = ModelConfig(
        vocab_size=1024,
        hidden_size=4096,
        num_layers=48,
        num_attention_heads=32,
        intermediate_size=16384,
        moe=MoEConfig(num_experts=0),
    )
    config = Config(
        model=model, data=DataConfig(seq_len=512), train=TrainConfig(batch_size=64), mesh=MeshConfig(**mesh)
    )
    opened = {"schedule.pipeline", "schedule.virtual_stages", "train.grad_accumulation", "mesh.data", "mesh.pipeline"}
    return Draft(**sections_of(config), open=frozenset(opened - {f"mesh.{axis}" for axis in mesh}))


def test_what_fits_on_no_device_is_planned_in_stages() -> None:
    plans = plan(large(), H100S)
    best = plans.best
    assert best.config.mesh.pipeline > 1
    assert best.config.train.grad_accumulation >= best.config.mesh.pipeline
    assert best.mesh in table(plans)
    assert "idle, waiting for other stages" in facts(plans)
    with pytest.raises(PlanError, match=r"^nothing trains on h100x8 \(data=8: needs .* of 85.0 GB"):
        plan(large(pipeline=1), H100S)


def test_a_planned_pipeline_is_the_fastest_of_those_that_fit() -> None:
    best, limit = plan(large(pipeline=4), H100S).best, H100S.device.memory_bytes
    for name, chunks in PIPELINES:
        schedule = dataclasses.replace(best.config.schedule, pipeline=name, virtual_stages=chunks)
        other = dataclasses.replace(best.config, schedule=schedule)
        if step_memory(other, "gpu").total <= 0.94 * limit:
            assert best.estimate.step_s <= estimate(other, H100S).step_s


SMALL = [
    *("model.hidden_size=64", "model.num_layers=4", "model.num_attention_heads=4", "model.moe.num_experts=8"),
    *("data.seq_len=64", "train.batch_size=64", "mesh.data=auto", "mesh.expert=2"),
]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "mesh.pipeline=2 exchange.algorithm=ring train.grad_accumulation=2",
            "nothing trains on h100x8 (data=2 expert=2 pipeline=2: exchange.algorithm=ring sends from rank to rank, "
            "which waits for the devices of all mesh.pipeline=2 stages: use exchange.algorithm=flat or hier_2d)",
        ),
        (
            "mesh.pipeline=2 schedule.grad_reduce=block train.grad_accumulation=2",
            "nothing trains on h100x8 (data=2 expert=2 pipeline=2: schedule.grad_reduce=block is not for the ticks of "
            "schedule.pipeline=1f1b, after which gradients are summed: use schedule.grad_reduce=end)",
        ),
        (
            "mesh.pipeline=4 model.num_layers=3 train.grad_accumulation=auto",
            "nothing trains on h100x8 (expert=2 pipeline=4: mesh.pipeline=4 needs as many groups of blocks, and "
            "model.num_layers=3 has 3 (whole periods of kinds of blocks): use mesh.pipeline=3 or less, or more blocks)",
        ),
        (
            "mesh.pipeline=4 train.batch_size=4 train.grad_accumulation=auto",
            "nothing trains on h100x8 (expert=2 pipeline=4: train.batch_size=4 has 2 sequences for each of data × "
            "expert = 2, fewer than mesh.pipeline=4 stages: use train.batch_size=8 or more)",
        ),
    ],
)
def test_what_training_refuses_with_stages_plans_refuse_too(settings: str, message: str) -> None:
    with pytest.raises(PlanError) as error:
        plan(load_draft(None, [*SMALL, *settings.split()]), H100S)
    assert str(error.value) == message


def test_stages_that_say_auto_are_chosen() -> None:
    parts = ["train.grad_accumulation=auto", "schedule.pipeline=auto"]
    draft = load_draft(None, [*SMALL, "mesh.pipeline=auto", *parts])
    found = [each for each in on_meshes(draft, H100S) if not isinstance(each, Refused)]
    assert {each.mesh.pipeline for each in found} == {1, 2, 4}
    assert all(each.train.grad_accumulation >= each.mesh.pipeline for each in found)
    assert len(plan(draft, H100S).ranked) == 3
    given = plan(load_draft(None, [*SMALL, *parts, "mesh.pipeline=2", "schedule.pipeline=gpipe"]), H100S).config
    assert (given.mesh.pipeline, given.schedule.pipeline) == (2, "gpipe")


def test_concurrent_parts_are_planned_without_stages() -> None:
    draft = load_draft(None, [*SMALL, "mesh.pipeline=1", "schedule.pipeline=auto", "train.grad_accumulation=2"])
    both = dataclasses.replace(draft.schedule, pipeline="coscheduled")
    given = plan(dataclasses.replace(draft, schedule=both, open=draft.open - {"schedule.pipeline"}), H100S).best
    assert given.config.schedule.pipeline == "coscheduled"
    assert plan(draft, H100S).best.estimate.step_s <= given.estimate.step_s


def test_the_update_of_a_pipelined_step_has_the_workspace_of_its_optimizer() -> None:
    """With few tokens it is the moment that needs most, unless ZeRO shards it; a search that shares memory knows it."""
    sizes = ["model.hidden_size=1024", "model.moe.intermediate_size=4096", "model.moe.num_experts=8"]
    sizes += ["model.num_layers=16", "optimizer.name=muon", "data.seq_len=32", "train.batch_size=8"]
    stages = ["mesh.data=4", "mesh.pipeline=2", "train.grad_accumulation=2"]
    search = PlanSearch(open_draft(load_draft(None, [*sizes, *stages])), H100S, 1.0)
    whole, sharded = (load_config(None, [*sizes, *stages, f"optimizer.zero={zero}"]) for zero in (0, 1))
    memory = step_memory(whole, "gpu")
    assert memory.moment == "update"
    assert memory.working == int(orthogonalizing_bytes(whole, "gpu", whole.mesh.sizes))
    assert search.fitting.memory.of(whole) == memory
    assert search.fitting.memory.of(sharded) == step_memory(sharded, "gpu") != memory
