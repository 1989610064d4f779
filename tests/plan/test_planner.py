"""The planner: what it finds is possible, fits, and is the fastest of what it looked at; what is impossible it says."""

import dataclasses
import functools
import itertools
import pickle

import pytest

from moe_jax.config import (
    Config,
    DataConfig,
    ExchangeConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    ScheduleConfig,
    TrainConfig,
)
from moe_jax.config.draft import PLANNED, Draft, open_draft, sections_of
from moe_jax.config.validate import setting
from moe_jax.config.yaml_io import load_config, load_draft
from moe_jax.errors import UserError
from moe_jax.plan.candidates import Refused, choices, divisors, meshes, on_meshes, schedules
from moe_jax.plan.clusters import Cluster, LinkCurve, find_cluster
from moe_jax.plan.estimate import estimate
from moe_jax.plan.memory import least_bytes, step_memory
from moe_jax.plan.plan_text import facts, refusals, table
from moe_jax.plan.planner import Candidate, PlanError, Plans, plan
from moe_jax.plan.search import PlanSearch
from moe_jax.plan.step_times import Step
from moe_jax.plan.traffic import traffic
from moe_jax.plan.work import exchange_bytes

H100S = find_cluster("h100x16")


SMALL = [
    *("model.hidden_size=64", "model.num_layers=2", "model.num_attention_heads=4", "model.moe.num_experts=8"),
    *("data.seq_len=64", "train.batch_size=64"),
]


def config_of(layers: int = 3, batch_size: int = 64, **moe) -> Config:
    experts = MoEConfig(**({"num_experts": 16, "top_k": 2, "intermediate_size": 1024} | moe))
    model = ModelConfig(
        vocab_size=4096, hidden_size=1024, num_layers=layers, num_attention_heads=8, intermediate_size=4096, moe=experts
    )
    return Config(model=model, data=DataConfig(seq_len=512), train=TrainConfig(batch_size=batch_size))


def draft_of(**settings) -> Draft:
    return open_draft(config_of(**settings))


@functools.cache
def planned(layers: int = 3, batch_size: int = 64, cluster: str = "h100x16") -> Plans:
    """With all settings open; several tests look at the same plans."""
    return plan(draft_of(layers=layers, batch_size=batch_size), find_cluster(cluster))


def test_every_mesh_of_all_devices_is_tried_or_refused_with_a_reason() -> None:
    config = dataclasses.replace(config_of(), train=TrainConfig(batch_size=8))
    found = list(on_meshes(open_draft(config), H100S))
    meshes = [each.mesh for each in found if isinstance(each, Config)]
    assert {mesh.data * mesh.expert * mesh.pipeline * mesh.tensor for mesh in meshes} == {16}
    assert MeshConfig(data=1, expert=8, tensor=2) in meshes
    assert max(mesh.tensor for mesh in meshes) == H100S.node_devices, "tensor ranks stay inside a node"
    refused = {each.mesh: each.reason for each in found if isinstance(each, Refused)}
    assert "train.batch_size=8 " in refused["expert=16"]


def test_the_first_plan_is_the_fastest_and_all_plans_fit() -> None:
    plans = planned()
    assert plans.best.estimate.step_s == min(each.estimate.step_s for each in plans.ranked)
    assert plans.best.config.schedule.policy != "vanilla"
    limit = H100S.device.memory_bytes
    assert limit is not None
    assert all(each.memory.total < limit for each in plans.ranked)
    ways = ({"schedule": schedule} for schedule in schedules())
    own = [estimate(each, H100S).step_s for each in choices(draft_of(), plans.best.config, ways)]
    assert plans.best.estimate.step_s <= min(own)


@pytest.mark.parametrize("name", ["mesh.expert", "schedule.grad_reduce", "schedule.remat"])
def test_giving_what_was_chosen_finds_nothing_better(name: str) -> None:
    best = planned(layers=8, batch_size=256).best
    again = plan(open_draft(best.config, fixed={name}), H100S).best
    assert again.estimate.step_s >= 0.98 * best.estimate.step_s


def test_little_memory_makes_a_plan_recompute_or_cut_the_batch() -> None:
    config = config_of(layers=8, batch_size=256)
    small = dataclasses.replace(H100S, device=dataclasses.replace(H100S.device, memory_bytes=int(6e9)))
    roomy, tight = planned(layers=8, batch_size=256).best, plan(open_draft(config), small).best
    # shards of moments may be faster, too
    assert (roomy.config.schedule.remat, roomy.config.train.grad_accumulation) == ("none", 1)
    assert tight.saves_memory
    assert tight.memory.total < 6e9
    assert tight.estimate.step_s > roomy.estimate.step_s
    assert tight.bottleneck.endswith(", memory")


def test_deep_models_take_per_block_what_their_last_block_takes() -> None:
    """A few periods stand for all: the whole model, simulated, takes the same within 2 %."""
    config = dataclasses.replace(
        config_of(layers=12),
        mesh=MeshConfig(data=1, expert=16),
        schedule=ScheduleConfig(
            policy="unified", microbatches=2, weight_grad="greedy", grad_reduce="bucketed", bucket_cap_mb=32
        ),
    )
    few = estimate(config, H100S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_jax.plan.estimate._PERIODS", 100)
        whole = estimate(config, H100S)
    assert len(few.timeline.schedule.shape.kinds) < len(whole.timeline.schedule.shape.kinds) == 12
    assert few.step_s == pytest.approx(whole.step_s, rel=0.02)


@pytest.mark.parametrize("policy", ["unified", "expert_pipeline"])
def test_periods_of_blocks_that_differ_are_simulated_until_they_do_not(policy: str) -> None:
    """The fourth of these takes less than others: a step came out shorter than what it computes."""
    mesh = ["mesh.data=1", "mesh.expert=64", "mesh.tensor=4", "mesh.context=2"]
    batch = ["train.batch_size=512", "train.grad_accumulation=2", "optimizer.zero=1"]
    scheduled = [f"schedule.policy={policy}", "schedule.weight_grad=greedy", "schedule.grad_reduce=bucketed"]
    for degree, bucket_cap_mb in itertools.product((1, 4), (8, 32)):
        cut = [f"schedule.microbatches={degree}", f"schedule.bucket_cap_mb={bucket_cap_mb}"]
        settings = [*mesh, *batch, *scheduled, *cut, "exchange.tensor_form=sharded_chunked"]
        found = estimate(load_config("configs/models/arctic.yaml", settings), find_cluster("v5p-512"))
        assert found.step_s >= found.busy.compute
        assert found.busy.exposed >= 0


def test_each_stage_of_zero_is_smaller_and_sends_what_it_states() -> None:
    """Sums go around once, and parameters after them; stage 2 sums each of four parts."""
    parts = ["train.grad_accumulation=4", "schedule.policy=unified", "schedule.grad_reduce=bucketed"]
    settings = ["mesh.data=2", "mesh.expert=8", "train.batch_size=64", *parts]
    memory, sent = {}, {}
    for stage in (0, 1, 2):
        config = load_config("configs/models/mixtral_8x7b.yaml", [*settings, f"optimizer.zero={stage}"])
        memory[stage] = step_memory(config, "gpu").total
        sent[stage] = traffic(config, H100S)
    assert memory[0] > memory[1] > memory[2]
    whole = sent[0]["gradients"]
    assert "parameters" not in sent[0]
    assert [sent[stage]["gradients"] / whole for stage in (1, 2)] == pytest.approx([1 / 2, 4 / 2])
    assert [sent[stage]["parameters"] / whole for stage in (1, 2)] == pytest.approx([1 / 2, 1 / 2])


def test_faster_links_and_more_devices_make_no_step_slower() -> None:
    config = dataclasses.replace(config_of(), mesh=MeshConfig(data=1, expert=16))
    levels = tuple(dataclasses.replace(level, bytes_per_s=4 * level.bytes_per_s) for level in H100S.levels)
    assert estimate(config, dataclasses.replace(H100S, levels=levels)).step_s < estimate(config, H100S).step_s
    steps = [planned(batch_size=1024, cluster=f"h100x{count}").best.estimate.step_s for count in (8, 16, 32)]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ("schedule.policy=auto schedule.microbatches=4", {"policy": ("unified", "expert_pipeline"), "microbatches": 4}),
        ("schedule.policy=unified schedule.microbatches=auto schedule.backward_microbatches=2", {"policy": "unified"}),
        ("schedule.policy=unified schedule.grad_reduce=auto schedule.bucket_cap_mb=20", {"grad_reduce": "bucketed"}),
        ("schedule.policy=auto schedule.microbatches=auto schedule.bucket_cap_mb=auto", {"grad_reduce": "end"}),
        ("schedule.policy=vanilla schedule.microbatches=auto schedule.weight_grad=auto", {"microbatches": 1}),
        ("schedule.remat=auto schedule.policy=expert_pipeline", {"remat": "none", "policy": "expert_pipeline"}),
        (
            "model.moe.gate=batch_prioritised schedule.policy=auto schedule.microbatches=2",
            {"policy": "expert_pipeline"},
        ),
        ("exchange.algorithm=ragged schedule.policy=auto schedule.microbatches=2", {"policy": "unified"}),
    ],
)
def test_only_what_is_auto_is_chosen(settings: str, found: dict[str, object]) -> None:
    draft = load_draft(None, [*SMALL, "mesh.expert=8", *settings.split()])
    config = plan(draft, H100S).config
    for name in PLANNED - draft.open - {"mesh.data"}:
        assert setting(config, name) == setting(draft, name)
    assert (config.mesh.data, config.mesh.expert) == (2, 8)
    for name, value in found.items():
        assert getattr(config.schedule, name) in (value if isinstance(value, tuple) else (value,))


def test_a_mesh_is_chosen_around_its_fixed_axes() -> None:
    draft = load_draft(None, [*SMALL, "mesh.data=auto", "mesh.expert=auto", "mesh.tensor=2"])
    assert {each.config.mesh.tensor for each in plan(draft, H100S).ranked} == {2}


def test_context_ranks_are_planned_around() -> None:
    """They cut the squares that a device keeps, if it does; a ring's hops run concurrently with products."""
    long = [*SMALL, "data.seq_len=8192", "train.attention_kernel=xla"]  # shorter: small tiles cost more than a gather
    cut, whole = (
        plan(load_draft(None, [*long, "mesh.data=auto", f"mesh.context={context}"]), H100S).best for context in (2, 1)
    )
    assert (cut.config.mesh.data, cut.config.mesh.context) == (8, 2)
    assert cut.memory.activations < 0.6 * whole.memory.activations
    gathered = dataclasses.replace(cut.config, exchange=ExchangeConfig(context_form="all_gather"))
    assert estimate(gathered, H100S).step_s > cut.estimate.step_s
    with pytest.raises(PlanError, match=r"mesh.context=32 is no mesh of 16 devices"):
        plan(load_draft(None, [*long, "mesh.data=auto", "mesh.context=32"]), H100S)


def test_hops_go_after_exchanges_of_other_microbatches() -> None:
    """Where they want the same links. Hops take longer than products here, and as much of these as exchanges leave."""
    level = dataclasses.replace(H100S.levels[0], devices=16, bytes_per_s=1e9, ring=LinkCurve(0.0), all_to_all=None)
    slow = dataclasses.replace(H100S, levels=(level,))
    cut = [*SMALL, "data.seq_len=8192", "mesh.data=1", "mesh.context=2", "mesh.expert=8", "schedule.policy=unified"]
    whole, halves = (Step(load_config(None, [*cut, f"schedule.microbatches={n}"]), slow) for n in (1, 2))
    before_s = 2 * halves.exchanges.seconds(exchange_bytes(halves.config, halves.tokens, 8, "gpu") / 2)
    waited_s = halves.compute()["attend"].whole_s["F"] - whole.compute()["attend"].whole_s["F"]
    assert waited_s == pytest.approx(min(before_s, halves.squares_s()), rel=1e-6)
    assert waited_s > 0


def test_ranks_are_chosen_that_cut_sequences() -> None:
    """Each has two whole tiles at least; keys are gathered where stages would wait for those of others."""
    few = [*SMALL, "data.seq_len=4096", "train.batch_size=2", "mesh.data=auto", "mesh.context=auto"]
    draft = load_draft(None, [*few, "exchange.context_form=auto"])
    assert {sizes["context"] for sizes in meshes(draft, H100S)} == {1, 2, 4}
    with pytest.raises(PlanError, match=r"train.batch_size=2 "):
        plan(draft, H100S)
    feasible = load_draft(None, [*few, "exchange.context_form=auto", "mesh.expert=auto", "mesh.tensor=2"])
    found = plan(feasible, find_cluster("h100x8"))
    assert (found.config.mesh.context, found.config.exchange.context_form) == (2, "ring")
    assert "context     experts are cut over expert ranks alone, not as MoNTA's rule has it" in facts(found)
    staged = load_draft(None, [*few, "exchange.context_form=auto", "mesh.pipeline=2", "train.grad_accumulation=2"])
    assert plan(staged, find_cluster("h100x8")).config.exchange.context_form == "all_gather"
    with pytest.raises(PlanError, match=r"use exchange.context_form=all_gather, or mesh.context=1"):
        plan(load_draft(None, [*few, "mesh.pipeline=2", "mesh.context=4"]), find_cluster("h100x8"))


def placed(context: int, expert: int, intermediate_size: int, cluster: Cluster, seq_len: int = 1024) -> Candidate:
    """The plan for experts of this width, where only the axes that cut them are open."""
    mesh = [f"mesh.context={context}", f"mesh.expert={expert}", "mesh.data=auto", "mesh.experts_over_context=auto"]
    experts = ["model.moe.num_experts=16", f"model.moe.intermediate_size={intermediate_size}"]
    return plan(load_draft(None, [*SMALL, *experts, *mesh, f"data.seq_len={seq_len}"]), cluster).best


@pytest.mark.parametrize(
    ("sizes", "intermediate_size", "shared", "rule"),
    [
        ((2, 8), 16384, True, ", as MoNTA's rule has it: fast links join 8 devices"),
        ((4, 1), 16384, True, ", as MoNTA's rule has it: context=4 is at least expert=1"),
        ((2, 4), 16384, True, ", not as MoNTA's rule has it: context=2 is less than expert=4"),
        ((2, 8), 16, False, ", not as MoNTA's rule has it: fast links join 8 devices"),
    ],
    ids=["between nodes", "more context ranks", "against the rule", "narrow experts"],
)
def test_experts_are_where_a_step_is_fastest(
    sizes: tuple[int, int], intermediate_size: int, shared: bool, rule: str
) -> None:
    """Over context ranks, too, there are fewer gradients to sum, and more ranks to exchange rows with."""
    best = placed(*sizes, intermediate_size, H100S)
    config = best.config
    assert config.mesh.experts_over_context == shared
    mesh = dataclasses.replace(config.mesh, experts_over_context=not shared)
    other = dataclasses.replace(config, mesh=mesh)
    assert estimate(other, H100S).step_s > best.estimate.step_s
    few, many = sorted([best.memory.parameters, step_memory(other, "gpu").parameters])
    if shared:
        assert many / few == pytest.approx(sizes[0], rel=0.02), "nearly all are the experts'"
        assert few == best.memory.parameters
    (line,) = (line for line in facts(Plans(cluster=H100S, ranked=(best,), refused=())).splitlines() if rule in line)
    assert line.startswith(f"context     experts are cut over {'context and expert ranks' if shared else 'expert'}")


def test_experts_go_over_tensor_ranks_where_a_step_is_faster() -> None:
    """Many narrow experts are exchanged once, instead of to all tensor ranks; a form that shares them excludes that."""
    settings = ["mesh.tensor=4", "mesh.expert=2", "mesh.data=auto", "mesh.experts_over_tensor=auto"]
    settings += ["model.moe.num_experts=64", "model.moe.top_k=8", "model.moe.intermediate_size=64", "data.seq_len=1024"]
    best = plan(load_draft(None, [*SMALL, *settings]), H100S).best
    assert best.config.mesh.experts_over_tensor
    other = dataclasses.replace(best.config, mesh=dataclasses.replace(best.config.mesh, experts_over_tensor=False))
    assert estimate(other, H100S).step_s > best.estimate.step_s
    shared = plan(load_draft(None, [*SMALL, *settings, "exchange.tensor_form=sharded_chunked"]), H100S).config
    assert (shared.mesh.experts_over_tensor, shared.exchange.tensor_form) == (False, "sharded_chunked")


def test_experts_go_over_context_ranks_where_nothing_fits_otherwise() -> None:
    node = find_cluster("h100x8")
    tight = dataclasses.replace(node, device=dataclasses.replace(node.device, memory_bytes=int(1e9)))
    assert placed(2, 4, 16384, tight, seq_len=64).mesh == "expert=4 context=2 experts_over_context"


def test_a_compiler_that_takes_more_memory_makes_a_plan_smaller() -> None:
    tight = dataclasses.replace(H100S, device=dataclasses.replace(H100S.device, memory_bytes=int(16e9)))
    config = config_of(layers=8, batch_size=256)
    draft = Draft(**sections_of(config), open=frozenset({"schedule.remat", "mesh.expert"}))
    before, after = (plan(draft, tight, factor).best for factor in (1.0, 2.0))
    assert after.memory.total < before.memory.total


def test_a_plan_orders_tasks_by_the_rates_of_its_cluster_where_none_are_given() -> None:
    schedule = plan(load_draft(None, [*SMALL, "mesh.expert=auto", "schedule.link_gb_per_s=7"]), H100S).config.schedule
    device, network = H100S.device, H100S.levels[-1]
    assert schedule.link_gb_per_s == 7
    reached = device.matrix_flops_per_s * device.matrix_efficiency
    assert schedule.device_tflops == pytest.approx(reached / 1e12, rel=1e-3)
    assert schedule.network_gb_per_s == pytest.approx(network.bytes_per_s * network.ring.efficiency / 1e9, rel=1e-3)


def test_the_text_reports_all_of_it() -> None:
    plans = planned()
    lines = table(plans).splitlines()
    assert lines[0].split()[:3] == ["mesh", "step", "MFU"]
    assert lines[1].startswith(plans.best.mesh)
    assert all(" more " in line or line.endswith("as fast") for line in lines[2:9])
    assert "16 × H100 SXM" in facts(plans)
    assert "$ per billion tokens" in facts(plans)
    assert refusals(plans).startswith("refused: ") or not plans.refused


def test_dense_models_try_no_policy_that_cuts_slots_of_experts() -> None:
    draft = load_draft(None, [*SMALL, "model.moe.num_experts=0", "schedule.policy=auto", "schedule.microbatches=auto"])
    tried = choices(draft, draft, ({"schedule": each} for each in schedules()))
    assert {each.schedule.policy for each in tried} == {"vanilla", "unified"}


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]


def test_a_plan_with_stages_names_an_exchange_that_stages_support() -> None:
    """So small an exchange between nodes would be fastest by permutes, which wait for all stages."""
    settings = ["mesh.pipeline=2", "mesh.expert=32", "train.batch_size=64", "data.seq_len=256"]
    draft = open_draft(load_draft("configs/bench/fine_grained.yaml", settings), {"mesh.pipeline", "mesh.expert"})
    found = plan(draft, find_cluster("h100x64"))
    assert found.config.exchange.algorithm == found.best.estimate.algorithm == "hier_2d"


def test_unknown_clusters_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean h100"):
        find_cluster("h10x8")


def test_what_is_given_stays_when_all_else_is_open() -> None:
    config = config_of()
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, tensor=2))
    sizes = {
        found.mesh.tensor
        for found in on_meshes(open_draft(config, fixed={"mesh.tensor"}), H100S)
        if not isinstance(found, Refused)
    }
    assert sizes == {2}


def test_memory_that_a_search_shares_is_that_of_each_config() -> None:
    """Pipelines share all but moments over ZeRO stages, and a bound of state and gradients is below every total."""
    search = PlanSearch(open_draft(load_draft("configs/models/olmoe.yaml", [])), H100S, 1.0)
    for stages in (1, 4):
        mesh = {"data": 2, "expert": 8 // stages, "pipeline": stages, "tensor": 1, "context": 1}
        for zero, remat in itertools.product((0, 1), ("none", "full")):
            overrides = {"mesh": mesh, "optimizer": {"zero": zero}, "schedule": {"remat": remat}}
            parts = {"grad_accumulation": 4, "batch_size": 64}
            config = search.draft.choose(search.draft, **overrides, train=parts)
            whole = step_memory(config, "gpu")
            assert search.fitting.memory.of(config) == whole
            assert least_bytes(config, "gpu") <= whole.total


def test_memory_of_chunks_of_experts_is_not_that_of_ragged_rows() -> None:
    settings = ["model.moe.capacity_factor=1", "mesh.data=1", "mesh.expert=16", "train.batch_size=64"]
    search = PlanSearch(open_draft(load_draft("configs/models/olmoe.yaml", settings)), H100S, 1.0)
    for chunks in (1, 2):
        order = {"policy": "unified", "microbatches": 4, "expert_chunks": chunks}
        config = search.draft.choose(search.draft, schedule=order, optimizer={"zero": 1})
        assert search.fitting.memory.of(config) == step_memory(config, "gpu")


def test_a_hash_that_is_kept_does_not_travel_to_other_processes() -> None:
    config = load_config("configs/models/olmoe.yaml")
    assert hash(config) == hash(dataclasses.replace(config))
    assert "_hash" in vars(config)
    assert "_hash" not in vars(pickle.loads(pickle.dumps(config)))
