"""What a plan reports if nothing is feasible: the reason, and the nearest change that would help."""

import dataclasses
import re

import pytest

from moe_jax.config import Config, DataConfig, ModelConfig, MoEConfig, OptimizerConfig, TrainConfig
from moe_jax.config.draft import PLANNED, Draft, open_draft, sections_of
from moe_jax.config.yaml_io import load_draft
from moe_jax.errors import UserError
from moe_jax.plan.candidates import meshes
from moe_jax.plan.clusters import Cluster, find_cluster
from moe_jax.plan.planner import PlanError, plan

H100S = find_cluster("h100x16")
SMALL = [
    *("model.hidden_size=64", "model.num_layers=2", "model.num_attention_heads=4", "model.moe.num_experts=8"),
    *("data.seq_len=64", "train.batch_size=64"),
]


def config_of(layers: int = 3, batch_size: int = 64, intermediate_size: int = 1024) -> Config:
    experts = MoEConfig(num_experts=16, top_k=2, intermediate_size=intermediate_size)
    model = ModelConfig(
        vocab_size=4096, hidden_size=1024, num_layers=layers, num_attention_heads=8, intermediate_size=4096, moe=experts
    )
    return Config(model=model, data=DataConfig(seq_len=512), train=TrainConfig(batch_size=batch_size))


def draft_of(**settings: int) -> Draft:
    return open_draft(config_of(**settings))


def test_what_fits_nowhere_is_reported_in_one_line_with_a_cluster_where_it_would() -> None:
    with pytest.raises(PlanError, match=r"^nothing trains on h100x8 \(.*needs .* of 85\.0 GB.*\): .*h100x\d+") as error:
        plan(draft_of(layers=96, intermediate_size=16384), find_cluster("h100x8"))
    assert "\n" not in str(error.value)


def test_what_fits_nowhere_is_reported_with_a_cluster_of_whole_nodes() -> None:
    with pytest.raises(PlanError, match=r"h100x\d+ has enough memory"):
        plan(draft_of(layers=96, intermediate_size=16384, batch_size=112), find_cluster("h100x7"))


def test_memory_that_is_left_free_is_reported_where_the_rest_would_do() -> None:
    def with_memory(gigabytes: float) -> Cluster:
        return dataclasses.replace(H100S, device=dataclasses.replace(H100S.device, memory_bytes=int(1e9 * gigabytes)))

    draft, needs = draft_of(layers=32, batch_size=4096), "needs 2.0 of {} GB at least, 0.9 of them optimizer{}"
    for gigabytes, free in ((1.8, ""), (2.0, ", and plans leave 6% free")):
        with pytest.raises(PlanError, match=re.escape(needs.format(gigabytes, f"{free})"))):
            plan(draft, with_memory(gigabytes))
    assert plan(draft, with_memory(2.2)).ranked


def test_what_would_fit_with_more_settings_open_is_reported() -> None:
    """What is given on the command line is to be left out: `auto` would close all other settings."""
    config, mesh = config_of(layers=32, batch_size=4096), {"mesh.pipeline", "mesh.tensor", "mesh.context"}
    closed = {"train.grad_accumulation", "schedule.remat"}
    cure = r"leave out train\.grad_accumulation=1 schedule\.remat=none, so that the plan chooses them"
    with pytest.raises(PlanError, match=f": {cure}$"):
        plan(open_draft(config, fixed=closed | mesh), H100S)
    cured = plan(open_draft(config, fixed=mesh), H100S)
    assert {each.config.mesh.expert for each in cured.ranked} >= {1, 2, 4}, "everything else is searched as before"


def test_what_would_fit_if_it_were_auto_is_reported_where_other_settings_are() -> None:
    config, some = config_of(layers=32, batch_size=4096), frozenset({"mesh.data", "mesh.expert", "optimizer.zero"})
    with pytest.raises(PlanError, match=r": use train\.grad_accumulation=auto schedule\.remat=auto$"):
        plan(Draft(**sections_of(config), open=some), H100S)
    opened = some | {"train.grad_accumulation", "schedule.remat"}
    assert plan(Draft(**sections_of(config), open=opened), H100S).ranked


def test_a_stage_of_zero_that_has_axes_is_not_to_be_left_out() -> None:
    """Without it, a plan is refused, because the axes leave it no choice."""
    config = dataclasses.replace(
        config_of(layers=32, batch_size=4096), optimizer=OptimizerConfig(zero=1, zero_axes=("data",))
    )
    given = {"optimizer.zero", "mesh.pipeline", "mesh.tensor", "mesh.context"}
    closed = {"train.grad_accumulation", "schedule.remat"}
    with pytest.raises(
        PlanError, match=r": leave out train\.grad_accumulation=1 schedule\.remat=none, so that the plan"
    ):
        plan(open_draft(config, fixed=given | closed), H100S)
    assert plan(open_draft(config, fixed=given), H100S).ranked


@pytest.mark.parametrize("settings", ["train.batch_size=-5", "train.batch_size=0", "model.num_layers=0"])
def test_impossible_numbers_are_refused_before_planning(settings: str) -> None:
    with pytest.raises(UserError, match=rf"^{settings} must be at least 1"):
        plan(load_draft(None, [settings, "mesh.expert=auto"]), H100S)


def test_a_batch_that_cannot_be_cut_is_reported_with_one_that_can() -> None:
    without_stages = dataclasses.replace(draft_of(batch_size=3), open=PLANNED - {"mesh.pipeline"})
    with pytest.raises(PlanError, match=r"train\.batch_size=3 .*use"):
        plan(without_stages, H100S)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (  # with one expert rank there is nothing to migrate, which is the first reason there
            "model.moe.capacity_factor=null migration.enabled=true migration.replicas=2 optimizer.zero=1",
            r"data=8 expert=2: migration\.replicas=2 with optimizer\.zero=1, which ",
        ),
        (
            "mesh.pipeline=2 mesh.tensor=1 train.batch_size=8 optimizer.name=sgd",
            r"data=8 pipeline=2: optimizer\.name=sgd must be ",
        ),
        (
            "train.batch_size=7 mesh.tensor=1 mesh.pipeline=1 model.moe.capacity_factor=null exchange.hot_experts=2",
            r"data=8 expert=2: train\.batch_size=7 is not divisible by .*: use 16",
        ),
        (
            "train.batch_size=8 mesh.tensor=1 mesh.pipeline=1 schedule.policy=unified schedule.microbatches=3",
            r"data=16: train\.batch_size=8 is not divisible by .* × schedule\.microbatches=3 = 48: use 48",
        ),
    ],
)
def test_the_reason_to_mend_first_holds_on_all_meshes_and_is_the_batch_only_if_another_would_do(
    settings: str, reason: str
) -> None:
    given = settings.split()
    draft = open_draft(load_draft(None, [*SMALL, *given]), fixed={each.partition("=")[0] for each in given})
    with pytest.raises(PlanError, match=rf"^nothing trains on h100x16 \({reason}"):
        plan(draft, H100S)


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ("mesh.expert=auto mesh.tensor=3", r"\(mesh.tensor=3 is no mesh of 16 devices: use mesh.tensor=2\)"),
        (
            "mesh.data=auto mesh.pipeline=7",
            r"mesh.pipeline=7 × mesh.tensor=1 is no mesh of 16 devices: use mesh.pipeline=2\)",
        ),
        ("mesh.data=2 mesh.tensor=auto mesh.expert=3 mesh.context=5", "is no mesh of 16 devices: use auto for all"),
        ("mesh.data=auto mesh.context=0", "mesh.context=0 is no mesh of 16 devices: use mesh.context=1"),
    ],
)
def test_no_mesh_of_these_devices_is_reported_with_the_nearest_one(settings: str, cure: str) -> None:
    with pytest.raises(PlanError, match=cure):
        plan(load_draft(None, [*SMALL, *settings.split()]), H100S)


def test_axes_that_fit_no_mesh_are_to_be_left_out_where_all_else_is_open() -> None:
    config = load_draft(None, [*SMALL, "mesh.data=2", "mesh.expert=3", "mesh.context=5"])
    given = {"mesh.data", "mesh.expert", "mesh.context"}
    with pytest.raises(PlanError, match=r"mesh.context=5 is no mesh of 16 devices: leave them out\)$"):
        plan(open_draft(config, fixed=given), H100S)
    assert [*meshes(open_draft(config), H100S)]
