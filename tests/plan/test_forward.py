"""Ranges of the forward pass: the best of all partitions, in times that the simulator of whole steps confirms."""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator

import pytest

from moe_jax.config import Config, DataConfig, MeshConfig, ModelConfig, MoEConfig, TrainConfig
from moe_jax.config.draft import open_draft, sections_of
from moe_jax.plan.candidates import choices, schedules
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.estimate import estimate
from moe_jax.plan.forward import ForwardPlan, OpRange, RangePart, best_ranges, fastest_partition, pipeline_seconds
from moe_jax.plan.plan_text import facts
from moe_jax.plan.planner import plan
from moe_jax.plan.simulate import simulate
from moe_jax.plan.step_times import Step
from moe_jax.schedule.actions import two_streams
from moe_jax.schedule.build import make_schedule, make_shape

H100S = find_cluster("h100x16")


def all_partitions(groups: int, longest: int, parts: int) -> Iterator[tuple[OpRange, ...]]:
    for bounds in itertools.product((False, True), repeat=groups - 1):
        places = [0, *(i + 1 for i, cut in enumerate(bounds) if cut), groups]
        spans = list(itertools.pairwise(places))
        if max(stop - first for first, stop in spans) <= longest:
            for counts in itertools.product(range(1, parts + 1), repeat=len(spans)):
                yield tuple(OpRange(*span, count) for span, count in zip(spans, counts, strict=True))


def random_seconds(seed: int, groups: int):
    """Random seconds for ranges of groups, some of which may not be cut."""
    rng = random.Random(seed)
    alpha = rng.uniform(0.0, 0.5)
    whole = [RangePart(rng.random() < 0.4, rng.uniform(0.1, 2.0)) for _ in range(groups)]
    uncut = {i for i in range(groups) if rng.random() < 0.2}

    def seconds(first: int, stop: int, parts: int) -> float:
        if parts > 1 and uncut & set(range(first, stop)):
            return math.inf
        cut = (each._replace(seconds=alpha + each.seconds / parts) for each in whole[first:stop])
        return pipeline_seconds(tuple(cut), parts)

    return seconds


@pytest.mark.parametrize(("groups", "longest", "parts"), [(1, 1, 1), (4, 4, 3), (5, 2, 3), (6, 3, 2)])
def test_no_partition_is_faster(groups: int, longest: int, parts: int) -> None:
    for seed in range(10):
        seconds = random_seconds(seed, groups)
        found = fastest_partition(groups, longest, parts, seconds)
        slow = min(sum(seconds(*each) for each in ranges) for ranges in all_partitions(groups, longest, parts))
        assert found.seconds == pytest.approx(slow)
        assert found.seconds == pytest.approx(sum(seconds(*each) for each in found.ranges))


def test_a_pipeline_of_two_streams_by_hand() -> None:
    compute, exchange = RangePart(False, 1.0), RangePart(True, 2.0)
    assert pipeline_seconds((compute, exchange, compute), 1) == 4
    assert pipeline_seconds((compute, exchange, compute), 3) == 1 + 3 * 2 + 1
    assert pipeline_seconds((exchange, compute, compute), 3) == 3 * 2 + 2
    assert pipeline_seconds((exchange, exchange), 3) == 12


def config_of(sequences: int = 8, layers: int = 3, **moe) -> Config:
    experts = MoEConfig(**({"num_experts": 16, "top_k": 2, "intermediate_size": 1024, "num_shared_experts": 1} | moe))
    model = ModelConfig(
        vocab_size=4096, hidden_size=1024, num_layers=layers, num_attention_heads=8, intermediate_size=4096, moe=experts
    )
    train = TrainConfig(batch_size=16 * sequences)
    return Config(model=model, mesh=MeshConfig(data=1, expert=16), data=DataConfig(seq_len=512), train=train)


def replaced(config: Config, **sections: dict[str, object]) -> Config:
    own = sections_of(config)
    return Config(**own | {name: dataclasses.replace(own[name], **values) for name, values in sections.items()})


def ranges_of(config: Config) -> ForwardPlan:
    return best_ranges(estimate(config, H100S))


@pytest.mark.parametrize("every", [1, 2])
def test_ops_take_as_long_as_the_tasks_that_they_are_part_of(every: int) -> None:
    config = replaced(
        config_of(layers=4, moe_layer_freq=every), train={"attention_kernel": "xla"}
    )  # or attention is too short
    found = ranges_of(config)
    assert found.uncut_s == pytest.approx(found.scheduled_s), "a plain forward pass"
    between = [len(list(run)) for cut, run in itertools.groupby(found.groups, lambda g: g.part[0].exchange) if not cut]
    assert 4 <= max(between) <= 6, "about five groups between two MoEConfig layers"


@pytest.mark.parametrize("parts", [2, 4])
def test_a_range_of_all_groups_is_what_the_simulator_makes_of_microbatches(parts: int) -> None:
    config = config_of()
    times = Step(config, H100S).times.of(shape := make_shape("unified", ("moe",) * 3, parts))

    def seconds(action) -> float:
        return times(action) if action.direction == "F" and action.block >= 0 else 0.0

    whole = simulate(make_schedule("unified", shape, seconds), seconds, two_streams).makespan_s
    groups = ranges_of(config).groups
    assert pipeline_seconds(tuple(group.part[parts - 1] for group in groups), parts) == pytest.approx(whole)


def test_ranges_are_never_slower_than_chunks_of_slots() -> None:
    """A pipeline inside each MoE layer is one of the partitions."""
    for factor in (1.0, 4.0):
        config = config_of(intermediate_size=int(1024 * factor))
        best = ranges_of(config).best.seconds
        for degree in (2, 4, 8):
            cut = replaced(config, schedule={"policy": "expert_pipeline", "microbatches": degree})
            assert best <= ranges_of(cut).scheduled_s * (1 + 1e-9)


def test_ranges_reach_in_front_of_the_gate_only_where_it_allows() -> None:
    for moe, reaches in (({}, True), ({"gate": "batch_prioritised"}, False)):
        found = ranges_of(config_of(layers=4, **moe))
        cut = [each for each in found.best.ranges if each.parts > 1]
        assert cut
        gates = [op for each in cut for group in found.groups[each.first : each.stop] for op in group.ops]
        assert any(op.name == "permute" for op in gates) == reaches


def test_the_planner_tries_as_many_parts_as_ranges_have() -> None:
    """Three sequences make no two or four microbatches; and what is tried in addition never loses what was best."""
    config = replaced(config_of(sequences=3, layers=1, intermediate_size=8192), data={"seq_len": 8192})
    # no tensor ranks, no parts of slots
    config = replaced(config, model={"num_attention_heads": 1}, schedule={"policy": "unified"})
    draft = open_draft(config, fixed={"schedule.policy", "schedule.expert_chunks"})
    plans = plan(draft, H100S)
    assert plans.best.config.schedule.microbatches == 3
    others = choices(draft, config, ({"schedule": each} for each in schedules()))
    assert plans.best.estimate.step_s < 0.99 * min(estimate(each, H100S).step_s for each in others)
    printed = [line for line in facts(plans).splitlines() if line.startswith("ranges ")]
    found = best_ranges(plans.best.estimate)
    assert len(printed) == (found.best.seconds < 0.99 * found.scheduled_s)
    assert all(line.startswith("ranges      not trained: a block's forward pass takes") for line in printed)
