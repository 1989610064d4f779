"""The forms of MoNTA against the paper's formulas and against a walk through the stages."""

import dataclasses
import itertools

import pytest

from moe_jax.config.yaml_io import load_config, load_draft
from moe_jax.plan.clusters import find_cluster
from moe_jax.plan.estimate import estimate
from moe_jax.plan.over_tensor import LinkStages, form_seconds, stage_seconds
from moe_jax.plan.planner import plan
from moe_jax.plan.step_times import Step
from moe_jax.plan.task_times import Linear
from moe_jax.plan.tensor_forms import tensor_forms

SLOW_EXCHANGE = LinkStages(Linear(1e-5, 1e-9).seconds, Linear(1e-6, 1e-11).seconds, Linear(1e-6, 1e-12).seconds)
SLOW_GATHER = LinkStages(Linear(1e-6, 1e-11).seconds, Linear(1e-6, 1e-10).seconds, Linear(1e-6, 1e-11).seconds)
CASES = list(itertools.product([SLOW_EXCHANGE, SLOW_GATHER], [1e6, 1e8], [2, 4], [1, 2, 5]))
EXPERTS = 8


def walked(durations, chunks):
    """When the last chunk leaves the last stage, each stage taking one chunk at a time."""
    free = [0.0] * len(durations)
    for _ in range(chunks):
        done = 0.0
        for stage, seconds in enumerate(durations):
            done = free[stage] = max(done, free[stage]) + seconds
    return free[-1]


@pytest.mark.parametrize(("stages", "num_bytes", "tensor", "chunks"), CASES)
def test_o2_and_o3_are_the_papers_formulas(stages, num_bytes, tensor, chunks):
    exchange, gather, copy = stage_seconds(num_bytes, tensor, EXPERTS, chunks, stages)
    together = gather + copy
    chunked = exchange + chunks * together if exchange < together else chunks * exchange + together
    assert form_seconds("sharded_chunked", num_bytes, tensor, EXPERTS, chunks, stages) == pytest.approx(chunked)
    assert copy <= max(exchange, gather), "the paper's case"
    overlapped = exchange + chunks * gather + copy if exchange < gather else chunks * exchange + gather + copy
    assert form_seconds("sharded_overlapped", num_bytes, tensor, EXPERTS, chunks, stages) == pytest.approx(overlapped)


@pytest.mark.parametrize(("stages", "num_bytes", "tensor", "chunks"), CASES)
def test_o2_and_o3_are_what_a_walk_through_the_stages_takes(stages, num_bytes, tensor, chunks):
    slow_copies = stages._replace(copy=Linear(0, 1e-8).seconds)  # which the paper leaves out
    for each in (stages, slow_copies):
        exchange, gather, copy = stage_seconds(num_bytes, tensor, EXPERTS, chunks, each)
        chunked = form_seconds("sharded_chunked", num_bytes, tensor, EXPERTS, chunks, each)
        overlapped = form_seconds("sharded_overlapped", num_bytes, tensor, EXPERTS, chunks, each)
        assert chunked == pytest.approx(walked([exchange, gather + copy], chunks))
        assert overlapped == pytest.approx(walked([exchange, gather, copy], chunks))


def test_o1_exchanges_a_part_of_what_all_ranks_would():
    only_bytes = LinkStages(lambda x: x, lambda x: 0.0, lambda x: 0.0)
    assert form_seconds("replicated", 800.0, 4, EXPERTS, 1, only_bytes) == 700
    assert form_seconds("sharded", 800.0, 4, EXPERTS, 1, only_bytes) == 175


@pytest.mark.parametrize(("length", "cut"), [(256, False), (16384, True)])
def test_the_planner_takes_the_form_that_is_fastest(length, cut):
    """Chunks of what is large, none where they would add little but start-ups."""
    cluster = find_cluster("h100x16")
    model = ["model.hidden_size=1024", "model.num_layers=2", "model.num_attention_heads=8"]
    settings = ["mesh.data=1", "mesh.expert=8", "mesh.tensor=2", "train.batch_size=64", f"data.seq_len={length}"]
    draft = load_draft(None, [*model, *settings, "exchange.tensor_form=auto", "exchange.tensor_chunks=auto"])
    best = plan(draft, cluster).best
    exchange = best.config.exchange
    for form, chunks in itertools.product(
        ("replicated", "sharded", "sharded_chunked", "sharded_overlapped"), (2, 4, 8)
    ):
        other = dataclasses.replace(exchange, tensor_form=form, tensor_chunks=chunks)
        assert best.estimate.step_s <= estimate(dataclasses.replace(best.config, exchange=other), cluster).step_s
    assert (exchange.tensor_form in ("sharded_chunked", "sharded_overlapped")) == cut


def test_chunks_have_a_megabyte() -> None:
    """More chunks are tried for larger exchanges, and two where even these are small."""
    settings = ["mesh.data=1", "mesh.expert=8", "mesh.tensor=2", "train.batch_size=256", "model.hidden_size=1024"]
    for length, most in ((8, 2), (32768, 64)):
        config = load_config(None, [*settings, "model.num_attention_heads=8", f"data.seq_len={length}"])
        found = {each["tensor_form"]: each["tensor_chunks"] for each in tensor_forms(config, find_cluster("h100x16"))}
        assert list(found) == ["sharded", "sharded_chunked", "sharded_overlapped"]
        assert 2 <= found["sharded_chunked"] <= most
    assert found["sharded_chunked"] > 2


@pytest.mark.parametrize(("cluster", "streams"), [("v5p-16", {"gather": "intra-node"}), ("h100x16", {})])
def test_gathers_are_tasks_whose_times_add_up_to_those_of_an_exchange(cluster: str, streams: dict[str, str]) -> None:
    """On TPUs they run concurrently with exchanges, so a step is shorter; on GPUs one collective runs at a time."""
    settings = ["mesh.data=1", "mesh.expert=8", "mesh.tensor=2", "train.batch_size=64", "model.hidden_size=1024"]
    settings += [
        "model.num_attention_heads=8",
        "data.seq_len=8192",
        "schedule.policy=unified",
        "exchange.algorithm=flat",
    ]
    settings += ["model.num_layers=4", "schedule.microbatches=4", "train.compute_dtype=bfloat16"]
    of_form = {
        form: Step(load_config(None, [*settings, f"exchange.tensor_form={form}"]), find_cluster(cluster))
        for form in ("sharded", "sharded_scheduled")
    }
    lines = {form: step.timeline for form, step in of_form.items()}

    def seconds(form: str, *ops: str) -> float:
        return sum(task.end_s - task.start_s for task in lines[form].tasks if task.action.op in ops)

    together = seconds("sharded_scheduled", "dispatch", "gather", "scatter", "combine")
    assert together == pytest.approx(seconds("sharded", "dispatch", "combine"))
    assert seconds("sharded_scheduled", "gather") > 0
    found = {task.action.op: task.stream for task in lines["sharded_scheduled"].tasks}
    assert found["gather"] == streams.get("gather", "communication")
    if streams:
        assert lines["sharded_scheduled"].makespan_s < lines["sharded"].makespan_s
    assert of_form["sharded_scheduled"].seconds["exchange"] == pytest.approx(of_form["sharded"].seconds["exchange"])


def test_gathers_as_tasks_are_tried_where_a_step_has_tasks() -> None:
    settings = ["mesh.data=1", "mesh.expert=8", "mesh.tensor=2", "train.batch_size=256", "model.num_attention_heads=8"]
    for policy, is_tried in (("vanilla", False), ("unified", True)):
        config = load_config(None, [*settings, f"schedule.policy={policy}"])
        found = [each["tensor_form"] for each in tensor_forms(config, find_cluster("v5p-16"))]
        assert ("sharded_scheduled" in found) == is_tried
